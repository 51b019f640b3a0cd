"""Qwen3: Llama with a norm on each query and key head; late layers may have a window."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.qwen2 import late_layers_slide
from slotzero.models.families.standard import without_mrope
from slotzero.models.families.tiny import tiny

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    config = without_mrope(config)
    return llama_like(config, is_sliding=late_layers_slide(config), qk_norm="head")


FAMILIES = (
    Family(
        "qwen3", "Qwen3ForCausalLM", parse, frozenset({"use_sliding_window"}),
        tiny={
            "qwen3": tiny(
                "qwen3", "Qwen3ForCausalLM", 3, 64, 136, (4, 2, 32), rms_norm_eps=1e-6,
                rope_theta=1000000.0,
            ),
        },
        multimodal={"Qwen3VLForConditionalGeneration": "qwen3_vl_text"},
    ),
)  # fmt: skip
