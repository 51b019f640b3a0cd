"""OLMo 2 and 3: norms after each block, and norms over all query heads and all key heads.

In OLMo 3, all layers but every fourth have sliding attention.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import IsSliding, attention_heads, never, post_norms
from slotzero.models.families.tiny import layer_types, tiny

Config = Mapping[str, Any]


def parse_olmo2(config: Config) -> ModelConfig:
    return _parse(config, never, {})


def parse_olmo3(config: Config) -> ModelConfig:
    groups = {"thetas": (5e5, 5e5), "scales_full_only": True}
    return _parse(config, lambda layer: (layer + 1) % 4 != 0, groups)


def _parse(config: Config, is_sliding: IsSliding, groups: Config) -> ModelConfig:
    return llama_like(
        config,
        is_sliding=is_sliding,
        heads=attention_heads(config, norms_whole=True),
        norms=post_norms(config),
        groups=groups,
        qk_norm="whole",
    )


FAMILIES = (
    Family(
        "olmo2", "Olmo2ForCausalLM", parse_olmo2,
        tiny={
            "olmo2": tiny("olmo2", "Olmo2ForCausalLM", 3, 64, 136, (4, 2, 16), rope_theta=5e5),
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
    Family(
        "olmo3", "Olmo3ForCausalLM", parse_olmo3,
        tiny={
            "olmo3": tiny(
                "olmo3", "Olmo3ForCausalLM", 4, 64, 136, (4, 4, 16), sliding_window=24,
                layer_types=layer_types("sssf"), rope_theta=500000.0,
            ),
        },
    ),
)  # fmt: skip
