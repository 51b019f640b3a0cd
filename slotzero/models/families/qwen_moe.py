"""Qwen2-MoE and Qwen3-MoE: Qwen2 and Qwen3 with experts; in Qwen2-MoE beside a gated shared one."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.dense_mlp import MlpNames
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.blocks.moe_shared import MoeWithSharedMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import dense_mlp, experts, sparse_model
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import either, positive

Config = Mapping[str, Any]


def parse_qwen2(config: Config) -> ModelConfig:
    qkv_bias = bool(config.get("qkv_bias", True))
    attention = llama_attention(config, qkv_bias=qkv_bias, out_bias=False)
    return sparse_model(config, attention, beside_shared(config, qwen_experts(config)))


def parse_qwen3(config: Config) -> ModelConfig:
    return sparse_model(config, llama_attention(config, qk_norm="head"), qwen_experts(config))


def qwen_experts(config: Config, is_normed: bool = False) -> MoeMlp:
    """Return the experts; `is_normed` is the value of norm_topk_prob if the config has none."""
    shape = experts(
        config, either(config, "num_experts", "num_local_experts"), "num_experts_per_tok",
        "moe_intermediate_size", scores="softmax",
        is_normed=bool(config.get("norm_topk_prob", is_normed)),
    )  # fmt: skip
    return MoeMlp(positive(config, "hidden_size"), shape, MoeNames(shared=None))


def beside_shared(config: Config, moe: MoeMlp) -> MoeWithSharedMlp:
    """Return the experts beside a shared one, which has a gate."""
    shared = dense_mlp(
        config, size_field="shared_expert_intermediate_size",
        names=MlpNames.below("mlp.shared_expert"),
    )  # fmt: skip
    return MoeWithSharedMlp(moe, shared, "mlp.shared_expert_gate")


IMPLEMENTS = frozenset({"num_experts", "num_local_experts"})
FAMILIES = (
    Family(
        "qwen2_moe", "Qwen2MoeForCausalLM", parse_qwen2, IMPLEMENTS,
        tiny={
            "qwen2-moe": tiny(
                "qwen2_moe", "Qwen2MoeForCausalLM", 3, 64, 136, (4, 4, 16), rms_norm_eps=1e-6,
                num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40,
                shared_expert_intermediate_size=56, mlp_only_layers=[0],
            ),
        },
    ),
    Family(
        "qwen3_moe", "Qwen3MoeForCausalLM", parse_qwen3, IMPLEMENTS,
        tiny={
            "qwen3-moe": tiny(
                "qwen3_moe", "Qwen3MoeForCausalLM", 3, 64, 136, (6, 2, 16), rms_norm_eps=1e-6,
                rope_theta=1000000.0, num_experts=6, num_experts_per_tok=3,
                moe_intermediate_size=40, norm_topk_prob=True, decoder_sparse_step=2,
            ),
        },
    ),
)  # fmt: skip
