"""GLM-4: interleaved RoPE on half of each head, and a fused MLP; GLM-4-0414 has norms after blocks
too."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.dense_mlp import FUSED_NAMES
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import dense_mlp, partial_rope, pre_norms
from slotzero.models.families.tiny import tiny
from slotzero.models.layer import LayerNorms

Config = Mapping[str, Any]


def parse_glm(config: Config) -> ModelConfig:
    return _parse(config, pre_norms(config))


def parse_glm4(config: Config) -> ModelConfig:
    norms = pre_norms(config, post_mixer="post_self_attn_layernorm", post_mlp="post_mlp_layernorm")
    return _parse(config, norms)


def _parse(config: Config, norms: LayerNorms) -> ModelConfig:
    rope = partial_rope(config, theta=10000.0, default=0.5)["rope_parameters"]
    return llama_like(
        {**config, "rope_parameters": rope, "rope_scaling": None},
        out_bias=False,
        norms=norms,
        mlp=dense_mlp(config, names=FUSED_NAMES, has_bias=False),
        groups={"is_interleaved": True},
    )


IMPLEMENTS = frozenset({"partial_rotary_factor"})
DEFAULTS = {"attention_bias": True, "head_dim": 128}
FAMILIES = (
    Family(
        "glm", "GlmForCausalLM", parse_glm, IMPLEMENTS,
        tiny={
            "glm": tiny(
                "glm", "GlmForCausalLM", 2, 64, 136, (4, 2, 24), attention_bias=True,
                partial_rotary_factor=0.5,
            ),
        },
        defaults=DEFAULTS,
    ),
    Family(
        "glm4", "Glm4ForCausalLM", parse_glm4, IMPLEMENTS,
        tiny={
            "glm4": tiny(
                "glm4", "Glm4ForCausalLM", 2, 64, 136, (4, 2, 24), attention_bias=True,
                partial_rotary_factor=0.5,
            ),
        },
        defaults=DEFAULTS,
    ),
)  # fmt: skip
