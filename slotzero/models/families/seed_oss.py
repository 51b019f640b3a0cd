"""Seed-OSS: Llama with biases on queries, keys and values."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.tiny import tiny

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    return llama_like(config, out_bias=bool(config.get("attention_out_bias")))


FAMILIES = (
    Family(
        "seed_oss", "SeedOssForCausalLM", parse, frozenset({"attention_out_bias"}),
        tiny={
            "seed-oss": tiny(
                "seed_oss", "SeedOssForCausalLM", 2, 64, 136, (5, 1, 24), attention_bias=True,
                rope_theta=1e7,
            ),
        },
        defaults={"attention_bias": True, "head_dim": 128},
    ),
)  # fmt: skip
