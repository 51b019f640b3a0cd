"""ERNIE 4.5 MoE: Llama with interleaved rotation, softmax experts with a correction, shared ones.

The MTP layers of its checkpoints are not read.
"""

from collections.abc import Mapping
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import experts, sparse_model
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import either, positive, require

Config = Mapping[str, Any]

NAMES = MoeNames(correction="mlp.moe_statics.e_score_correction_bias", correction_is_one_row=True)


def parse(config: Config) -> ModelConfig:
    require(config, "moe_norm_min", 1e-12)  # a sum of weights is never that small
    require(config, "moe_use_aux_free", True)
    require(config, "compression_ratio", 1.0)
    groups = {"thetas": (5e5, 5e5), "is_interleaved": True}
    attention = llama_attention(config, qkv_bias=False, out_bias=False, groups=groups)
    shape = experts(
        config,
        either(config, "moe_num_experts", "num_experts"),
        either(config, "moe_k", "num_experts_per_tok"),
        "moe_intermediate_size",
        scores="softmax",
        is_corrected=True,
        is_normed=True,
        num_shared=config.get("moe_num_shared_experts", 2) or 0,
    )
    mlp = MoeMlp(positive(config, "hidden_size"), shape, NAMES)
    kinds = _mlp_layer_types(config)
    return sparse_model({**config, "mlp_layer_types": kinds}, attention, mlp, ignored=MTP)


MTP = ("model.mtp_",)


def _mlp_layer_types(config: Config) -> list[str]:
    num, every = positive(config, "num_hidden_layers"), config.get("moe_layer_interval") or 1
    first, last = (config.get(f"moe_layer_{end}_index") for end in ("start", "end"))
    if isinstance(first, list) or isinstance(last, list):
        raise UnsupportedModelError(
            f"config fields moe_layer_start_index={first}, moe_layer_end_index={last}: lists, as "
            "in models that read images, are not implemented"
        )
    first, last = 1 if first is None else first, num - 1 if last in (None, -1) else last
    return [
        "sparse" if (i + 1) % every == 0 and first <= i <= last else "dense" for i in range(num)
    ]


FAMILIES = (
    Family(
        "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", parse,
        frozenset({"num_experts", "num_nextn_predict_layers"}),
        tiny={
            "ernie-moe": tiny(
                "ernie4_5_moe", "Ernie4_5_MoeForCausalLM", 3, 64, 136, (6, 2, 16),
                moe_num_experts=6, moe_k=2, moe_num_shared_experts=2, moe_intermediate_size=40,
                moe_layer_start_index=1, rope_theta=500000.0, tie_word_embeddings=True,
            ),
        },
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
    ),
)  # fmt: skip
