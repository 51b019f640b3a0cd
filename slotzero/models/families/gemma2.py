"""Gemma 2: norms before and after each block, soft caps, and a window in every second layer."""

import math
from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.attention import Attention
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    IsSliding,
    attention_heads,
    dense_mlp,
    kv_groups,
    layer_groups,
    model,
    sandwich_norms,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    return gemma_like(config, lambda layer: layer % 2 == 0)


def gemma_like(
    config: Config, is_sliding: IsSliding, attention: Config | None = None, **groups: Any
) -> ModelConfig:
    """Return a model of Gemma 2's shape; `attention` overrides fields of Attention."""
    names, bias = layer_groups(config, is_sliding), bool(config.get("attention_bias", False))
    mixers = {
        name: Attention(
            group, positive(config, "hidden_size"), qkv_bias=bias, out_bias=bias, norm_offset=1.0,
            **(attention or {}),
        )
        for name, group in kv_groups(config, names, attention_heads(config), **groups).items()
    }  # fmt: skip
    norms, mlp = sandwich_norms(config, offset=1.0), dense_mlp(config)
    return model(
        config,
        [DecoderLayer(norms, mixers[name], mlp) for name in names],
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
        embedding_scale=math.sqrt(positive(config, "hidden_size")),
        norm_offset=1.0,
    )


FAMILIES = (
    Family(
        "gemma2", "Gemma2ForCausalLM", parse,
        frozenset({"query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}),
        tiny={
            "gemma2": tiny(
                "gemma2", "Gemma2ForCausalLM", 2, 64, 136, (4, 2, 32), sliding_window=24,
                query_pre_attn_scalar=20, attn_logit_softcapping=5.0, final_logit_softcapping=3.0,
                hidden_activation="gelu_pytorch_tanh",
                initializer_range=0.1,  # small, because the model multiplies embeddings by 8
            ),
        },
    ),
)  # fmt: skip
