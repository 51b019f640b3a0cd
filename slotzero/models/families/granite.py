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


FACTORS = frozenset(
    {"embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier"}
)


def parse(config: Config) -> ModelConfig:
    return llama_like(
        config,
        mlp=dense_mlp(config, down_scale=multiplier(config, "residual_multiplier")),
        outside=outer_factors(config),
        **attention_factors(config),
    )


def attention_factors(config: Config) -> dict[str, Any]:
    """Return arguments of llama_attention: the factors on scores and on the result."""
    return {
        "heads": attention_heads(config, scale=multiplier(config, "attention_multiplier")),
        "scales": AttentionScales(out=multiplier(config, "residual_multiplier")),
    }


def outer_factors(config: Config) -> dict[str, Any]:
    """Return fields of ModelConfig: the factors on embeddings and logits."""
    return {
        "embedding_scale": multiplier(config, "embedding_multiplier"),
        "logits_scale": 1.0 / multiplier(config, "logits_scaling"),
    }


FAMILIES = (
    Family(
        "granite", "GraniteForCausalLM", parse, FACTORS,
        tiny={
            "granite": tiny(
                "granite", "GraniteForCausalLM", 2, 64, 136, (4, 2, 16), attention_bias=True,
                mlp_bias=True, embedding_multiplier=1.5, attention_multiplier=0.3,
                residual_multiplier=0.6, logits_scaling=1.7, tie_word_embeddings=True,
            ),
        },
    ),
)  # fmt: skip
