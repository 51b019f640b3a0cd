"""Ministral 3: Mistral whose queries grow with the position."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.models.blocks.attention import KvGroup
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.mistral import parse as parse_mistral
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import mapping

Config = Mapping[str, Any]

BETA = "llama_4_scaling_beta"


def parse(config: Config) -> ModelConfig:
    given = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    plain = {name: given[name] for name in given if name not in (BETA, "max_position_embeddings")}
    beta = float(given.get(BETA) or 0.0)

    def with_beta(group: KvGroup) -> KvGroup:
        interval = group.rope.original_max_position
        rope = replace(group.rope, query_beta=beta, query_interval=interval)
        return replace(group, rope=rope)

    model = parse_mistral({**config, "rope_parameters": plain, "rope_scaling": None})
    return model.with_groups(with_beta)


FAMILIES = (
    Family(
        "ministral3", "Ministral3ForCausalLM", parse,
        tiny={
            "ministral3": tiny(
                "ministral3", "Ministral3ForCausalLM", 2, 64, 136, (4, 2, 24),
                rope_parameters={
                    "rope_type": "yarn", "rope_theta": 1e6, "factor": 8.0, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "original_max_position_embeddings": 64,
                    "llama_4_scaling_beta": 0.3,
                },
            ),
        },
        multimodal={"Mistral3ForConditionalGeneration": "ministral3"},
    ),
)  # fmt: skip
