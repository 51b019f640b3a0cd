"""MiMo-V2-Flash: values narrower than keys; sinks and more KV heads in sliding layers; experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.models.blocks.attention import Attention, AttentionScales
from slotzero.models.blocks.moe import MoeMlp
from slotzero.models.config import SLIDING, ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_group,
    layer_groups,
    model,
    pre_norms,
    rope_of,
    sigmoid_experts,
    sparse_layers,
)
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import multiplier, positive
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    names = layer_groups(config, lambda layer: layer > 0 and (layer + 1) % 6 != 0)
    mixers = {name: _attention(config, name, names) for name in dict.fromkeys(names)}
    dense, moe = dense_mlp(config), MoeMlp(positive(config, "hidden_size"), sigmoid_experts(config))
    norms, sparse = pre_norms(config), sparse_layers(config, num_dense=1)
    return model(
        config,
        [
            DecoderLayer(norms, mixers[name], moe if is_sparse else dense)
            for name, is_sparse in zip(names, sparse, strict=True)
        ],
    )


def _attention(config: Config, name: str, names: list[str]) -> Attention:
    is_sliding, heads = name == SLIDING, attention_heads(config)
    if is_sliding:
        heads = replace(heads, num_kv_heads=2 * heads.num_kv_heads)
    layers = [layer for layer, group in enumerate(names) if group == name]
    rope = rope_of(config, name, 1e4 if is_sliding else 5e6)
    return Attention(
        kv_group(config, name, layers, heads, rope),
        positive(config, "hidden_size"),
        qkv_bias=bool(config.get("attention_bias", False)),
        sinks="attention_sink_bias" if is_sliding else None,
        scales=AttentionScales(v=multiplier(config, "attention_value_scale")),
    )


FAMILIES = (
    Family(
        "mimo_v2_flash", "MiMoV2FlashForCausalLM", parse,
        frozenset({"n_routed_experts", "v_head_dim", "attention_value_scale"}),
        tiny={
            "mimo-v2": tiny(
                "mimo_v2_flash", "MiMoV2FlashForCausalLM", 3, 64, 136, (8, 2, 24), v_head_dim=16,
                sliding_window=25, layer_types=layer_types("fss"), n_routed_experts=5,
                num_experts_per_tok=2, moe_intermediate_size=40, attention_value_scale=0.707,
                rope_parameters={
                    "full_attention": {"rope_theta": 5e6, "partial_rotary_factor": 0.334},
                    "sliding_attention": {"rope_theta": 1e4, "partial_rotary_factor": 0.334},
                },
            ),
        },
    ),
)  # fmt: skip
