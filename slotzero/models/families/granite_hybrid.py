"""Granite 4 hybrid: Mamba-2 or attention in each layer, and experts beside a shared MLP."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.dense_mlp import MlpNames
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.blocks.moe_shared import MoeWithSharedMlp
from slotzero.models.blocks.recurrent import RecurrentMixer, RecurrentScales
from slotzero.models.config import FULL, ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.granite import FACTORS, attention_factors, outer_factors
from slotzero.models.families.mamba import ATTENTION, hybrid_layers, mamba_mixer
from slotzero.models.families.standard import (
    dense_mlp,
    experts,
    kv_group,
    model,
    pre_norms,
    rope_if_configured,
    sparse_layers,
)
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import multiplier, positive
from slotzero.models.layer import DecoderLayer, Mlp

Config = Mapping[str, Any]

SHARED_NAMES = MlpNames("shared_mlp.input_linear", "shared_mlp.output_linear", gate=None)
NAMES = MoeNames(
    router="block_sparse_moe.router.layer",
    gate=None,
    up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight",
    shared=None,
    is_joint=True,
)


def parse(config: Config) -> ModelConfig:
    kinds = hybrid_layers(config)
    attention, mamba = _attention(config, kinds), _mamba(config)
    norms = pre_norms(config)
    layers = [
        DecoderLayer(norms, attention if kind == ATTENTION else mamba, mlp)
        for kind, mlp in zip(kinds, _mlps(config), strict=True)
    ]
    return model(
        config,
        layers,
        mlp_size=positive(config, "shared_intermediate_size"),
        **outer_factors(config),
    )


def _attention(config: Config, kinds: list[str]) -> Attention:
    factors = attention_factors(config)
    layers = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    bias = bool(config.get("attention_bias", False))
    return Attention(
        kv_group(config, FULL, layers, factors["heads"], rope_if_configured(config)),
        positive(config, "hidden_size"),
        qkv_bias=bias,
        out_bias=bias,
        scales=factors["scales"],
    )


def _mamba(config: Config) -> RecurrentMixer:
    inner = int((config.get("mamba_expand") or 2) * positive(config, "hidden_size"))
    if config.get("mamba_d_ssm") is not None:
        inner = positive(config, "mamba_d_ssm")
    scales = RecurrentScales(out=multiplier(config, "residual_multiplier"))
    return mamba_mixer(config, inner, norm_size=inner, scales=scales)


def _mlps(config: Config) -> list[Mlp]:
    scale = multiplier(config, "residual_multiplier")
    shared = dense_mlp(
        config, size_field="shared_intermediate_size", names=SHARED_NAMES, down_scale=scale
    )
    if not config.get("num_local_experts"):
        return [shared] * positive(config, "num_hidden_layers")
    shape = experts(
        config, "num_local_experts", "num_experts_per_tok", "intermediate_size",
        scores="softmax_of_chosen",
    )  # fmt: skip
    moe = MoeMlp(positive(config, "hidden_size"), shape, NAMES, down_scale=scale)
    both = MoeWithSharedMlp(moe, shared)
    return [both if is_sparse else shared for is_sparse in sparse_layers(config)]


FAMILIES = (
    Family(
        "granitemoehybrid", "GraniteMoeHybridForCausalLM", parse,
        FACTORS | {"num_local_experts"},
        tiny={
            "granite-hybrid": tiny(
                "granitemoehybrid", "GraniteMoeHybridForCausalLM", 4, 64, 40, (4, 2, 16),
                layer_types=layer_types("rrfr"), shared_intermediate_size=56, num_local_experts=5,
                num_experts_per_tok=2, mamba_n_heads=8, mamba_n_groups=1, mamba_d_state=12,
                mamba_d_conv=4, mamba_expand=2, embedding_multiplier=1.5,
                attention_multiplier=0.3, residual_multiplier=0.6, logits_scaling=1.7,
            ),
        },
    ),
)  # fmt: skip
