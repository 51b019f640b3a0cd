"""Mistral: Llama without biases; all layers may have sliding attention."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.tiny import tiny

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    slides = config.get("sliding_window") is not None
    return llama_like(config, qkv_bias=False, out_bias=False, is_sliding=lambda layer: slides)


FAMILIES = (
    Family(
        "mistral", "MistralForCausalLM", parse,
        tiny={
            "mistral": tiny(
                "mistral", "MistralForCausalLM", 2, 96, 160, (4, 1, 32), sliding_window=None
            ),
        },
        multimodal={"Mistral3ForConditionalGeneration": "mistral"},
    ),
)  # fmt: skip
