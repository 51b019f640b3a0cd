"""OLMoE: Llama with norms over all query heads and all key heads, and experts."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import attention_heads, experts, sparse_model
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    heads = attention_heads(config, norms_whole=True)
    shape = experts(
        config, "num_experts", "num_experts_per_tok", "intermediate_size",
        scores="softmax", is_normed=bool(config.get("norm_topk_prob", False)),
    )  # fmt: skip
    mlp = MoeMlp(positive(config, "hidden_size"), shape, MoeNames(shared=None))
    return sparse_model(config, llama_attention(config, heads=heads, qk_norm="whole"), mlp)


FAMILIES = (
    Family(
        "olmoe", "OlmoeForCausalLM", parse, frozenset({"num_experts"}),
        tiny={
            "olmoe": tiny(
                "olmoe", "OlmoeForCausalLM", 2, 64, 40, (4, 4, 16), num_experts=7,
                num_experts_per_tok=3,
            ),
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
