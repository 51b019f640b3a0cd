"""Command R: attention and MLP side by side under one LayerNorm, and interleaved RoPE.

In Cohere 2 (Command R7B, Command A), all layers but every fourth slide, and only those have RoPE.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.models.config import FULL, ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import IsSliding, never, pre_norms
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import multiplier, positive, require

Config = Mapping[str, Any]


def parse_cohere(config: Config) -> ModelConfig:
    return _parse(config, never, ())


def parse_cohere2(config: Config) -> ModelConfig:
    every = positive({"sliding_window_pattern": 4, **config}, "sliding_window_pattern")
    return _parse(config, lambda layer: (layer + 1) % every != 0, (FULL,))


def _parse(config: Config, is_sliding: IsSliding, unrotated: tuple[str, ...]) -> ModelConfig:
    require(config, "use_parallel_block", True)
    require(config, "use_gated_activation", True)
    config = {**config, "rms_norm_eps": config["layer_norm_eps"]}
    model = llama_like(
        config,
        is_sliding=is_sliding,
        norms=pre_norms(config, mlp=None, is_centred=True),
        groups={"is_interleaved": True, "unrotated": unrotated},
        outside={"logits_scale": multiplier(config, "logit_scale")},
    )
    return replace(model, layers=tuple(replace(layer, is_parallel=True) for layer in model.layers))


IMPLEMENTS = frozenset({"logit_scale"})
DEFAULTS = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625, "tie_word_embeddings": True}
FAMILIES = (
    Family(
        "cohere", "CohereForCausalLM", parse_cohere, IMPLEMENTS,
        tiny={
            "cohere": tiny(
                "cohere", "CohereForCausalLM", 2, 64, 136, (4, 2, 16), layer_norm_eps=1e-5,
                logit_scale=0.25, tie_word_embeddings=True,
            ),
        },
        defaults={**DEFAULTS, "rope_theta": 500000.0},
    ),
    Family(
        "cohere2", "Cohere2ForCausalLM", parse_cohere2, IMPLEMENTS,
        tiny={
            "cohere2": tiny(
                "cohere2", "Cohere2ForCausalLM", 4, 64, 136, (4, 2, 16), sliding_window=24,
                layer_types=layer_types("sfsf"), layer_norm_eps=1e-5, logit_scale=0.25,
                tie_word_embeddings=True,
            ),
        },
        defaults=DEFAULTS,
    ),
)  # fmt: skip
