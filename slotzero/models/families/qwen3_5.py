"""Qwen3.5 and Qwen3.6 (text), dense or with experts: Qwen3-Next with other names in checkpoints."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.qwen3_next import qwen_hybrid
from slotzero.models.families.standard import without_mrope
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import positive, require

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    return _parse(config)


def parse_moe(config: Config) -> ModelConfig:
    require(config, "norm_topk_prob", True)
    return _parse(config, mlp_size=positive(config, "moe_intermediate_size"))


def _parse(config: Config, **overrides: Any) -> ModelConfig:
    require(config, "attn_output_gate", True)
    require(config, "mtp_use_dedicated_embeddings", False)
    num_mtp = config.get("mtp_num_hidden_layers", 1) or 0
    return qwen_hybrid(without_mrope(config), num_mtp, is_by_head=False, **overrides)


TINY = partial(
    tiny, layers=4, hidden=64, inner=136, heads=(4, 2, 32), rms_norm_eps=1e-6,
    layer_types=layer_types("rfrf"), linear_num_value_heads=6, linear_num_key_heads=3,
    linear_value_head_dim=12, linear_key_head_dim=8, linear_conv_kernel_dim=4,
    mtp_num_hidden_layers=1, attn_output_gate=True, mtp_use_dedicated_embeddings=False,
    rope_parameters={
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
)  # fmt: skip
FAMILIES = (
    Family(
        "qwen3_5_text", "Qwen3_5ForCausalLM", parse, frozenset({"partial_rotary_factor"}),
        tiny={"qwen3.5": TINY("qwen3_5_text", "Qwen3_5ForCausalLM")},
        multimodal={"Qwen3_5ForConditionalGeneration": "qwen3_5_text"},
    ),
    Family(
        "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", parse_moe,
        frozenset({"partial_rotary_factor", "num_experts"}),
        tiny={
            "qwen3.5-moe": TINY(
                "qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", num_experts=6, num_experts_per_tok=2,
                moe_intermediate_size=40, shared_expert_intermediate_size=24,
            ),
        },
        multimodal={"Qwen3_5MoeForConditionalGeneration": "qwen3_5_moe_text"},
    ),
)  # fmt: skip
