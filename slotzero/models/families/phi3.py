"""Phi-3 and Phi-4: Llama with fused projections, LongRoPE, and perhaps a window in all layers.

With LongRoPE, prompts share prefixes only if max_model_len is at most the original context length:
beyond it, keys depend on the length of the prompt.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.dense_mlp import FUSED_NAMES
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import dense_mlp, partial_rope
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import mapping, positive

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    window = config.get("sliding_window")
    max_position = positive(config, "max_position_embeddings")
    slides = window is not None and window < max_position  # a longer window hides nothing
    return llama_like(
        _with_rope(config),
        qkv_bias=False,
        out_bias=False,
        is_sliding=lambda layer: slides,
        mlp=dense_mlp(config, names=FUSED_NAMES, has_bias=False),
        fused="qkv_proj",
    )


def _with_rope(config: Config) -> Config:
    """Return the config with all fields of its RoPE in rope_parameters."""
    rope = dict(mapping(partial_rope(config, 10000.0, 1.0), "rope_parameters"))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "su", "longrope"):
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not implemented for phi3; implemented: default, longrope"
        )
    if kind != "default":
        rope["original_max_position_embeddings"] = (
            config.get("original_max_position_embeddings")
            or rope.get("original_max_position_embeddings")
            or 4096
        )
    return {**config, "rope_parameters": rope, "rope_scaling": None}


FAMILIES = (
    Family(
        "phi3", "Phi3ForCausalLM", parse, frozenset({"partial_rotary_factor"}),
        tiny={
            "phi3": tiny("phi3", "Phi3ForCausalLM", 2, 64, 136, (4, 4, 16), sliding_window=47),
            "phi4-mini": tiny(
                "phi3", "Phi3ForCausalLM", 2, 96, 136, (6, 2, 16), sliding_window=600,
                tie_word_embeddings=True, partial_rotary_factor=0.75,
                original_max_position_embeddings=64,
                rope_scaling={
                    "type": "longrope", "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.5],
                    "long_factor": [1.0, 1.2, 1.9, 3.1, 5.5, 8.0],
                },
            ),
        },
    ),
)  # fmt: skip
