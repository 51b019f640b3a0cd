"""Falcon-H1: attention and Mamba-2 side by side in every layer, with multipliers everywhere."""

from collections.abc import Mapping
from typing import Any

from slotzero.models.blocks.attention import Attention, AttentionScales
from slotzero.models.blocks.dense_mlp import MlpNames
from slotzero.models.blocks.parallel import ParallelMixers
from slotzero.models.blocks.recurrent import RecurrentMixer, RecurrentScales
from slotzero.models.config import FULL, ModelConfig, ModelNames
from slotzero.models.families.family import Family
from slotzero.models.families.mamba import mamba_mixer
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_groups,
    model,
    pre_norms,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import multiplier, positive
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]


def parse(config: Config) -> ModelConfig:
    num_layers, bias = positive(config, "num_hidden_layers"), bool(config.get("attention_bias"))
    group = kv_groups(config, [FULL] * num_layers, attention_heads(config))[FULL]
    scales = AttentionScales(
        k=multiplier(config, "key_multiplier"),
        input=multiplier(config, "attention_in_multiplier"),
        out=multiplier(config, "attention_out_multiplier"),
    )
    attention = Attention(
        group, positive(config, "hidden_size"), qkv_bias=bias, out_bias=bias, scales=scales
    )
    gate, down = config.get("mlp_multipliers") or (1.0, 1.0)
    mlp = dense_mlp(
        config, names=MlpNames.below("feed_forward"), gate_scale=float(gate), down_scale=float(down)
    )
    norms = pre_norms(config, mlp="pre_ff_layernorm")
    layer = DecoderLayer(norms, ParallelMixers(attention, _mamba(config)), mlp)
    return model(
        config,
        [layer] * num_layers,
        embedding_scale=multiplier(config, "embedding_multiplier"),
        logits_scale=multiplier(config, "lm_head_multiplier"),
        names=ModelNames(final_norm="model.final_layernorm"),
    )


def _mamba(config: Config) -> RecurrentMixer:
    if config.get("mamba_d_ssm") is not None:
        inner = positive(config, "mamba_d_ssm")
    else:
        inner = int((config.get("mamba_expand") or 2) * positive(config, "hidden_size"))
    parts = tuple(float(x) for x in config.get("ssm_multipliers") or (1.0,) * 5)
    return mamba_mixer(
        config,
        inner,
        norm_size=None if config.get("mamba_rms_norm") else 0,
        gates_first=not config.get("mamba_norm_before_gate", True),
        out_bias=bool(config.get("projectors_bias")),
        scales=RecurrentScales(
            parts=parts,
            input=multiplier(config, "ssm_in_multiplier"),
            out=multiplier(config, "ssm_out_multiplier"),
        ),
    )


FAMILIES = (
    Family(
        "falcon_h1", "FalconH1ForCausalLM", parse, frozenset({"embedding_multiplier"}),
        tiny={
            "falcon-h1": tiny(
                "falcon_h1", "FalconH1ForCausalLM", 3, 64, 136, (4, 2, 16), mamba_d_ssm=60,
                mamba_n_heads=6, mamba_d_head=10, mamba_n_groups=2, mamba_d_state=12,
                mamba_d_conv=4, mamba_rms_norm=False, embedding_multiplier=1.5,
                lm_head_multiplier=0.7, key_multiplier=0.8, attention_in_multiplier=0.9,
                attention_out_multiplier=1.2, ssm_in_multiplier=1.1, ssm_out_multiplier=0.6,
                ssm_multipliers=[0.9, 1.1, 0.7, 1.3, 0.8], mlp_multipliers=[0.7, 1.4],
            ),
        },
    ),
)  # fmt: skip
