"""Arcee (AFM): Llama with an MLP without gates, of squared ReLU."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_like
from slotzero.models.families.standard import dense_mlp
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import require

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    require(config, "hidden_act", "relu2")
    # squared ReLU: relu(x) gates x
    return llama_like(config, mlp=dense_mlp(config, activation="relu", is_gated=False))


FAMILIES = (
    Family(
        "arcee", "ArceeForCausalLM", parse,
        tiny={
            "arcee": tiny(
                "arcee", "ArceeForCausalLM", 2, 64, 136, (4, 2, 16), hidden_act="relu2",
                initializer_range=0.15,
            ),
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
