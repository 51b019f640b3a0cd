"""Bamba: Mamba-2 or attention in each layer, and a dense MLP."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.dense_mlp import MlpNames
from slotzero.models.config import FULL, ModelConfig, ModelNames
from slotzero.models.families.family import Family
from slotzero.models.families.mamba import ATTENTION, hybrid_layers, mamba_mixer
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_group,
    model,
    partial_rope,
    pre_norms,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]

NAMES = ModelNames(final_norm="model.final_layernorm")


def parse(config: Config) -> ModelConfig:
    num_layers, full = positive(config, "num_hidden_layers"), config.get("attn_layer_indices") or ()
    kinds = [
        "full_attention" if layer in full else "linear_attention" for layer in range(num_layers)
    ]
    kinds = hybrid_layers({**config, "layer_types": kinds})
    inner = int((config.get("mamba_expand") or 2) * positive(config, "hidden_size"))
    attention, mamba = _attention(config, kinds), mamba_mixer(config, inner, norm_size=inner)
    norms = pre_norms(config, mlp="pre_ff_layernorm")
    mlp = dense_mlp(config, names=MlpNames.below("feed_forward"))
    layers = [DecoderLayer(norms, attention if kind == ATTENTION else mamba, mlp) for kind in kinds]
    return model(config, layers, names=NAMES)


def _attention(config: Config, kinds: list[str]) -> Attention:
    layers = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    rope, bias = partial_rope(config, 10000.0, 0.5), bool(config.get("attention_bias", False))
    group = kv_group(config, FULL, layers, attention_heads(config), rope)
    return Attention(group, positive(config, "hidden_size"), qkv_bias=bias, out_bias=bias)


FAMILIES = (
    Family(
        "bamba", "BambaForCausalLM", parse, frozenset({"partial_rotary_factor"}),
        tiny={
            "bamba": tiny(
                "bamba", "BambaForCausalLM", 3, 64, 136, (4, 2, 16), attn_layer_indices=[1],
                mamba_n_heads=8, mamba_d_head="auto", mamba_n_groups=2, mamba_d_state=12,
                mamba_d_conv=4, mamba_expand=2, mamba_conv_bias=True, mamba_proj_bias=False,
            ),
        },
    ),
)  # fmt: skip
