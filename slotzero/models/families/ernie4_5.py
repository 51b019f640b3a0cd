"""ERNIE 4.5, dense: Llama with interleaved RoPE."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import dense_mlp
from slotzero.models.families.tiny import tiny

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    bias = bool(config.get("use_bias"))
    return llama_like(
        config,
        qkv_bias=bias,
        out_bias=bias,
        mlp=dense_mlp(config, has_bias=bias),
        groups={"is_interleaved": True},
    )


FAMILIES = (
    Family(
        "ernie4_5", "Ernie4_5ForCausalLM", parse, frozenset({"use_bias"}),
        tiny={
            "ernie4.5": tiny(
                "ernie4_5", "Ernie4_5ForCausalLM", 2, 64, 136, (4, 2, 24), use_bias=True,
                tie_word_embeddings=True, rope_theta=500000.0,
            ),
        },
        defaults={
            "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": True,
            "head_dim": 128,
        },
    ),
)  # fmt: skip
