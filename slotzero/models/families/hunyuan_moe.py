"""Hunyuan MoE (A13B): norms of queries and keys after rotation, experts beside a shared MLP."""

from collections.abc import Mapping
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.dense_mlp import MlpNames
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.blocks.moe_shared import MoeWithSharedMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.hunyuan import with_alpha
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    experts,
    sparse_model,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import either, positive, require

Config = Mapping[str, Any]

# Fields of the original code that transformers does not have, with the values that it implies.
IMPLIED: Mapping[str, Any] = {
    "use_qk_norm": True,
    "use_cla": False,
    "use_mla": False,
    "use_mixed_mlp_moe": True,
    "num_shared_expert": 1,
    "moe_layer_num_skipped": 0,
    "norm_topk_prob": True,
    "group_limited_greedy": False,
}


def parse(config: Config) -> ModelConfig:
    config = {field: _of_all_layers(field, value) for field, value in config.items()}
    for field, value in IMPLIED.items():
        require(config, field, value)
    require(config, "moe_intermediate_size", config.get("intermediate_size"))
    require(config, "attention_head_dim", attention_heads(config).head_dim)
    attention = llama_attention(
        with_alpha(config),
        qk_norm="rotated_head",
        norm_names=("query_layernorm", "key_layernorm"),
    )
    shape = experts(
        config, "num_experts", either(config, "moe_topk", "num_experts_per_tok"),
        "intermediate_size", scores="softmax", is_normed=True,
    )  # fmt: skip
    moe = MoeMlp(
        positive(config, "hidden_size"), shape, MoeNames(router="mlp.gate.wg", shared=None)
    )
    shared = dense_mlp(config, names=MlpNames.below("mlp.shared_mlp"))
    return sparse_model(config, attention, MoeWithSharedMlp(moe, shared))


def _of_all_layers(field: str, value: Any) -> Any:
    """Return the value that a list has for every layer."""
    if field not in ("num_experts", "moe_topk", "moe_intermediate_size", "num_shared_expert"):
        return value
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise UnsupportedModelError(
            f"config field {field}={value!r}: other values in other layers are not implemented"
        )
    return values.pop()


FAMILIES = (
    Family(
        "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", parse,
        frozenset({"num_experts", "use_qk_norm"}),
        tiny={
            "hunyuan-moe": tiny(
                "hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", 2, 64, 40, (6, 2, 16), num_experts=6,
                moe_topk=[2, 2], num_shared_expert=[1, 1],
                rope_scaling={"type": "dynamic", "alpha": 50.0, "factor": 1.0},
            ),
        },
        defaults={"rms_norm_eps": 1e-5},
    ),
)  # fmt: skip
