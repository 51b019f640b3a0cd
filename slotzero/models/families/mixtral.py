"""Mixtral: Mistral with experts."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import experts, sparse_model
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive

Config = Mapping[str, Any]

NAMES = MoeNames(
    router="block_sparse_moe.gate",
    gate="block_sparse_moe.experts.{expert}.w1",
    up="block_sparse_moe.experts.{expert}.w3",
    down="block_sparse_moe.experts.{expert}.w2",
    shared=None,
    correction="block_sparse_moe.e_score_correction_bias",
)


def parse(config: Config) -> ModelConfig:
    slides = config.get("sliding_window") is not None
    attention = llama_attention(
        config,
        qkv_bias=False,
        out_bias=False,
        is_sliding=lambda layer: slides,
        groups={"thetas": (1e6, 1e6)},
    )
    shape = experts(
        config, "num_local_experts", "num_experts_per_tok", "intermediate_size",
        scores="softmax", is_normed=True,
    )  # fmt: skip
    return sparse_model(config, attention, MoeMlp(positive(config, "hidden_size"), shape, NAMES))


FAMILIES = (
    Family(
        "mixtral", "MixtralForCausalLM", parse, frozenset({"num_local_experts"}),
        tiny={
            "mixtral": tiny(
                "mixtral", "MixtralForCausalLM", 2, 96, 56, (6, 2, 16), sliding_window=None,
                num_local_experts=5, num_experts_per_tok=2,
            ),
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
