"""gpt-oss: experts with clamped SwiGLU, attention sinks, and a window in every second layer."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    attention_heads,
    experts,
    kv_groups,
    layer_groups,
    model,
    pre_norms,
)
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import positive, require
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]

NAMES = MoeNames(
    router="mlp.router",
    gate=None,
    up="mlp.experts.gate_up_proj",
    down="mlp.experts.down_proj",
    shared=None,
    is_joint=True,
    is_transposed=True,
    alternates=True,
)


def parse(config: Config) -> ModelConfig:
    require(config, "swiglu_alpha", 1.702)
    require(config, "swiglu_limit", 7.0)
    names = layer_groups(config, lambda layer: layer % 2 == 0)
    bias = bool(config.get("attention_bias", False))
    groups = kv_groups(config, names, attention_heads(config), thetas=(150000.0, 150000.0))
    hidden = positive(config, "hidden_size")
    mixers = {
        name: Attention(group, hidden, qkv_bias=bias, out_bias=bias, sinks="sinks")
        for name, group in groups.items()
    }
    shape = experts(
        config, "num_local_experts", "num_experts_per_tok", "intermediate_size",
        activation="clamped_silu", scores="softmax_of_chosen",
    )  # fmt: skip
    mlp = MoeMlp(positive(config, "hidden_size"), shape, NAMES, has_bias=True)
    norms = pre_norms(config)
    return model(config, [DecoderLayer(norms, mixers[name], mlp) for name in names])


FAMILIES = (
    Family(
        "gpt_oss", "GptOssForCausalLM", parse, frozenset({"num_local_experts", "num_experts"}),
        tiny={
            "gpt-oss": tiny(
                "gpt_oss", "GptOssForCausalLM", 3, 64, 40, (4, 2, 16), sliding_window=24,
                layer_types=layer_types("sfs"), attention_bias=True, num_local_experts=6,
                num_experts_per_tok=4,
            ),
        },
    ),
)  # fmt: skip
