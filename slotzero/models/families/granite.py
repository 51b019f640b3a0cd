"""Granite 3: Llama with factors on embeddings, scores, every block's result, and logits."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.attention import AttentionScales
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import attention_heads, dense_mlp
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import multiplier

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    added = multiplier(config, "residual_multiplier")
    return llama_like(
        config,
        heads=attention_heads(config, scale=multiplier(config, "attention_multiplier")),
        mlp=dense_mlp(config, down_scale=added),
        outside={
            "embedding_scale": multiplier(config, "embedding_multiplier"),
            "logits_scale": 1.0 / multiplier(config, "logits_scaling"),
        },
        scales=AttentionScales(out=added),
    )


FAMILIES = (
    Family(
        "granite", "GraniteForCausalLM", parse,
        frozenset({
            "embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier",
        }),
        tiny={
            "granite": tiny(
                "granite", "GraniteForCausalLM", 2, 64, 136, (4, 2, 16), attention_bias=True,
                mlp_bias=True, embedding_multiplier=1.5, attention_multiplier=0.3,
                residual_multiplier=0.6, logits_scaling=1.7, tie_word_embeddings=True,
            ),
        },
    ),
)  # fmt: skip
