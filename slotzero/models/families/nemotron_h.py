"""Nemotron-H: each layer is either Mamba-2, attention, an MLP (with squared ReLU) or experts."""

import math
from collections.abc import Mapping
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.dense_mlp import DenseMlp, MlpNames
from slotzero.models.blocks.moe import MoeMlp, MoeNames
from slotzero.models.blocks.moe_shared import MoeWithSharedMlp
from slotzero.models.config import FULL, ModelConfig, ModelNames
from slotzero.models.families.family import Family
from slotzero.models.families.mamba import (
    ATTENTION,
    MLP,
    MOE,
    RECURRENT,
    hybrid_layers,
    mamba_mixer,
)
from slotzero.models.families.standard import (
    attention_heads,
    dense_mlp,
    kv_group,
    model,
    pre_norms,
    rope_if_configured,
    sigmoid_experts,
)
from slotzero.models.families.tiny import tiny
from slotzero.models.fields import positive
from slotzero.models.layer import DecoderLayer

Config = Mapping[str, Any]

LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
FIELDS: Mapping[str, str] = {  # the name of a field in other families: its name in this family
    "rms_norm_eps": "layer_norm_epsilon",
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_state": "ssm_state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}
NAMES = MoeNames(
    router="mixer.gate",
    gate=None,
    up="mixer.experts.{expert}.up_proj",
    down="mixer.experts.{expert}.down_proj",
    shared=None,
    correction="mixer.gate.e_score_correction_bias",
)


def parse(config: Config) -> ModelConfig:
    config = _standard_fields(config)
    kinds = hybrid_layers(config, (ATTENTION, RECURRENT, MLP, MOE))
    norms = pre_norms(config, input="norm", mlp=None)
    inner = positive(config, "mamba_n_heads") * positive(config, "mamba_d_head")
    dt_limit = float(config.get("time_step_min") or 0.0), math.inf
    layers = {
        RECURRENT: DecoderLayer(
            norms, mamba_mixer(config, inner, "mixer", dt_limit=dt_limit), None
        ),
        ATTENTION: DecoderLayer(norms, _attention(config, kinds), None),
        MLP: DecoderLayer(norms, None, _mlp(config, "mixer")),
    }
    if MOE in kinds:
        layers[MOE] = DecoderLayer(norms, None, _moe(config))
    return model(
        config,
        [layers[kind] for kind in kinds],
        names=ModelNames(
            embedding="backbone.embeddings",
            final_norm="backbone.norm_f",
            layer="backbone.layers.{layer}.",
        ),
        ignored=("mtp.",),
    )


def _standard_fields(config: Config) -> Config:
    """Return the config with field names of the other families added."""
    kinds, pattern = config.get("layers_block_type"), config.get("hybrid_override_pattern")
    if kinds is None and pattern is not None:
        kinds = [LETTERS.get(letter, letter) for letter in pattern]
    if not kinds:
        raise UnsupportedModelError(
            "config field layers_block_type is missing: it must list the kind of each layer"
        )
    renamed = {name: config[field] for name, field in FIELDS.items() if field in config}
    return {**config, **renamed, "layer_types": kinds, "num_hidden_layers": len(kinds)}


def _attention(config: Config, kinds: list[str]) -> Attention:
    layers = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    rope = rope_if_configured(config)
    group = kv_group(config, FULL, layers, attention_heads(config), rope)
    return Attention(group, positive(config, "hidden_size"), prefix="mixer")


def _mlp(config: Config, prefix: str, size_field: str = "intermediate_size") -> DenseMlp:
    name = config.get("mlp_hidden_act") or "relu2"
    if name != "relu2":
        raise UnsupportedModelError(
            f"config field mlp_hidden_act={name!r} is not implemented, and ignoring it would "
            "change results; implemented: relu2"
        )
    # squared ReLU: relu(x) gates x
    return dense_mlp(
        config, size_field=size_field, activation="relu", is_gated=False,
        names=MlpNames.below(prefix),
    )  # fmt: skip


def _moe(config: Config) -> MoeWithSharedMlp:
    if config.get("moe_latent_size") is not None:
        raise UnsupportedModelError(
            f"config field moe_latent_size={config['moe_latent_size']}: experts on a latent of "
            "another size than the hidden state are not implemented"
        )
    moe = MoeMlp(positive(config, "hidden_size"), sigmoid_experts(config, activation="relu"), NAMES)
    size_field = "moe_shared_expert_intermediate_size"
    return MoeWithSharedMlp(moe, _mlp(config, "mixer.shared_experts", size_field))


FAMILIES = (
    Family(
        "nemotron_h", "NemotronHForCausalLM", parse,
        frozenset({"n_routed_experts", "n_shared_experts", "num_local_experts"}),
        tiny={
            "nemotron-h": tiny(
                "nemotron_h", "NemotronHForCausalLM", 6, 64, 136, (4, 2, 16),
                hybrid_override_pattern="M-M*EM", layer_norm_epsilon=1e-5, mamba_num_heads=6,
                mamba_head_dim=10, n_groups=3, ssm_state_size=12, conv_kernel=4,
                use_conv_bias=True, mlp_hidden_act="relu2", n_routed_experts=6,
                num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=40,
                moe_shared_expert_intermediate_size=24, n_group=2, topk_group=1,
                routed_scaling_factor=1.5, norm_topk_prob=True,
            ),
        },
    ),
)  # fmt: skip
