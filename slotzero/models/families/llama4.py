"""Llama 4 (text): attention in chunks or without rotation, and one expert beside a shared one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.attention import Attention, KvGroup
from slotzero.models.blocks.dense_mlp import MlpNames
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.blocks.moe_shared import MoeWithSharedMlp
from slotzero.models.config import CHUNKED, FULL, ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    NO_ROPE,
    attention_heads,
    dense_mlp,
    experts,
    kv_group,
    sparse_model,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive, require
from slotzero.models.layer import Mlp

Config = Mapping[str, Any]

KINDS = {"chunked_attention": CHUNKED, "full_attention": FULL}
NAMES = MoeNames(
    router="feed_forward.router",
    gate=None,
    up="feed_forward.experts.gate_up_proj",
    down="feed_forward.experts.down_proj",
    shared=None,
    is_joint=True,
    is_transposed=True,
)


def parse(config: Config) -> ModelConfig:
    kinds = _kinds(config)
    mixers = {kind: _attention(config, kind, kinds) for kind in dict.fromkeys(kinds)}
    dense = dense_mlp(
        config, size_field="intermediate_size_mlp", names=MlpNames.below("feed_forward")
    )
    return sparse_model(
        {**config, "mlp_layer_types": _mlp_layer_types(config)},
        [mixers[kind] for kind in kinds],
        _experts(config),
        dense,
        mlp_size=dense.inner_size,
    )


def _kinds(config: Config) -> list[str]:
    """Return the KV group of each layer: layers with rotation have chunks, others have none."""
    num, every = positive(config, "num_hidden_layers"), config.get("no_rope_layer_interval") or 4
    rotated = config.get("no_rope_layers") or [(i + 1) % every != 0 for i in range(num)]
    kinds = [CHUNKED if is_rotated else FULL for is_rotated in rotated]
    given = config.get("layer_types")
    if len(kinds) != num or (given is not None and [KINDS.get(kind) for kind in given] != kinds):
        raise UnsupportedModelError(
            f"config fields no_rope_layers={list(rotated)}, layer_types={given}: only "
            f"chunked_attention with rotation and full_attention without, in {num} layers, is "
            "implemented"
        )
    return kinds


def _attention(config: Config, kind: str, kinds: list[str]) -> Attention:
    bias = bool(config.get("attention_bias", False))
    is_normed = kind == CHUNKED and config.get("use_qk_norm", True)
    return Attention(
        _kv_group(config, kind, [i for i, other in enumerate(kinds) if other == kind]),
        positive(config, "hidden_size"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="unit" if is_normed else None,
    )


def _kv_group(config: Config, kind: str, layers: list[int]) -> KvGroup:
    heads = attention_heads(config)
    if kind == FULL:
        group = kv_group(config, FULL, layers, heads, NO_ROPE)
        if not config.get("attn_temperature_tuning", True):
            return group
        tuning = {"floor_scale": 8192, "attn_scale": 0.1, **config}
        still = replace(
            group.rope,
            query_beta=float(tuning["attn_scale"]),
            query_offset=1,
            query_interval=positive(tuning, "floor_scale"),
        )
        return replace(group, rope=still)
    chunk = positive({"attention_chunk_size": 8192, **config}, "attention_chunk_size")
    chunk = min(chunk, positive(config, "max_position_embeddings"))
    rope = {**config, "rope_theta": config.get("rope_theta") or 5e5}
    group = kv_group(config, CHUNKED, layers, replace(heads, window=chunk, is_chunked=True), rope)
    return replace(group, rope=replace(group.rope, is_interleaved=True))


def _experts(config: Config) -> Mlp:
    require(config, "num_experts_per_tok", 1)
    shape = experts(
        {"num_experts_per_tok": 1, **config}, "num_local_experts", "num_experts_per_tok",
        "intermediate_size", scores="sigmoid", scales_input=True,
    )  # fmt: skip
    moe = MoeMlp(positive(config, "hidden_size"), shape, NAMES)
    shared = dense_mlp(config, names=MlpNames.below("feed_forward.shared_expert"))
    return MoeWithSharedMlp(moe, shared)


def _mlp_layer_types(config: Config) -> list[str]:
    num, every = positive(config, "num_hidden_layers"), config.get("interleave_moe_layer_step") or 1
    sparse = config.get("moe_layers")
    if sparse is None:
        sparse = range(every - 1, num, every)
    return ["sparse" if layer in sparse else "dense" for layer in range(num)]


FAMILIES = (
    Family(
        "llama4_text", "Llama4ForCausalLM", parse,
        frozenset({
            "num_local_experts", "no_rope_layers", "no_rope_layer_interval",
            "attention_chunk_size", "attn_temperature_tuning", "use_qk_norm",
        }),
        tiny={
            "llama4": tiny(
                "llama4_text", "Llama4ForCausalLM", 4, 64, 40, (6, 2, 16), num_local_experts=5,
                num_experts_per_tok=1, intermediate_size_mlp=136, interleave_moe_layer_step=2,
                attention_chunk_size=24, no_rope_layers=[1, 1, 0, 1], attn_scale=0.5,
                floor_scale=10, rope_theta=500000.0,
            ),
        },
        defaults={"rms_norm_eps": 1e-5},
        multimodal={"Llama4ForConditionalGeneration": "llama4_text"},
    ),
)  # fmt: skip
