"""Oracles: tiny random models of every family, and the tokens that transformers generates."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

ROPE = {"rope_theta": 10000.0}


@dataclass(frozen=True)
class Family:
    """One architecture with one unusual shape."""

    model: str
    config: dict[str, Any] = field(default_factory=dict)
    causal: str = ""
    """Name of the model class, if it does not follow from the config class."""
    stored: dict[str, str] = field(default_factory=dict)
    """Parts of names in published checkpoints, by what transformers stores instead."""
    query_norm: float = 1.0
    """Scale of the query norm's weights. It is small where the scores are not divided by the head
    size, since large scores would hide rounding differences."""


BASE = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 211,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}


def _moe(experts: str = "num_experts") -> dict[str, Any]:
    """Return the fields of six experts; `experts` is the family's name for their number."""
    return {experts: 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}


def _kinds(letters: str) -> list[str]:
    kinds = {"f": "full_attention", "r": "linear_attention", "m": "mlp", "e": "moe"}
    return [kinds[letter] for letter in letters]


FAMILIES = {
    "llama": Family("Llama"),
    "llama-bias": Family("Llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 97}),
    "smollm2": Family(
        "Llama",
        {
            "hidden_size": 144,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "vocab_size": 257,
        },
    ),
    "mistral": Family(
        "Mistral",
        {
            "head_dim": 80,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "sliding_window": None,
        },
    ),
    "qwen2": Family(
        "Qwen2",
        {"head_dim": 96, "hidden_size": 192, "num_attention_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen3": Family(
        "Qwen3",
        {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 3, "vocab_size": 1013},
    ),
    "mistral-window": Family("Mistral", {"head_dim": 32, "sliding_window": 20}),
    "qwen2-window": Family(
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "gemma2": Family(
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 3.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": Family(
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 24,
            "query_pre_attn_scalar": 20,
            "num_hidden_layers": 4,
            "layer_types": [*["sliding_attention"] * 2, "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
            "tie_word_embeddings": True,
        },
        causal="Gemma3",
    ),
    "gemma4": Family(
        "Gemma4Text",
        {
            "head_dim": 24,
            "global_head_dim": 40,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "sliding_window": 24,
            "num_hidden_layers": 7,
            "layer_types": [
                *["sliding_attention", "full_attention"] * 2,
                *["sliding_attention"] * 2,
                "full_attention",
            ],
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 12,
            "vocab_size": 210,  # a multiple of ten: its assistant has clusters of ten tokens
            "vocab_size_per_layer_input": 230,
            "final_logit_softcapping": 30.0,
            "tie_word_embeddings": True,
        },
        causal="Gemma4",
        query_norm=0.35,
    ),
    "gemma4-moe": Family(
        "Gemma4Text",
        {
            "head_dim": 24,
            "global_head_dim": 40,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "layer_types": [*["sliding_attention"] * 2, "full_attention"],
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
            "tie_word_embeddings": True,
        },
        causal="Gemma4",
        query_norm=0.35,
    ),
    "gemma4-own": Family(
        "Gemma4Text",
        {
            "head_dim": 32,
            "global_head_dim": 48,
            "attention_bias": True,
            "sliding_window": 17,
            "num_hidden_layers": 3,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.6,
                    "rope_theta": 1e6,
                    "factor": 2.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        causal="Gemma4",
        query_norm=0.35,
    ),
    "olmo3": Family(
        "Olmo3", {"sliding_window": 17, "num_hidden_layers": 4, "num_key_value_heads": 4}
    ),
    "gpt-oss": Family(
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 24,
            "num_hidden_layers": 3,
            "num_local_experts": 6,
            "num_experts_per_tok": 4,
            "intermediate_size": 96,
            "attention_bias": True,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 150000.0,
                "original_max_position_embeddings": 64,
                "truncate": False,
            },
        },
    ),
    "mimo-v2": Family(
        "MiMoV2Flash",
        {
            "num_attention_heads": 8,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 25,
            "num_hidden_layers": 3,
            "moe_intermediate_size": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "deepseek-v2": Family(
        "DeepseekV2",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "kv_lora_rank": 32,
            "q_lora_rank": None,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_shared_experts": 2,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 2.0,
        },
    ),
    "deepseek-v3": Family(
        "DeepseekV3",
        {
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "hidden_size": 80,
            "num_hidden_layers": 3,
            "kv_lora_rank": 48,
            "q_lora_rank": 40,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 24,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 0.8,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "deepseek-v3.2": Family(
        "DeepseekV32",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "kv_lora_rank": 40,
            "q_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 40,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "n_group": 3,
            "topk_group": 2,
            "index_n_heads": 16,  # few keys have equal scores, relu(...) = 0 for every head
            "index_head_dim": 20,
            "index_topk": 12,
        },
    ),
    "qwen3-next": Family(
        "Qwen3Next",
        {
            "head_dim": 32,
            "num_hidden_layers": 4,
            "layer_types": _kinds("rfrr"),
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 3,
            "linear_value_head_dim": 12,
            "linear_key_head_dim": 8,
            "linear_conv_kernel_dim": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
            "mlp_only_layers": [2],
            "max_position_embeddings": 512,
            "initializer_range": 0.08,
        },
    ),
    "qwen3.5": Family(
        "Qwen3_5Text",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": _kinds("rfr"),
            "linear_num_value_heads": 6,
            "linear_num_key_heads": 3,
            "linear_value_head_dim": 12,
            "linear_key_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "max_position_embeddings": 512,
            "initializer_range": 0.08,
            "rope_parameters": {
                **ROPE,
                "rope_type": "default",
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
        causal="Qwen3_5",
    ),
    "qwen3.5-moe": Family(
        "Qwen3_5MoeText",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "layer_types": _kinds("rfr"),
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_value_head_dim": 8,
            "linear_key_head_dim": 12,
            "linear_conv_kernel_dim": 3,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "shared_expert_intermediate_size": 24,
            "max_position_embeddings": 512,
            "initializer_range": 0.08,
        },
        causal="Qwen3_5Moe",
    ),
    "lfm2": Family(
        "Lfm2",
        {
            "hidden_size": 48,
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "intermediate_size": 160,
            "block_multiple_of": 8,
            "block_ffn_dim_multiplier": 1.1,
            "conv_L_cache": 4,
            "conv_bias": True,
            "max_position_embeddings": 512,
        },
    ),
    "lfm2-moe": Family(
        "Lfm2Moe",
        {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": 512,
        },
    ),
    "kimi-linear": Family(
        "KimiLinear",
        {
            "num_key_value_heads": 4,
            "num_hidden_layers": 3,
            "layer_types": _kinds("rfr"),
            "linear_num_heads": 3,
            "linear_head_dim": 12,
            "linear_conv_kernel_dim": 4,
            "kv_lora_rank": 32,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "moe_intermediate_size": 40,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "max_position_embeddings": 512,
        },
        stored={"layers.0.block_sparse_moe.": "layers.0.mlp."},  # transformers renames all MLPs
    ),
    "bamba": Family(
        "Bamba",
        {
            "num_hidden_layers": 3,
            "attn_layer_indices": [1],
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 32,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "max_position_embeddings": 512,
        },
    ),
    "qwen2-moe": Family(
        "Qwen2Moe",
        {
            **_moe(),
            "num_key_value_heads": 4,
            "shared_expert_intermediate_size": 56,
            "mlp_only_layers": [0],
        },
    ),
    "qwen3-moe": Family(
        "Qwen3Moe", {**_moe(), "head_dim": 32, "norm_topk_prob": True, "decoder_sparse_step": 2}
    ),
    "mixtral": Family(
        "Mixtral",
        {
            **_moe("num_local_experts"),
            "num_attention_heads": 6,
            "head_dim": 16,
            "intermediate_size": 40,
        },
    ),
    "glm4-moe": Family(
        "Glm4Moe",
        {
            **_moe("n_routed_experts"),
            "head_dim": 32,
            "num_hidden_layers": 3,
            "partial_rotary_factor": 0.75,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 3,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "glm4-moe-lite": Family(
        "Glm4MoeLite",
        {
            **_moe("n_routed_experts"),
            "num_key_value_heads": 4,
            "kv_lora_rank": 40,
            "q_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 20,
            "n_shared_experts": 2,
        },
    ),
    "olmoe": Family("Olmoe", {**_moe(), "intermediate_size": 40}),
    "granite-moe": Family(
        "GraniteMoe",
        {
            **_moe("num_local_experts"),
            "intermediate_size": 40,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
        },
    ),
    "minimax-m2": Family(
        "MiniMaxM2",
        {
            **_moe("num_local_experts"),
            "head_dim": 24,
            "rotary_dim": 16,
            "rope_parameters": {**ROPE, "rope_type": "default", "partial_rotary_factor": 2 / 3},
            "intermediate_size": 40,
        },
    ),
    "ernie-moe": Family(
        "Ernie4_5_Moe",
        {
            **_moe("moe_num_experts"),
            "num_hidden_layers": 4,
            "moe_layer_end_index": 2,
            "tie_word_embeddings": True,
        },
    ),
    "dots1": Family(
        "Dots1",
        {
            **_moe("n_routed_experts"),
            "n_shared_experts": 2,
            "num_hidden_layers": 3,
            "first_k_dense_replace": 1,
            "sliding_window": 24,
            "max_window_layers": 2,
            "routed_scaling_factor": 2.5,
            "norm_topk_prob": True,
        },
    ),
    "hunyuan-moe": Family(
        "HunYuanMoEV1",
        {
            "head_dim": 24,
            "intermediate_size": 40,
            "num_experts": 6,
            "moe_topk": 2,
            "attention_bias": True,
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 50.0},
        },
    ),
    "llama4": Family(
        "Llama4Text",
        {
            "head_dim": 16,
            "num_hidden_layers": 4,
            "intermediate_size": 40,
            "intermediate_size_mlp": 88,
            "num_local_experts": 6,
            "num_experts_per_tok": 1,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 24,
            "no_rope_layers": [1, 1, 0, 1],
            "attn_scale": 0.5,
            "floor_scale": 10,
        },
        causal="Llama4",
    ),
    "falcon-h1": Family(
        "FalconH1",
        {
            "head_dim": 16,
            "mamba_d_ssm": 60,
            "mamba_n_heads": 6,
            "mamba_d_head": 10,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_conv": 4,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_chunk_size": 32,
            "projectors_bias": True,
            "mamba_proj_bias": True,
            "attention_bias": True,
            "embedding_multiplier": 1.5,
            "lm_head_multiplier": 0.7,
            "key_multiplier": 0.8,
            "attention_in_multiplier": 0.9,
            "attention_out_multiplier": 1.2,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.6,
            "ssm_multipliers": [0.9, 1.1, 0.7, 1.3, 0.8],
            "mlp_multipliers": [0.7, 1.4],
            "max_position_embeddings": 512,
        },
    ),
    "granite-hybrid": Family(
        "GraniteMoeHybrid",
        {
            "num_hidden_layers": 3,
            "layer_types": _kinds("rfr"),
            "intermediate_size": 40,
            "shared_intermediate_size": 56,
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 12,
            "mamba_d_conv": 3,
            "mamba_chunk_size": 32,
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "max_position_embeddings": 512,
        },
    ),
    "nemotron-h": Family(
        "NemotronH",
        {
            "head_dim": 16,
            "layers_block_type": _kinds("rmfer"),
            "mamba_num_heads": 6,
            "mamba_head_dim": 10,
            "n_groups": 3,
            "ssm_state_size": 12,
            "conv_kernel": 4,
            "chunk_size": 32,
            "time_step_min": 1e-9,  # transformers applies it only in prompts
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 40,
            "moe_shared_expert_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.5,
            "max_position_embeddings": 512,
        },
    ),
    "phi3": Family("Phi3", {"sliding_window": 21, "num_key_value_heads": 4}),
    "granite": Family(
        "Granite",
        {
            "embedding_multiplier": 1.5,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.6,
            "logits_scaling": 1.7,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3": Family("SmolLM3", {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}),
    "smollm3-window": Family(
        "SmolLM3",
        {
            "num_hidden_layers": 3,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 9,
        },
    ),
    "olmo2": Family("Olmo2", {"attention_bias": True}),
    "glm": Family("Glm", {"head_dim": 24, "attention_bias": True}),
    "glm4": Family("Glm4", {"head_dim": 24, "partial_rotary_factor": 0.75}),
    "hunyuan": Family(
        "HunYuanDenseV1",
        {
            "head_dim": 24,
            "attention_bias": True,
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
    "ministral3": Family(
        "Ministral3",
        {
            "head_dim": 24,
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 32,
                "max_position_embeddings": 256,
                "llama_4_scaling_beta": 0.5,
            },
        },
    ),
    "cohere": Family("Cohere", {"logit_scale": 0.25, "attention_bias": True}),
    "cohere2": Family(
        "Cohere2",
        {
            "num_hidden_layers": 4,
            "sliding_window": 17,
            "sliding_window_pattern": 2,
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
        },
    ),
    "exaone4": Family(
        "Exaone4", {"sliding_window": None, "layer_types": _kinds("ff"), "head_dim": 24}
    ),
    "exaone4-window": Family(
        "Exaone4",
        {"num_hidden_layers": 4, "sliding_window": 17, "sliding_window_pattern": 2},
    ),
    "seed-oss": Family("SeedOss", {"head_dim": 24, "attention_out_bias": True}),
    "ernie4.5": Family("Ernie4_5", {"head_dim": 24, "use_bias": True}),
    "arcee": Family("Arcee", {"mlp_bias": True}),
    "rope-linear": Family(
        "Llama", {"rope_parameters": {**ROPE, "rope_type": "linear", "factor": 4.0}}
    ),
    "rope-dynamic": Family(
        "Llama",
        {
            "max_position_embeddings": 48,
            "rope_parameters": {**ROPE, "rope_type": "dynamic", "factor": 4.0},
        },
    ),
    "rope-llama3": Family(
        "Llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope-yarn": Family(
        "Llama",
        {
            "rope_parameters": {
                **ROPE,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "rope-longrope": Family(
        "Phi3",
        {
            "original_max_position_embeddings": 64,
            "partial_rotary_factor": 0.75,
            "sliding_window": 300,
            "rope_parameters": {
                **ROPE,
                "rope_type": "longrope",
                "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
                "long_factor": [1.0, 1.2, 1.9, 3.1, 5.5, 8.0],
            },
        },
    ),
}


HYBRIDS = (
    "mistral-window",
    "qwen2-window",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4-moe",
    "gemma4-own",
    "olmo3",
    "gpt-oss",
    "mimo-v2",
    "llama4",
    "phi3",
    "cohere2",
)
"""Families with sliding-window layers."""

VARIANTS = (
    "granite",
    "smollm3-window",
    "olmo2",
    "glm",
    "ministral3",
    "cohere",
    "exaone4",
    "exaone4-window",
    "seed-oss",
    "ernie4.5",
    "arcee",
    "qwen2-moe",
    "qwen3-moe",
    "mixtral",
    "glm4-moe",
    "glm4-moe-lite",
    "olmoe",
    "granite-moe",
    "dots1",
    "hunyuan-moe",
    "qwen3.5-moe",
    "lfm2-moe",
    "bamba",
)
"""Families that combine what others have: only their config is their own, so that one test of each
is enough."""

RECURRENT = (
    "qwen3-next",
    "falcon-h1",
    "granite-hybrid",
    "nemotron-h",
    "qwen3.5",
    "qwen3.5-moe",
    "lfm2",
    "lfm2-moe",
    "kimi-linear",
    "bamba",
)
"""Families with recurrent layers."""


Answer = tuple[list[int], torch.Tensor]
"""Token ids, and the logits of each: [tokens, vocab]."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""RoPE types whose angles depend on the current context length."""


@dataclass(frozen=True)
class Oracle:
    folder: Path
    model: Any
    rotary: Any
    vocab_size: int
    known: dict[tuple[int, ...], Answer] = field(default_factory=dict)
    """The longest answer computed so far for each prompt."""

    @property
    def path(self) -> str:
        return str(self.folder)

    def generate(
        self, prompt: list[int], num_tokens: int = 64, guess: Sequence[int] = ()
    ) -> Answer:
        """Return the greedy tokens of transformers and the logits of each.

        If `guess` is the right answer, one pass over prompt and guess computes all logits.
        Otherwise the guess is ignored, and the tokens are computed one by one with transformers'
        KV cache.
        """
        key = tuple(prompt)
        if key not in self.known or len(self.known[key][0]) < num_tokens:
            answer = self._confirm(prompt, guess) if len(guess) == num_tokens else None
            self.known[key] = answer or self._decode(prompt, num_tokens)
        tokens, logits = self.known[key]
        return tokens[:num_tokens], logits[:num_tokens]

    @torch.no_grad()
    def prompt_logits(self, prompt: list[int]) -> torch.Tensor:
        """Return the logits after each token of a prompt but the last, which one pass computes."""
        return self.model(torch.tensor([prompt]), use_cache=False).logits[0, :-1].float()

    @torch.no_grad()
    def _confirm(self, prompt: list[int], guess: Sequence[int]) -> Answer | None:
        if self.rotary is not None and self.rotary.rope_type in LENGTH_DEPENDENT:
            return None
        ids = torch.tensor([[*prompt, *guess[:-1]]])
        logits = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 :].float()
        tokens = logits.argmax(-1).tolist()
        return (tokens, logits) if tokens == list(guess) else None

    @torch.no_grad()
    def _decode(self, prompt: list[int], num_tokens: int) -> Answer:
        # transformers grows dynamic RoPE in place and keeps it, so reset it for every request
        if self.rotary is not None:
            self.model.get_decoder().rotary_emb = copy.deepcopy(self.rotary)
        ids, cache, begin, tokens, rows = torch.tensor([prompt]), None, 0, [], []
        for _ in range(num_tokens):
            out = self.model(
                ids, position_ids=begin + torch.arange(ids.shape[1])[None], past_key_values=cache,
                use_cache=True,
            )  # fmt: skip
            begin += ids.shape[1]
            cache = out.past_key_values
            rows.append(out.logits[0, -1].float())
            tokens.append(int(rows[-1].argmax()))
            ids = torch.tensor([[tokens[-1]]])
        return tokens, torch.stack(rows)


def build(family: Family, folder: Path, dtype: torch.dtype = torch.float32) -> Oracle:
    torch.manual_seed(1)
    config = getattr(transformers, f"{family.model}Config")(**{**BASE, **family.config})
    config._attn_implementation = "eager"  # the one that supports sinks and soft caps
    model = getattr(transformers, f"{family.causal or family.model}ForCausalLM")(config).eval()
    randomise(model, family.query_norm, dtype)
    model.save_pretrained(folder)
    if family.stored:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        for theirs, published in family.stored.items():
            tensors = {name.replace(theirs, published): t for name, t in tensors.items()}
        save_file(tensors, file, {"format": "pt"})
    rotary = copy.deepcopy(getattr(model.get_decoder(), "rotary_emb", None))
    return Oracle(folder, model, rotary, config.vocab_size)


def randomise(model: Any, query_norm: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
    """Draw the parameters that transformers initialises to constants, and convert all to dtype."""
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(dtype)  # buffers (RoPE frequencies) stay float32
        if name.endswith("A_log"):  # some states decay slowly, some quickly
            torch.nn.init.uniform_(parameter, -4.0, 1.0)
        elif name.endswith(".D"):
            torch.nn.init.normal_(parameter, 0, 0.5)
        elif name.endswith("bias"):  # transformers initialises them to zero, which hides mistakes
            torch.nn.init.normal_(parameter, 0, 0.2)
        elif "norm" in name:
            size = query_norm if "q_norm" in name else 1.0
            torch.nn.init.normal_(parameter, size, 0.1 * size)
        elif name.endswith(("router.scale", "per_expert_scale")):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    for name, buffer in model.named_buffers():
        if name.endswith(("correction_bias", "expert_bias")):
            torch.nn.init.normal_(buffer, 0, 0.2)
        elif name.endswith("layer_scalar"):
            buffer.copy_(torch.nn.init.uniform_(buffer, 0.5, 1.5).to(dtype))  # rounded as on disk
