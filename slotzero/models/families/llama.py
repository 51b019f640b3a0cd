"""Llama 2 and 3, SmolLM2, and the architecture that many families are variants of.

Its layers are pre-norm, with grouped-query attention and a gated MLP.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from slotzero.kernels.types import Heads
from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.dense_mlp import DenseMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    IsSliding,
    attention_heads,
    dense_mlp,
    kv_groups,
    layer_groups,
    model,
    never,
    pre_norms,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive
from slotzero.models.layer import DecoderLayer, LayerNorms

Config = Mapping[str, Any]


def parse_llama(config: Config) -> ModelConfig:
    return llama_like(config)


def llama_like(
    config: Config,
    norms: LayerNorms | None = None,
    mlp: DenseMlp | None = None,
    outside: Config | None = None,
    **attention: Any,
) -> ModelConfig:
    """Return a model of Llama's shape.

    `norms` and `mlp` replace Llama's. `outside` overrides fields of ModelConfig; for `attention`,
    see llama_attention.
    """
    norms, mlp = norms or pre_norms(config), mlp or dense_mlp(config)
    layers = [DecoderLayer(norms, each, mlp) for each in llama_attention(config, **attention)]
    return model(config, layers, **(outside or {}))


def llama_attention(
    config: Config,
    qkv_bias: bool | None = None,  # None: attention_bias decides
    out_bias: bool | None = None,
    is_sliding: IsSliding = never,
    heads: Heads | None = None,
    groups: Config | None = None,
    **attention: Any,
) -> list[Attention]:
    """Return the attention of each layer.

    `heads` replaces Llama's, `groups` are arguments of kv_groups, and `attention` overrides fields
    of Attention.
    """
    bias, names = bool(config.get("attention_bias", False)), layer_groups(config, is_sliding)
    found = kv_groups(config, names, heads or attention_heads(config), **(groups or {}))
    mixers = {
        name: Attention(
            group,
            positive(config, "hidden_size"),
            qkv_bias=bias if qkv_bias is None else qkv_bias,
            out_bias=bias if out_bias is None else out_bias,
            **attention,
        )
        for name, group in found.items()
    }
    return [mixers[name] for name in names]


LLAMA = partial(tiny, "llama", "LlamaForCausalLM")
FAMILIES = (
    Family(
        "llama", "LlamaForCausalLM", parse_llama,
        tiny={
            "llama": LLAMA(2, 64, 176, (4, 2, 16)),
            "smollm2": LLAMA(
                3, 144, 200, (9, 3, 16), rope_theta=100000.0, tie_word_embeddings=True
            ),
        },
    ),
)  # fmt: skip
