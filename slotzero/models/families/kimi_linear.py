"""Kimi Linear: Kimi Delta Attention, or MLA without RoPE, and experts beside a shared expert."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types_recurrent import Scan
from slotzero.models.blocks.kda import KdaMixer
from slotzero.models.blocks.mla import MlaAttention
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.config import ModelConfig
from slotzero.models.families.deepseek import latent_group
from slotzero.models.families.family import Family
from slotzero.models.families.mamba import ATTENTION, conv_width, hybrid_layers
from slotzero.models.families.standard import (
    dense_mlp,
    model,
    pre_norms,
    sigmoid_experts,
    sparse_layers,
)
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import eps, mapping, positive, require
from slotzero.models.layer import DecoderLayer
from slotzero.models.rope import parse_rope

Config = Mapping[str, Any]

FIELDS: Mapping[str, str] = {  # the name of a field in other families: its name in this family
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
}
LINEAR_FIELDS: Mapping[str, str] = {  # the same for fields of linear_attn_config
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
MOE = "block_sparse_moe"
NAMES = MoeNames(
    router=f"{MOE}.gate",
    gate=f"{MOE}.experts.{{expert}}.w1",
    up=f"{MOE}.experts.{{expert}}.w3",
    down=f"{MOE}.experts.{{expert}}.w2",
    shared=f"{MOE}.shared_experts",
    correction=f"{MOE}.gate.e_score_correction_bias",
)


def parse(config: Config) -> ModelConfig:
    require(config, "moe_router_activation_func", "sigmoid")
    require(config, "mla_use_nope", True)
    config = _standard_fields(config)
    kinds, hidden = hybrid_layers(config), positive(config, "hidden_size")
    attention, kda = _attention(config, kinds), _kda(config)
    experts = sigmoid_experts(config, config.get("n_shared_experts", 1) or 0)
    dense, moe, norms = dense_mlp(config), MoeMlp(hidden, experts, NAMES), pre_norms(config)
    layers = [
        DecoderLayer(norms, attention if kind == ATTENTION else kda, moe if is_sparse else dense)
        for kind, is_sparse in zip(kinds, sparse_layers(config, num_dense=1), strict=True)
    ]
    return model(config, layers)


def _standard_fields(config: Config) -> Config:
    """Return the config with field names of the other families added."""
    linear = mapping(config, "linear_attn_config")
    renamed = {ours: config[theirs] for ours, theirs in FIELDS.items() if theirs in config}
    renamed |= {ours: linear[theirs] for ours, theirs in LINEAR_FIELDS.items() if theirs in linear}
    config = {**config, **renamed}
    if config.get("layer_types") is not None:
        return config
    full, num_layers = linear.get("full_attn_layers"), positive(config, "num_hidden_layers")
    if full is None:
        raise UnsupportedModelError(
            "config field linear_attn_config: full_attn_layers is missing; it must list the layers "
            "with attention"
        )
    names = "linear_attention", "full_attention"  # layers are counted from 1
    return {**config, "layer_types": [names[i + 1 in full] for i in range(num_layers)]}


def _attention(config: Config, kinds: list[str]) -> MlaAttention:
    layers = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    sizes = positive(config, "qk_rope_head_dim"), positive(config, "max_position_embeddings")
    rope = parse_rope(config, *sizes)
    if rope.kind != "default":
        raise UnsupportedModelError(
            f"rope scaling {rope.kind!r} has no effect, because attention has no RoPE: remove it "
            "from config.json"
        )
    rope = replace(rope, kind="none")
    q_rank = None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank")
    return MlaAttention(latent_group(config, layers, rope), positive(config, "hidden_size"), q_rank)


def _kda(config: Config) -> KdaMixer:
    heads, size = positive(config, "linear_num_heads"), positive(config, "linear_head_dim")
    width = conv_width(config, "linear_conv_kernel_dim")
    scan = Scan("kda", heads, size, num_groups=heads, state_size=size, conv_width=width)
    return KdaMixer(scan, positive(config, "hidden_size"), "self_attn", eps(config))


FAMILIES = (
    Family(
        "kimi_linear", "KimiLinearForCausalLM", parse,
        frozenset({
            "num_experts", "num_local_experts", "n_routed_experts", "n_shared_experts",
            "v_head_dim", "kv_lora_rank",
        }),
        tiny={
            "kimi-linear": tiny(
                "kimi_linear", "KimiLinearForCausalLM", 3, 64, 136, (4, 4, 8), model_max_length=512,
                layer_types=layer_types("rfr"), linear_num_heads=3, linear_head_dim=12,
                linear_conv_kernel_dim=4, kv_lora_rank=32, q_lora_rank=None, qk_nope_head_dim=16,
                qk_rope_head_dim=8, v_head_dim=12, first_k_dense_replace=1, num_experts=6,
                num_experts_per_token=2, num_shared_experts=1, moe_intermediate_size=40,
                routed_scaling_factor=2.0, moe_renormalize=True,
            ),
        },
    ),
)  # fmt: skip
