"""Models of a few hundred kilobytes with random weights, for tests and first steps without a file.

They do not speak: their text is noise, but the same noise every time. They read bytes, so any text
is a prompt. The shapes are odd on purpose (nine heads over three, a head size that is not
hidden / heads, a vocabulary that is no multiple of anything): code that assumes round sizes fails
here first.

The rule: weights are drawn wide (0.3, where real models start at 0.02), so that greedy outputs vary
and a wrong cache or mask changes them.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.checkpoint.dummy import DummyCheckpoint
from slotzero.errors import ModelNotFoundError
from slotzero.models.config import ARCHITECTURES
from slotzero.text.tokenizer import Tokenizer

PREFIX = "tiny:"
_COMMON = {
    "dtype": "float32",  # weights this large make of a rounding in bfloat16 another answer
    "hidden_act": "silu",
    "vocab_size": 259,  # 256 bytes, <bos>, <eos>, <pad>
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
}


def _config(
    model_type: str, layers: int, hidden: int, inner: int, heads: tuple[int, int, int], **more: Any
) -> Mapping[str, Any]:
    num_heads, num_kv_heads, head_dim = heads
    return _COMMON | {
        "model_type": model_type,
        "architectures": [ARCHITECTURES[model_type]],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": False,
        **more,
    }


def _layers(letters: str) -> list[str]:
    kinds = {"s": "sliding_attention", "f": "full_attention", "r": "linear_attention"}
    return [kinds[letter] for letter in letters]


TINY_CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "llama": _config("llama", 2, 64, 176, (4, 2, 16)),
    "smollm2": _config(
        "llama", 3, 144, 200, (9, 3, 16), rope_theta=100000.0, tie_word_embeddings=True
    ),
    "mistral": _config("mistral", 2, 96, 160, (4, 1, 32), sliding_window=None),
    "qwen2": _config("qwen2", 2, 112, 144, (7, 1, 16), tie_word_embeddings=True, rms_norm_eps=1e-6),
    "qwen3": _config("qwen3", 3, 64, 136, (4, 2, 32), rms_norm_eps=1e-6, rope_theta=1000000.0),
    "gemma3": _config(
        "gemma3_text", 4, 64, 136, (4, 2, 32), hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=24, sliding_window=24, layer_types=_layers("ssfs"),
        rope_theta=1000000.0, rope_local_base_freq=10000.0, tie_word_embeddings=True,
        initializer_range=0.05,  # its embeddings are multiplied by 8, and would drown the rest
    ),
    "gemma4": _config(
        "gemma4_text", 6, 64, 72, (4, 2, 24), hidden_activation="gelu_pytorch_tanh",
        sliding_window=24, layer_types=_layers("sfssff"), rope_parameters={
            "full_attention": {
                "rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        per_layer_config={str(i): {"head_dim": 40, "num_key_value_heads": 1} for i in (1, 4, 5)},
        attention_k_eq_v=True, num_kv_shared_layers=3, use_double_wide_mlp=True,
        hidden_size_per_layer_input=12, vocab_size_per_layer_input=259, enable_moe_block=False,
        final_logit_softcapping=30.0, tie_word_embeddings=True, initializer_range=0.05,
    ),
    "gpt-oss": _config(
        "gpt_oss", 3, 64, 40, (4, 2, 16), sliding_window=24, layer_types=_layers("sfs"),
        attention_bias=True, num_local_experts=6, num_experts_per_tok=4,
    ),
    "mimo-v2": _config(
        "mimo_v2_flash", 3, 64, 136, (8, 2, 24), v_head_dim=16, sliding_window=25,
        layer_types=_layers("fss"), n_routed_experts=5, num_experts_per_tok=2,
        moe_intermediate_size=40, attention_value_scale=0.707,
        rope_parameters={
            "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
        },
    ),
    "deepseek-v2": _config(
        "deepseek_v2", 3, 64, 136, (4, 4, 8), kv_lora_rank=32, q_lora_rank=None,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=1,
        n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=40,
        topk_method="group_limited_greedy", n_group=3, topk_group=2, routed_scaling_factor=2.0,
    ),
    "deepseek-v3": _config(
        "deepseek_v3", 3, 64, 136, (5, 5, 8), kv_lora_rank=48, q_lora_rank=40,
        qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24, first_k_dense_replace=1,
        n_routed_experts=8, num_experts_per_tok=3, n_shared_experts=1, moe_intermediate_size=40,
        n_group=4, topk_group=2, routed_scaling_factor=2.5, norm_topk_prob=True,
        num_nextn_predict_layers=1,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
            "original_max_position_embeddings": 128,
        },
    ),
    "qwen3-next": _config(
        "qwen3_next", 4, 64, 136, (4, 2, 32), rms_norm_eps=1e-6, layer_types=_layers("rfrr"),
        linear_num_value_heads=6, linear_num_key_heads=3, linear_value_head_dim=12,
        linear_key_head_dim=8, linear_conv_kernel_dim=4, num_experts=6, num_experts_per_tok=2,
        moe_intermediate_size=40, shared_expert_intermediate_size=24, mlp_only_layers=[2],
        partial_rotary_factor=0.25, num_nextn_predict_layers=1,
    ),
    "falcon-h1": _config(
        "falcon_h1", 3, 64, 136, (4, 2, 16), mamba_d_ssm=60, mamba_n_heads=6, mamba_d_head=10,
        mamba_n_groups=2, mamba_d_state=12, mamba_d_conv=4, mamba_rms_norm=False,
        embedding_multiplier=1.5, lm_head_multiplier=0.7, key_multiplier=0.8,
        attention_in_multiplier=0.9, attention_out_multiplier=1.2, ssm_in_multiplier=1.1,
        ssm_out_multiplier=0.6, ssm_multipliers=[0.9, 1.1, 0.7, 1.3, 0.8],
        mlp_multipliers=[0.7, 1.4],
    ),
    "granite-hybrid": _config(
        "granitemoehybrid", 4, 64, 40, (4, 2, 16), layer_types=_layers("rrfr"),
        shared_intermediate_size=56, num_local_experts=5, num_experts_per_tok=2, mamba_n_heads=8,
        mamba_n_groups=1, mamba_d_state=12, mamba_d_conv=4, mamba_expand=2,
        embedding_multiplier=1.5, attention_multiplier=0.3, residual_multiplier=0.6,
        logits_scaling=1.7,
    ),
    "nemotron-h": _config(
        "nemotron_h", 6, 64, 136, (4, 2, 16), hybrid_override_pattern="M-M*EM",
        layer_norm_epsilon=1e-5, mamba_num_heads=6, mamba_head_dim=10, n_groups=3,
        ssm_state_size=12, conv_kernel=4, use_conv_bias=True, mlp_hidden_act="relu2",
        n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=40,
        moe_shared_expert_intermediate_size=24, n_group=2, topk_group=1,
        routed_scaling_factor=1.5, norm_topk_prob=True,
    ),
    "olmo3": _config("olmo3", 4, 64, 136, (4, 4, 16), sliding_window=24,
                     layer_types=_layers("sssf"), rope_theta=500000.0),
}  # fmt: skip


_ASSISTED = TINY_CONFIGS["gemma4"]
ASSISTANTS: Mapping[str, Mapping[str, Any]] = {
    "gemma4-assistant": _COMMON | {
        "model_type": "gemma4_assistant",
        "architectures": ["Gemma4AssistantForCausalLM"],
        "backbone_hidden_size": _ASSISTED["hidden_size"],
        "initializer_range": 0.05,
        "text_config": {
            **_ASSISTED, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
            "layer_types": _layers("ssf"), "num_kv_shared_layers": 3, "use_double_wide_mlp": False,
            "per_layer_config": {"2": _ASSISTED["per_layer_config"]["1"]},
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": None,
        },
    },
}  # fmt: skip
"""No models of their own: --speculative mtp takes one beside its target."""


def tiny_names() -> list[str]:
    return [PREFIX + kind for kind in TINY_CONFIGS]


def tiny_checkpoint(name: str) -> DummyCheckpoint:
    config = {**TINY_CONFIGS, **ASSISTANTS}.get(name.removeprefix(PREFIX))
    if config is None:
        raise ModelNotFoundError(f"no tiny model {name!r}; use one of {', '.join(tiny_names())}")
    return DummyCheckpoint(
        config,
        name,
        eos_token_ids=(config["eos_token_id"],),
        make_tokenizer=Tokenizer.bytes_tokenizer,
    )
