"""DeepSeek-V2, V3 and V3.2, and Kimi-K2: latent attention (MLA), experts and MTP layers.

In V3.2 an indexer selects the keys that each token attends to.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Experts, Heads, IndexShape, MlaShape
from slotzero.models.blocks.attention import KvGroup
from slotzero.models.blocks.mla import MlaAttention
from slotzero.models.blocks.moe import MoeMlp
from slotzero.models.config import LATENT, ModelConfig, MtpConfig
from slotzero.models.families.family import Family
from slotzero.models.families.standard import (
    dense_mlp,
    expert_groups,
    model,
    pre_norms,
    sigmoid_experts,
    sparse_layers,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import activation, positive, require
from slotzero.models.layer import DecoderLayer
from slotzero.models.rope import RopeConfig, correction, parse_rope

Config = Mapping[str, Any]

SPARSE = {"indexed_attention", "deepseek_sparse_attention"}  # the latter in older configs
NORM_EPS = 1e-6  # of the norms inside attention; rms_norm_eps applies to the other norms only


def parse_v2(config: Config) -> ModelConfig:
    require(config, "scoring_func", "softmax")
    return _parse(config, _softmax_experts(config))


def parse_v3(config: Config) -> ModelConfig:
    require(config, "scoring_func", "sigmoid")
    return _parse(config, sigmoid_experts(config, config.get("n_shared_experts") or 0))


def parse_v32(config: Config) -> ModelConfig:
    other = sorted(set(config.get("layer_types") or ()) - SPARSE)
    if other:
        raise UnsupportedModelError(
            f"config field layer_types contains {', '.join(other)}: only indexed_attention is "
            "implemented"
        )
    if config.get("q_lora_rank") is None:
        raise UnsupportedModelError("config field q_lora_rank is missing: the indexer needs it")
    require(config, "scoring_func", "sigmoid")
    experts = sigmoid_experts(config, config.get("n_shared_experts") or 0)
    index = IndexShape(
        positive(config, "index_n_heads"),
        positive(config, "index_head_dim"),
        positive(config, "index_topk"),
    )
    if index.head_dim < positive(config, "qk_rope_head_dim"):
        raise UnsupportedModelError(
            f"config field index_head_dim={index.head_dim}: must be at least qk_rope_head_dim"
        )
    return _parse(config, experts, index)


def _parse(config: Config, experts: Experts, index: IndexShape | None = None) -> ModelConfig:
    for alias in ("num_experts", "num_local_experts"):
        require(config, alias, positive(config, "n_routed_experts"))
    num_layers, hidden = positive(config, "num_hidden_layers"), positive(config, "hidden_size")
    rope_dim = positive(config, "qk_rope_head_dim")
    if rope_dim % 2:
        raise UnsupportedModelError(f"config field qk_rope_head_dim={rope_dim}: must be even")
    rope = replace(
        parse_rope(config, rope_dim, positive(config, "max_position_embeddings")),
        is_interleaved=bool(config.get("rope_interleave", True)),
    )
    group = latent_group(config, range(num_layers), rope, index)
    q_rank = None if config.get("q_lora_rank") is None else positive(config, "q_lora_rank")
    mixer = MlaAttention(group, hidden, q_rank)
    dense, moe, norms = dense_mlp(config), MoeMlp(hidden, experts), pre_norms(config)
    layers = [
        DecoderLayer(norms, mixer, moe if is_sparse else dense)
        for is_sparse in sparse_layers(config)
    ]
    return mtp_after(model(config, layers), config)


def mtp_after(model: ModelConfig, config: Config) -> ModelConfig:
    """Return the model with the MTP layers that its checkpoint has after its last layer."""
    num_mtp = config.get("num_nextn_predict_layers") or 0
    mtp = MtpConfig(num_mtp, model.layers[-1]) if num_mtp else None
    ignored = tuple(f"model.layers.{model.num_layers + i}." for i in range(num_mtp))
    return replace(model, mtp=mtp, ignored=ignored)


def latent_group(
    config: Config, layers: Sequence[int], rope: RopeConfig, index: IndexShape | None = None
) -> KvGroup:
    """Return the KV group of the layers with MLA."""
    if config.get("attention_bias"):
        raise UnsupportedModelError("config field attention_bias=True is not implemented with MLA")
    num_heads = positive(config, "num_attention_heads")
    if (config.get("num_key_value_heads") or num_heads) != num_heads:
        raise UnsupportedModelError(
            f"config field num_key_value_heads={config['num_key_value_heads']}: must equal "
            f"num_attention_heads={num_heads} with MLA"
        )
    nope, rope_dim = positive(config, "qk_nope_head_dim"), positive(config, "qk_rope_head_dim")
    rank = positive(config, "kv_lora_rank")
    heads = Heads(
        num_heads=num_heads,
        num_kv_heads=1,
        head_dim=rope_dim + rank + (0 if index is None else index.head_dim),
        value_dim=rank,
        norm_eps=NORM_EPS,
        scale=(nope + rope_dim) ** -0.5 * correction(config, rope) ** 2,
        mla=MlaShape(nope, rope_dim, positive(config, "v_head_dim"), index),
    )
    return KvGroup(LATENT, tuple(layers), heads, rope)


def _softmax_experts(config: Config) -> Experts:
    method = config.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise UnsupportedModelError(
            f"config field topk_method={method!r} is not implemented; "
            "implemented: greedy, group_limited_greedy"
        )
    require(config, "norm_topk_prob", False)
    return Experts(
        num_experts=positive(config, "n_routed_experts"),
        top_k=positive(config, "num_experts_per_tok"),
        inner_size=positive(config, "moe_intermediate_size"),
        activation=activation(config),
        scores="softmax",
        factor=float(config.get("routed_scaling_factor") or 1.0),
        num_shared=config.get("n_shared_experts") or 0,
        **expert_groups(
            config if method != "greedy" else {**config, "n_group": 1}, scores_per_group=1
        ),
    )


IMPLEMENTS = frozenset(
    {"n_routed_experts", "n_shared_experts", "v_head_dim", "kv_lora_rank", "num_experts"}
    | {"num_local_experts", "num_nextn_predict_layers"}
)
FAMILIES = (
    Family(
        "deepseek_v2", "DeepseekV2ForCausalLM", parse_v2, IMPLEMENTS,
        tiny={
            "deepseek-v2": tiny(
                "deepseek_v2", "DeepseekV2ForCausalLM", 3, 64, 136, (4, 4, 8), kv_lora_rank=32,
                q_lora_rank=None, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
                first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2,
                n_shared_experts=2, moe_intermediate_size=40, topk_method="group_limited_greedy",
                n_group=3, topk_group=2, routed_scaling_factor=2.0,
            ),
        },
    ),
    Family(
        "deepseek_v3", "DeepseekV3ForCausalLM", parse_v3, IMPLEMENTS,
        tiny={
            "deepseek-v3": tiny(
                "deepseek_v3", "DeepseekV3ForCausalLM", 3, 64, 136, (5, 5, 8), kv_lora_rank=48,
                q_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
                first_k_dense_replace=1, n_routed_experts=8, num_experts_per_tok=3,
                n_shared_experts=1, moe_intermediate_size=40, n_group=4, topk_group=2,
                routed_scaling_factor=2.5, norm_topk_prob=True, num_nextn_predict_layers=1,
                rope_parameters={
                    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
                    "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1,
                    "original_max_position_embeddings": 128,
                },
            ),
        },
        aliases=("kimi_k2",),
        multimodal={"KimiK25ForConditionalGeneration": "kimi_k2"},
    ),
    Family(
        "deepseek_v32", "DeepseekV32ForCausalLM", parse_v32, IMPLEMENTS,
        tiny={
            "deepseek-v3.2": tiny(
                "deepseek_v32", "DeepseekV32ForCausalLM", 3, 64, 136, (4, 4, 8), kv_lora_rank=32,
                q_lora_rank=40, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12,
                first_k_dense_replace=1, n_routed_experts=6, num_experts_per_tok=2,
                n_shared_experts=1, moe_intermediate_size=40, n_group=3, topk_group=2,
                routed_scaling_factor=2.5, norm_topk_prob=True, num_nextn_predict_layers=1,
                index_n_heads=6, index_head_dim=20, index_topk=12,
            ),
        },
    ),
)  # fmt: skip
