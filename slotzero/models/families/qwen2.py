"""Qwen2 and Qwen2.5: Llama with query, key and value biases; late layers may have a window."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import IsSliding
from slotzero.models.families.tiny import tiny

Config = Mapping[str, Any]


def late_layers_slide(config: Config) -> IsSliding:
    """Return the rule of Qwen: with use_sliding_window, layers from max_window_layers on slide."""
    first = config.get("max_window_layers") or 0
    return lambda layer: bool(config.get("use_sliding_window")) and layer >= first


def parse(config: Config) -> ModelConfig:
    slides = late_layers_slide(config)
    return llama_like(config, qkv_bias=True, out_bias=False, is_sliding=slides)


FAMILIES = (
    Family(
        "qwen2", "Qwen2ForCausalLM", parse, frozenset({"use_sliding_window"}),
        tiny={
            "qwen2": tiny(
                "qwen2", "Qwen2ForCausalLM", 2, 112, 144, (7, 1, 16), tie_word_embeddings=True,
                rms_norm_eps=1e-6,
            ),
        },
    ),
)  # fmt: skip
