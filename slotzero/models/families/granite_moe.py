"""Granite 3 MoE: Llama with scaled embedding, attention, residual and logits, and experts."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.moe import MoeMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.granite import FACTORS, attention_factors, outer_factors
from slotzero.models.families.granite_hybrid import NAMES
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import experts, sparse_model
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import multiplier, positive

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    attention = llama_attention(config, **attention_factors(config))
    shape = experts(
        config, "num_local_experts", "num_experts_per_tok", "intermediate_size",
        scores="softmax_of_chosen",
    )  # fmt: skip
    residual = multiplier(config, "residual_multiplier")
    mlp = MoeMlp(positive(config, "hidden_size"), shape, NAMES, down_scale=residual)
    return sparse_model(config, attention, mlp, **outer_factors(config))


FAMILIES = (
    Family(
        "granitemoe", "GraniteMoeForCausalLM", parse, FACTORS | {"num_local_experts"},
        tiny={
            "granite-moe": tiny(
                "granitemoe", "GraniteMoeForCausalLM", 2, 64, 40, (4, 2, 16), num_local_experts=5,
                num_experts_per_tok=2, embedding_multiplier=1.5, attention_multiplier=0.3,
                residual_multiplier=0.6, logits_scaling=1.7,
            ),
        },
    ),
)  # fmt: skip
