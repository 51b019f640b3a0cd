"""EXAONE 4: norms after each block, norms on each query and key head; perhaps sliding attention.

If some layers slide, only those have RoPE.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import FULL, ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import post_norms
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import positive

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    slides, every = config.get("sliding_window") is not None, 1
    if slides and config.get("layer_types") is None:
        every = positive({"sliding_window_pattern": 4, **config}, "sliding_window_pattern")
    return llama_like(
        config,
        qkv_bias=False,
        out_bias=False,
        is_sliding=lambda layer: (layer + 1) % every != 0,
        norms=post_norms(config),
        groups={"unrotated": (FULL,) if slides else ()},
        qk_norm="head",
    )


FAMILIES = (
    Family(
        "exaone4", "Exaone4ForCausalLM", parse,
        tiny={
            "exaone4": tiny(
                "exaone4", "Exaone4ForCausalLM", 4, 64, 136, (4, 2, 16), sliding_window=24,
                layer_types=layer_types("sssf"), rope_theta=1e6,
            ),
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
