"""Hunyuan V1, dense: Llama with a norm on each query and key head, after RoPE."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import attention_heads
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import mapping, require

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    require(config, "use_qk_norm", True)
    return llama_like(
        with_alpha(config),
        qk_norm="rotated_head",
        norm_names=("query_layernorm", "key_layernorm"),
    )


def with_alpha(config: Config) -> Config:
    """Return the config with the rule that Hunyuan calls dynamic: a base that is larger by a fixed
    factor `alpha`, for all context lengths."""
    given = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    kind, alpha = given.get("rope_type") or given.get("type"), given.get("alpha")
    if kind != "dynamic" or not alpha:
        return config
    dim = attention_heads(config).head_dim
    theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
    rope = {"rope_theta": theta * alpha ** (dim / (dim - 2))}
    return {**config, "rope_parameters": rope, "rope_scaling": None}


FAMILIES = (
    Family(
        "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", parse, frozenset({"use_qk_norm"}),
        tiny={
            "hunyuan": tiny(
                "hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", 2, 64, 136, (4, 2, 24),
                use_qk_norm=True, tie_word_embeddings=True,
                rope_scaling={"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
            ),
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
