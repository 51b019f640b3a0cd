"""GLM-4.5 to 4.7: DeepSeek-V3's experts, attention that is rotated in part, MTP layers.

GLM-4.7-Flash (glm4_moe_lite) is a DeepSeek-V3.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.moe import MoeMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.deepseek import IMPLEMENTS, mtp_after, parse_v3
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import partial_rope, sigmoid_experts, sparse_model
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive, require

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    require(config, "scoring_func", "sigmoid")
    config = partial_rope(config, 10000.0, 0.5)
    qk_norm = "head" if config.get("use_qk_norm") else None
    shape = sigmoid_experts(config, num_shared=config.get("n_shared_experts") or 0)
    mlp = MoeMlp(positive(config, "hidden_size"), shape)
    attention = llama_attention(config, out_bias=False, qk_norm=qk_norm)
    return mtp_after(sparse_model(config, attention, mlp), config)


DEFAULTS = {"first_k_dense_replace": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-5}
FAMILIES = (
    Family(
        "glm4_moe", "Glm4MoeForCausalLM", parse,
        frozenset({
            "partial_rotary_factor", "n_routed_experts", "n_shared_experts",
            "num_nextn_predict_layers", "use_qk_norm",
        }),
        tiny={
            "glm4-moe": tiny(
                "glm4_moe", "Glm4MoeForCausalLM", 3, 64, 136, (6, 2, 16), attention_bias=True,
                use_qk_norm=True, partial_rotary_factor=0.5, n_routed_experts=6,
                num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=40, n_group=2,
                topk_group=1, routed_scaling_factor=2.5, num_nextn_predict_layers=1,
            ),
        },
        defaults=DEFAULTS,
    ),
    Family(
        "glm4_moe_lite", "Glm4MoeLiteForCausalLM", parse_v3, IMPLEMENTS,
        tiny={
            "glm4-moe-lite": tiny(
                "glm4_moe_lite", "Glm4MoeLiteForCausalLM", 3, 64, 136, (4, 4, 8),
                kv_lora_rank=40, q_lora_rank=24, qk_nope_head_dim=16, qk_rope_head_dim=8,
                v_head_dim=20, n_routed_experts=6, num_experts_per_tok=2, n_shared_experts=1,
                moe_intermediate_size=40, routed_scaling_factor=1.8, num_nextn_predict_layers=1,
            ),
        },
        defaults={**DEFAULTS, "routed_scaling_factor": 1.8},
    ),
)  # fmt: skip
