"""MiniMax-M2: norms over all query heads and all key heads, rotation in part, sigmoid experts."""

from collections.abc import Mapping
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.moe import MoeMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.mixtral import NAMES
from slotzero.models.families.standard import (
    attention_heads,
    experts,
    partial_rope,
    sparse_model,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive, require

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    for field, value in {
        "qk_norm_type": "per_layer",
        "use_qk_norm": True,
        "scoring_func": "sigmoid",
        "use_routing_bias": True,
        "shared_intermediate_size": 0,
    }.items():
        require(config, field, value)
    if set(config.get("attn_type_list") or ()) - {1}:
        raise UnsupportedModelError(
            "config field attn_type_list contains other values than 1 (full attention), which are "
            "not implemented"
        )
    heads = attention_heads(config, norms_whole=True)
    rotated = config.get("rotary_dim")
    rope = partial_rope(config, 5e6, 1.0 if rotated is None else rotated / heads.head_dim)
    shape = experts(
        config, "num_local_experts", "num_experts_per_tok", "intermediate_size",
        scores="sigmoid", is_corrected=True, is_normed=True,
    )  # fmt: skip
    attention = llama_attention(rope, qkv_bias=False, out_bias=False, heads=heads, qk_norm="whole")
    first = positive(config, "num_hidden_layers")
    mtp = range(first, first + (config.get("num_mtp_modules") or 0))
    return sparse_model(
        config,
        attention,
        MoeMlp(positive(config, "hidden_size"), shape, NAMES),
        ignored=tuple(f"model.layers.{layer}." for layer in mtp),
    )


FAMILIES = (
    Family(
        "minimax_m2", "MiniMaxM2ForCausalLM", parse,
        frozenset({"num_local_experts", "partial_rotary_factor", "use_qk_norm"}),
        tiny={
            "minimax-m2": tiny(
                "minimax_m2", "MiniMaxM2ForCausalLM", 2, 64, 40, (6, 2, 16), rotary_dim=8,
                num_local_experts=6, num_experts_per_tok=2, rope_theta=5000000.0,
            ),
        },
    ),
)  # fmt: skip
