"""OLMo 3: norms after each block, norms over all query heads and all key heads, sliding attention.

Every fourth layer has full attention.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.attention import Attention
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_groups,
    layer_groups,
    model,
    pre_norms,
)
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import positive
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    names = layer_groups(config, lambda layer: (layer + 1) % 4 != 0)
    bias = bool(config.get("attention_bias", False))
    heads = attention_heads(config, norms_whole=True)
    groups = kv_groups(config, names, heads, thetas=(5e5, 5e5), scales_full_only=True)
    hidden = positive(config, "hidden_size")
    mixers = {
        name: Attention(group, hidden, qkv_bias=bias, out_bias=bias, qk_norm="whole")
        for name, group in groups.items()
    }
    norms = pre_norms(
        config,
        input=None,
        post_mixer="post_attention_layernorm",
        mlp=None,
        post_mlp="post_feedforward_layernorm",
    )
    mlp = dense_mlp(config)
    return model(config, [DecoderLayer(norms, mixers[name], mlp) for name in names])


FAMILIES = (
    Family(
        "olmo3", "Olmo3ForCausalLM", parse,
        tiny={
            "olmo3": tiny(
                "olmo3", "Olmo3ForCausalLM", 4, 64, 136, (4, 4, 16), sliding_window=24,
                layer_types=layer_types("sssf"), rope_theta=500000.0,
            ),
        },
    ),
)  # fmt: skip
