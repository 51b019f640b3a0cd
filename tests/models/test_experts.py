"""Tests of families with experts: published configs, refused configs, and MTP layers."""

import pytest

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.tiny import tiny_configs
from slotzero.errors import UnsupportedModelError
from slotzero.models.families.family import family_of, parse_config

COMMON = {"hidden_act": "silu", "vocab_size": 1000, "tie_word_embeddings": False}
PUBLISHED = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": 128,
        "attention_bias": False, "decoder_sparse_step": 1, "hidden_size": 2048,
        "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
        "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
        "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": None,
        "use_sliding_window": False,
    },
    "GLM-4.5-Air": {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "attention_bias": True,
        "head_dim": 128, "hidden_size": 4096, "partial_rotary_factor": 0.5,
        "intermediate_size": 10944, "max_position_embeddings": 131072,
        "moe_intermediate_size": 1408, "norm_topk_prob": True, "num_attention_heads": 96,
        "n_group": 1, "topk_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "routed_scaling_factor": 1.0, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "num_hidden_layers": 46, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 1000000, "num_nextn_predict_layers": 1,
        "use_qk_norm": False,
    },
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
        "attn_type_list": [1] * 62, "head_dim": 128, "hidden_size": 3072,
        "intermediate_size": 1536, "max_position_embeddings": 196608, "num_attention_heads": 48,
        "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer",
        "rms_norm_eps": 1e-06, "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid",
        "shared_intermediate_size": 0, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True,
    },
    "Kimi-K2": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
        "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 131072,
        "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 384,
        "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 64,
        "num_nextn_predict_layers": 0, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 50000.0,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 2.827, "scoring_func": "sigmoid", "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 128,
    },
    "Llama-4-Scout": {
        "architectures": ["Llama4ForCausalLM"], "model_type": "llama4_text",
        "attention_bias": False, "attention_chunk_size": 8192, "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 8192,
        "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1,
        "max_position_embeddings": 10485760, "no_rope_layers": [], "num_attention_heads": 40,
        "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8,
        "num_local_experts": 16, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
        "rope_scaling": {
            "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        },
        "use_qk_norm": True,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "num_sparse", "top_k", "groups", "rotary_dim"),
    [
        ("Qwen3-30B-A3B", 48, 8, ["full"], 128),
        ("GLM-4.5-Air", 45, 8, ["full"], 64),
        ("MiniMax-M2", 62, 8, ["full"], 64),
        ("Kimi-K2", 60, 8, ["latent"], 64),
        ("Llama-4-Scout", 48, 1, ["chunked", "full"], 128),
    ],
)
def test_published_configs(name, num_sparse, top_k, groups, rotary_dim):
    model = parse_config({**COMMON, **PUBLISHED[name]})
    assert sum(layer.moe is not None for layer in model.layers) == num_sparse
    assert model.experts.top_k == top_k
    assert [group.name for group in model.groups] == groups
    assert model.groups[0].rope.rotary_dim == rotary_dim


def test_a_model_type_with_the_architecture_of_another():
    config = {"model_type": "kimi_k2"}
    assert family_of(config).architecture == "DeepseekV3ForCausalLM"
    with pytest.raises(UnsupportedModelError, match="contradicts architecture Mixtral"):
        family_of({**config, "architectures": ["MixtralForCausalLM"]})


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("qwen3-moe", "use_sliding_window", True),
        ("qwen2-moe", "use_sliding_window", True),
        ("mixtral", "num_experts", 4),
        ("glm4-moe", "scoring_func", "softmax"),
        ("glm4-moe", "topk_method", "greedy"),
        ("glm4-moe-lite", "attention_bias", True),
        ("olmoe", "clip_qkv", 8.0),
        ("granite-moe", "num_local_experts", None),
        ("minimax-m2", "qk_norm_type", "per_head"),
        ("minimax-m2", "scoring_func", "softmax"),
        ("minimax-m2", "shared_intermediate_size", 64),
        ("minimax-m2", "attn_type_list", [0, 1]),
        ("ernie-moe", "use_bias", True),
        ("ernie-moe", "moe_norm_min", 0.5),
        ("ernie-moe", "moe_use_aux_free", False),
        ("ernie-moe", "moe_layer_start_index", [1, 1]),
        ("dots1", "scoring_func", "softmax"),
        ("dots1", "use_sliding_window", True),
        ("hunyuan-moe", "moe_topk", [2, 3]),
        ("hunyuan-moe", "moe_intermediate_size", [48, 48]),
        ("hunyuan-moe", "use_cla", True),
        ("hunyuan-moe", "num_shared_expert", 2),
        ("hunyuan-moe", "attention_head_dim", 32),
        ("llama4", "num_experts_per_tok", 2),
        ("llama4", "attention_chunk_size", 0),
        ("llama4", "no_rope_layers", [1, 0]),
        ("llama4", "layer_types", ["full_attention"] * 4),
        ("llama", "attention_chunk_size", 64),
        ("llama", "attn_temperature_tuning", True),
    ],
)
def test_configs_are_refused_by_name(kind, field, value):
    with pytest.raises(UnsupportedModelError, match=field):
        parse_config({**tiny_configs()[kind], field: value})


def test_trees_in_chunks_are_refused():
    with pytest.raises(UnsupportedModelError, match="chunked attention"):
        LLM("tiny:llama4", backend="eager", speculative="eagle3", speculative_topk=2)


def test_mtp_layers_with_attention_change_no_token():
    answers = []
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for more in ({}, {"speculative": "mtp"}):
        llm = LLM("tiny:glm4-moe", backend="eager", max_num_seqs=2, show_progress=False, **more)
        made = llm.generate(["a first prompt", "b"], params, use_tqdm=False)
        answers.append([output.outputs[0].token_ids for output in made])
    assert answers[0] == answers[1] and llm.engine.speculation.num_drafts > 0
