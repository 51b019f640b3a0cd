"""dots.llm1: Qwen3's attention and DeepSeek-V3's experts; late layers may have a window."""

from collections.abc import Mapping
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.moe import MoeMlp
from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.llama import llama_attention
from slotzero.models.families.standard import sigmoid_experts, sparse_model
from slotzero.models.families.tiny import layer_types, tiny
from slotzero.models.fields import positive

Config = Mapping[str, Any]

LAST_WINDOW = 62  # max_window_layers where the config does not have it


def parse(config: Config) -> ModelConfig:
    if config.get("scoring_func") not in (None, "sigmoid", "noaux_tc"):  # two names of one router
        raise UnsupportedModelError(
            f"config field scoring_func={config['scoring_func']!r}: only noaux_tc is implemented"
        )
    given, window = config.get("max_window_layers"), config.get("sliding_window")
    first = LAST_WINDOW if given is None else given
    attention = llama_attention(
        config, qk_norm="head", is_sliding=lambda layer: window is not None and layer >= first
    )
    shape = sigmoid_experts(
        {"norm_topk_prob": False, **config}, num_shared=config.get("n_shared_experts") or 0
    )
    return sparse_model(config, attention, MoeMlp(positive(config, "hidden_size"), shape))


FAMILIES = (
    Family(
        "dots1", "Dots1ForCausalLM", parse,
        frozenset({"n_routed_experts", "n_shared_experts"}),
        tiny={
            "dots1": tiny(
                "dots1", "Dots1ForCausalLM", 3, 64, 136, (6, 2, 16), sliding_window=25,
                layer_types=layer_types("fsf"), first_k_dense_replace=1, n_routed_experts=6,
                num_experts_per_tok=2, n_shared_experts=2, moe_intermediate_size=40,
                routed_scaling_factor=2.5, norm_topk_prob=True,
            ),
        },
    ),
)  # fmt: skip
