"""SmolLM3: Llama without RoPE in every fourth layer; those layers may have a window."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.attention import Attention
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    rotated = _rotated_layers(config)
    has_window = bool(config.get("use_sliding_window")) and config.get("sliding_window") is not None
    if not has_window:  # then layer_types has no effect
        config = {**config, "layer_types": None}
    model = llama_like(config, is_sliding=lambda layer: has_window and not rotated[layer])
    layers = zip(model.layers, rotated, strict=True)
    return replace(model, layers=tuple(_rotated(*layer) for layer in layers))


def _rotated(layer: DecoderLayer, is_rotated: bool) -> DecoderLayer:
    assert isinstance(layer.mixer, Attention)
    return replace(layer, mixer=replace(layer.mixer, is_rotated=is_rotated))


def _rotated_layers(config: Config) -> list[bool]:
    """Return for each layer whether it has RoPE; the field is 1 where it has, despite its name."""
    num_layers, given = positive(config, "num_hidden_layers"), config.get("no_rope_layers")
    if given is None:
        every = positive({"no_rope_layer_interval": 4, **config}, "no_rope_layer_interval")
        return [(layer + 1) % every != 0 for layer in range(num_layers)]
    if not isinstance(given, list) or len(given) < num_layers or not set(given) <= {0, 1}:
        raise UnsupportedModelError(
            f"config field no_rope_layers={given!r}: must be 0 or 1 for each of {num_layers} layers"
        )
    return [bool(one) for one in given[:num_layers]]


FAMILIES = (
    Family(
        "smollm3", "SmolLM3ForCausalLM", parse,
        frozenset({"use_sliding_window", "no_rope_layers", "no_rope_layer_interval"}),
        tiny={
            "smollm3": tiny(
                "smollm3", "SmolLM3ForCausalLM", 4, 64, 136, (4, 2, 16), tie_word_embeddings=True,
                no_rope_layers=[1, 0, 1, 0], rope_theta=2e6, rms_norm_eps=1e-6,
            ),
        },
        defaults={"rope_theta": 2e6, "tie_word_embeddings": True},
    ),
)  # fmt: skip
