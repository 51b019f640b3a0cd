"""Qwen3-Next: gated delta rule or gated attention, experts beside a shared expert, MTP layers."""

from collections.abc import Mapping
from typing import Any

from slotzero.kernels.types_recurrent import Scan
from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.recurrent import RecurrentMixer
from slotzero.models.config import FULL, ModelConfig, MtpConfig, MtpNames
from slotzero.models.families.family import Family
from slotzero.models.families.mamba import (
    ATTENTION,
    conv_width,
    hybrid_layers,
    require_groups,
    state_dtype,
)
from slotzero.models.families.qwen_moe import beside_shared, qwen_experts
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_group,
    model,
    partial_rope,
    pre_norms,
    sparse_layers,
)
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import eps, positive
from slotzero.models.layer import DecoderLayer, Mlp

Config = Mapping[str, Any]

MTP_NAMES = MtpNames(
    layer="mtp.layers.{index}.",
    embed_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    norm="mtp.norm",
    join="mtp.fc",
)


def parse(config: Config) -> ModelConfig:
    return qwen_hybrid(config, config.get("num_nextn_predict_layers", 1) or 0)


def qwen_hybrid(
    config: Config, num_mtp: int, is_by_head: bool = True, **overrides: Any
) -> ModelConfig:
    """Return a model of Qwen3-Next's shape; `overrides` are fields of ModelConfig."""
    kinds = hybrid_layers(config)
    attention, delta = _attention(config, kinds), _delta_rule(config, is_by_head)
    norms, mlps = pre_norms(config, offset=1.0), _mlps(config)
    layers = [
        DecoderLayer(norms, attention if kind == ATTENTION else delta, mlp)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    mtp = MtpConfig(num_mtp, DecoderLayer(norms, attention, mlps[-1]), MTP_NAMES, True)
    return model(
        config, layers, norm_offset=1.0, mtp=mtp if num_mtp else None, ignored=("mtp.",),
        **overrides,
    )  # fmt: skip


def _attention(config: Config, kinds: list[str]) -> Attention:
    layers = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    bias, rope = bool(config.get("attention_bias", False)), partial_rope(config, 10000.0, 0.25)
    return Attention(
        kv_group(config, FULL, layers, attention_heads(config), rope),
        positive(config, "hidden_size"),
        qkv_bias=bias,
        out_bias=bias,
        qk_norm="head",
        norm_offset=1.0,
        is_gated=True,
    )


def _delta_rule(config: Config, is_by_head: bool) -> RecurrentMixer:
    scan = Scan(
        "delta",
        num_heads=positive(config, "linear_num_value_heads"),
        head_dim=positive(config, "linear_value_head_dim"),
        num_groups=positive(config, "linear_num_key_heads"),
        state_size=positive(config, "linear_key_head_dim"),
        conv_width=conv_width(config, "linear_conv_kernel_dim"),
    )
    require_groups(scan, "linear_num_value_heads", "linear_num_key_heads")
    return RecurrentMixer(
        scan,
        positive(config, "hidden_size"),
        prefix="linear_attn",
        norm_eps=eps(config),
        norm_size=scan.head_dim,
        gates_first=False,
        state_dtype=state_dtype(config),
        is_by_head=is_by_head,
    )


def _mlps(config: Config) -> list[Mlp]:
    if not config.get("num_experts"):
        return [dense_mlp(config)] * positive(config, "num_hidden_layers")
    both = beside_shared(config, qwen_experts(config, is_normed=True))
    return [both if is_sparse else dense_mlp(config) for is_sparse in sparse_layers(config)]


FAMILIES = (
    Family(
        "qwen3_next", "Qwen3NextForCausalLM", parse,
        frozenset({"num_experts", "partial_rotary_factor", "num_nextn_predict_layers"}),
        tiny={
            "qwen3-next": tiny(
                "qwen3_next", "Qwen3NextForCausalLM", 4, 64, 136, (4, 2, 32), rms_norm_eps=1e-6,
                layer_types=layer_types("rfrr"), linear_num_value_heads=6, linear_num_key_heads=3,
                linear_value_head_dim=12, linear_key_head_dim=8, linear_conv_kernel_dim=4,
                num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40,
                shared_expert_intermediate_size=24, mlp_only_layers=[2],
                partial_rotary_factor=0.25, num_nextn_predict_layers=1,
            ),
        },
    ),
)  # fmt: skip
