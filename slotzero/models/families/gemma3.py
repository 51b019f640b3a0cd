"""Gemma 3 (text): Gemma 2 with query and key norms, and five sliding layers per full layer."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.config import ModelConfig
from slotzero.models.families.family import Family
from slotzero.models.families.gemma2 import gemma_like
from slotzero.models.families.tiny import layer_types, tiny

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    every = config.get("sliding_window_pattern") or 6
    return gemma_like(
        config, lambda layer: (layer + 1) % every != 0, {"qk_norm": "head"},
        thetas=(1e6, 1e4), scales_full_only=True,
    )  # fmt: skip


FAMILIES = (
    Family(
        "gemma3_text", "Gemma3ForCausalLM", parse,
        frozenset({"query_pre_attn_scalar", "final_logit_softcapping"}),
        tiny={
            "gemma3": tiny(
                "gemma3_text", "Gemma3ForCausalLM", 4, 64, 136, (4, 2, 32),
                hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=24, sliding_window=24,
                layer_types=layer_types("ssfs"), rope_theta=1000000.0,
                rope_local_base_freq=10000.0, tie_word_embeddings=True,
                initializer_range=0.05,  # small, because the model multiplies embeddings by 8
            ),
        },
        defaults={
            "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4,
            "head_dim": 256, "query_pre_attn_scalar": 256, "max_position_embeddings": 131_072,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        multimodal={"Gemma3ForConditionalGeneration": "gemma3_text"},
    ),
)  # fmt: skip
