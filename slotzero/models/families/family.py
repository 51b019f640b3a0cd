"""The contract of a model family, and the table of all families.

A family file defines `FAMILIES`. To add a family from outside the package, call `register`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cache
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.config import ModelConfig
from slotzero.models.rope import refuse_two_ropes
from slotzero.quantization.quantization import parse_quantization

Config = Mapping[str, Any]  # config.json


@dataclass(frozen=True)
class Family:
    """One architecture: how to parse its config.json, and which config fields it implements."""

    model_type: str
    architecture: str
    parse: Callable[[Config], ModelConfig]
    """Return the ModelConfig for a config.json; raise UnsupportedModelError if it cannot run."""
    implements: frozenset[str] = frozenset()
    """Fields of NEUTRAL that the family implements."""
    tiny: Mapping[str, Config] = field(default_factory=dict)
    """Random models of a few hundred kilobytes, by name (`tiny:NAME`)."""
    aliases: tuple[str, ...] = ()
    """Other model_types with the same architecture and fields."""
    defaults: Config = field(default_factory=dict)
    """Values of fields that published config.json files leave out."""
    multimodal: Mapping[str, str] = field(default_factory=dict)
    """Multimodal architectures whose language model this is, with the model_type that its config
    has there, in the field text_config. Only text is supported; see checkpoint/text_part.py."""


# Fields that must not be ignored, because they change results, and the values without an effect.
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "use_sliding_window": (None, False),
    "use_bidirectional_attention": (None, False, "vision"),  # images are not supported anyway
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "v_head_dim": (None,),
    "kv_lora_rank": (None,),
    "num_nextn_predict_layers": (None, 0),
    "moe_layer_freq": (None, 1),
    "attention_value_scale": (None, 1, 1.0),
    "hybrid_layer_pattern": (None,),
    "swa_num_key_value_heads": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
    "residual_multiplier": (None, 1, 1.0),
    "attention_multiplier": (None,),
    "query_pre_attn_scalar": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "clip_qkv": (None,),
    "no_rope_layers": (None,),
    "no_rope_layer_interval": (None,),
    "attention_chunk_size": (None,),
    "attn_temperature_tuning": (None, False),
    "attention_out_bias": (None, False),
    "use_bias": (None, False),
    "use_cla": (None, False),  # layers that read the KV of the layer before them
    "use_qk_norm": (None, False),
    "logit_scale": (None, 1, 1.0),
    "per_layer_config": (None, {}),
    "global_head_dim": (None,),
    "num_global_key_value_heads": (None,),
    "attention_k_eq_v": (None, False),
    "num_kv_shared_layers": (None, 0),
    "use_double_wide_mlp": (None, False),
    "hidden_size_per_layer_input": (None, 0),
    "enable_moe_block": (None, False),
}
_REGISTERED: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family that is defined outside this package."""
    _REGISTERED[family.architecture] = family


def families() -> Mapping[str, Family]:
    """Return all families by architecture: those of this package, then registered ones."""
    return {**_packaged(), **_REGISTERED}


@cache
def _packaged() -> Mapping[str, Family]:
    package = __name__.rpartition(".")[0]
    path = importlib.import_module(package).__path__
    modules = (importlib.import_module(f"{package}.{m.name}") for m in pkgutil.iter_modules(path))
    found = [f for module in modules for f in vars(module).get("FAMILIES", ())]
    return {family.architecture: family for family in found}


def architecture_of(model_type: str) -> str:
    """Return the architecture of a model_type; return an unknown model_type unchanged."""
    known = families().values()
    named = {name: f.architecture for f in known for name in (f.model_type, *f.aliases)}
    return named.get(model_type, model_type)


def language_models(architecture: str) -> Mapping[str, Family]:
    """Return the families that may be the language model of a multimodal architecture, by the
    model_type of text_config; empty if the architecture is not multimodal."""
    found = (family for family in families().values() if architecture in family.multimodal)
    return {family.multimodal[architecture]: family for family in found}


def architecture_in(config: Config) -> str:
    """Return the architecture that a config.json names, directly or by its model_type."""
    named = architecture_of(str(config.get("model_type")))
    architecture: str = (config.get("architectures") or [named])[0]
    return architecture


def family_of(config: Config) -> Family:
    """Return the family that a config.json names."""
    known, architecture = families(), architecture_in(config)
    family = known.get(architecture)
    if family is None:
        names = [*known, *dict.fromkeys(name for f in known.values() for name in f.multimodal)]
        near = get_close_matches(architecture, names, n=4, cutoff=0.0)
        raise UnsupportedModelError(
            f"architecture {architecture!r} is not supported; the most similar of {len(names)} "
            f"that are supported: {', '.join(near)}"
        )
    model_type = config.get("model_type", family.model_type)
    if model_type not in (family.model_type, *family.aliases):
        raise UnsupportedModelError(
            f"config field model_type={model_type!r} contradicts architecture {architecture}, "
            f"which has model_type={family.model_type!r}: correct config.json"
        )
    return family


def parse_config(config: Config) -> ModelConfig:
    """Return the ModelConfig for a config.json; raise on a field that is not implemented."""
    family = family_of(config)
    _refuse_unimplemented(config, family)
    model = family.parse({"model_type": family.model_type, **family.defaults, **config})
    return replace(model, quantization=parse_quantization(config))


def _refuse_unimplemented(config: Config, family: Family) -> None:
    for name, neutral in NEUTRAL.items():
        if name not in family.implements and name in config and config[name] not in neutral:
            raise UnsupportedModelError(
                f"config field {name}={config[name]!r} is not implemented for "
                f"{family.model_type}, and ignoring it would change results"
            )
    refuse_two_ropes(config)
