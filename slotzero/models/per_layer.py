"""What a config says of single layers: other heads, and whose KV a layer reads.

Layers of one group share a pool, so they must agree on their heads. A layer that owns no KV attends
to what the last owner of its group stored.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Heads

FIELDS = ("head_dim", "num_key_value_heads")


def heads_of(config: Mapping[str, Any], group: str, layers: Sequence[int], heads: Heads) -> Heads:
    """Of these layers, all of one group, where `heads` are those of the config as a whole."""
    given = config.get("per_layer_config") or {}
    own = [given.get(str(layer), given.get(layer)) or {} for layer in layers]
    if any(fields != own[0] for fields in own):
        raise UnsupportedModelError(
            f"config field per_layer_config: {group} layers differ from one another, "
            "which is not implemented"
        )
    for field, value in own[0].items():
        if field not in FIELDS or not isinstance(value, int) or value < 1:
            raise UnsupportedModelError(
                f"config field per_layer_config has {field}={value!r} for {group} layers: only "
                f"positive {' and '.join(FIELDS)} are implemented"
            )
    return replace(
        heads,
        head_dim=own[0].get("head_dim", heads.head_dim),
        value_dim=own[0].get("head_dim", heads.value_dim),
        num_kv_heads=own[0].get("num_key_value_heads", heads.num_kv_heads),
    )


def with_full_heads(
    config: Mapping[str, Any], full_layers: Sequence[int], head_dim: int
) -> Mapping[str, Any]:
    """A config whose per_layer_config is made from the older fields, which are for full layers."""
    if config.get("per_layer_config") is not None:
        return config
    own = {"head_dim": config.get("global_head_dim") or head_dim}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        own["num_key_value_heads"] = config["num_global_key_value_heads"]
    return {**config, "per_layer_config": {str(layer): own for layer in full_layers}}


def owners_and_readers(
    config: Mapping[str, Any], group: str, layers: Sequence[int], num_layers: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Of these layers, all of one group: those that own KV, and those that read an owner's."""
    num_shared = config.get("num_kv_shared_layers") or 0
    if not isinstance(num_shared, int) or not 0 <= num_shared < num_layers:
        raise UnsupportedModelError(
            f"config field num_kv_shared_layers={num_shared!r}: a number below "
            f"num_hidden_layers={num_layers} is needed"
        )
    first = num_layers - num_shared
    owners = tuple(layer for layer in layers if layer < first)
    if not owners:
        raise UnsupportedModelError(
            f"config field num_kv_shared_layers={num_shared}: no {group} layer is left to own KV"
        )
    return owners, tuple(layer for layer in layers if layer >= first)
