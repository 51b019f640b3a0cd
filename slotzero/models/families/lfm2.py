"""LFM2, dense or with experts: a short convolution between gates, or attention, in each layer."""

import math
from collections.abc import Mapping
from functools import partial
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types_recurrent import Scan
from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.dense_mlp import DenseMlp, MlpNames
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.blocks.short_conv import ShortConv
from slotzero.models.config import FULL, ModelConfig, ModelNames
from slotzero.models.families.family import Family
from slotzero.models.families.mamba import ATTENTION, RECURRENT, conv_width, hybrid_layers
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_group,
    model,
    pre_norms,
    rope_of,
    sigmoid_experts,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive, require
from slotzero.models.layer import DecoderLayer, Mlp

Config = Mapping[str, Any]

LAYERS: Mapping[str, str] = {"full_attention": ATTENTION, "conv": RECURRENT}
OLDER_FIELDS: Mapping[str, str] = {
    "block_ff_dim": "intermediate_size",
    "tie_embedding": "tie_word_embeddings",
    "norm_eps": "rms_norm_eps",
    "num_experts": "n_routed_experts",
}
"""Fields whose name differs from that in other families."""
NAMES = ModelNames(final_norm="model.embedding_norm")
MLP_NAMES = MlpNames("feed_forward.w3", "feed_forward.w2", "feed_forward.w1")
EXPERT = "feed_forward.experts.{expert}"
MOE_NAMES = MoeNames(
    router="feed_forward.gate",
    gate=f"{EXPERT}.w1",
    up=f"{EXPERT}.w3",
    down=f"{EXPERT}.w2",
    shared=None,
    correction="feed_forward.expert_bias",
)


def parse(config: Config) -> ModelConfig:
    config = _standard_fields(config)
    size = positive(config, "intermediate_size")
    if config.get("block_auto_adjust_ff_dim", True):
        size = _adjusted(config, size)
    mlp = dense_mlp(config, inner_size=size, activation="silu", names=MLP_NAMES)
    return _model(config, [mlp] * positive(config, "num_hidden_layers"))


def parse_moe(config: Config) -> ModelConfig:
    config = _standard_fields(config)
    require(config, "use_expert_bias", True)
    dense: DenseMlp = dense_mlp(config, activation="silu", names=MLP_NAMES)
    experts = sigmoid_experts(config, activation="silu", norm_eps=1e-6)
    moe, num_dense = MoeMlp(positive(config, "hidden_size"), experts, MOE_NAMES), 2
    if config.get("num_dense_layers") is not None:
        num_dense = int(config["num_dense_layers"])
    num_layers = positive(config, "num_hidden_layers")
    return _model(config, [dense if layer < num_dense else moe for layer in range(num_layers)])


def _standard_fields(config: Config) -> Config:
    """Return the config with field names of the other families added."""
    renamed = {ours: config[theirs] for theirs, ours in OLDER_FIELDS.items() if theirs in config}
    config = {"tie_word_embeddings": True, **config, **renamed}
    if config.get("layer_types") is not None:
        return config
    if config.get("full_attn_idxs") is None:
        raise UnsupportedModelError(
            "config field layer_types is missing: it must list the kind of each layer"
        )
    num_layers, full = positive(config, "num_hidden_layers"), config["full_attn_idxs"]
    kinds = ["full_attention" if layer in full else "conv" for layer in range(num_layers)]
    return {**config, "layer_types": kinds}


def _adjusted(config: Config, size: int) -> int:
    """Return the inner size of the MLPs: two thirds of the config's, rounded up."""
    size, by = int(2 * size / 3), config.get("block_ffn_dim_multiplier", 1.0)
    if by is None:
        return size
    multiple = config.get("block_multiple_of") or 256
    return int(multiple * math.ceil(int(by * size) / multiple))


def _model(config: Config, mlps: list[Mlp]) -> ModelConfig:
    kinds = hybrid_layers(config, names=LAYERS)
    attention, conv = _attention(config, kinds), _conv(config)
    norms = pre_norms(config, input="operator_norm", mlp="ffn_norm")
    layers = [
        DecoderLayer(norms, attention if kind == ATTENTION else conv, mlp)
        for kind, mlp in zip(kinds, mlps, strict=True)
    ]
    return model(config, layers, names=NAMES)


def _attention(config: Config, kinds: list[str]) -> Attention:
    layers = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    group = kv_group(config, FULL, layers, attention_heads(config), rope_of(config, FULL, 1e6))
    hidden = positive(config, "hidden_size")
    return Attention(
        group, hidden, qk_norm="head", norm_names=("q_layernorm", "k_layernorm"),
        out_name="out_proj",
    )  # fmt: skip


def _conv(config: Config) -> ShortConv:
    hidden, width = positive(config, "hidden_size"), conv_width(config, "conv_L_cache")
    scan = Scan("conv", hidden, head_dim=1, num_groups=0, state_size=0, conv_width=width)
    return ShortConv(scan, hidden, "conv", has_bias=bool(config.get("conv_bias")))


TINY = partial(
    tiny, layers=4, hidden=64, heads=(4, 2, 16), layer_types=["conv", "full_attention"] * 2,
    norm_eps=1e-5, conv_L_cache=3, tie_word_embeddings=True,
)  # fmt: skip
FAMILIES = (
    Family(
        "lfm2", "Lfm2ForCausalLM", parse,
        tiny={
            "lfm2": TINY(
                "lfm2", "Lfm2ForCausalLM", inner=200, block_multiple_of=8, conv_bias=True,
            ),
        },
    ),
    Family(
        "lfm2_moe", "Lfm2MoeForCausalLM", parse_moe, frozenset({"num_experts"}),
        tiny={
            "lfm2-moe": TINY(
                "lfm2_moe", "Lfm2MoeForCausalLM", inner=136, num_experts=6, num_experts_per_tok=2,
                moe_intermediate_size=40, num_dense_layers=1, routed_scaling_factor=1.5,
            ),
        },
    ),
)  # fmt: skip
