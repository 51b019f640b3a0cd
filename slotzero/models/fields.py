"""Single fields of a config.json: read, or refused with the reason."""

from collections.abc import Mapping
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Activation

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def activation(config: Mapping[str, Any]) -> Activation:
    field = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    name = config.get(field) or "silu"
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config field {field}={name!r} changes results and is not implemented; "
            f"implemented: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Return a field that holds fields of its own; empty where there is none."""
    value = config.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise UnsupportedModelError(f"config field {field}={value!r}: fields of its own are needed")
    return value or {}


def eps(config: Mapping[str, Any]) -> float:
    return float(config.get("rms_norm_eps", 1e-6))


def positive(config: Mapping[str, Any], field: str) -> int:
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config field {field}={value!r}: a positive number is needed")
    return value


def multiplier(config: Mapping[str, Any], field: str) -> float:
    return float(config.get(field) or 1.0)


def require(config: Mapping[str, Any], field: str, value: object) -> None:
    """Refuse a field that has another value than the one that is implemented."""
    given = config.get(field)
    if given is not None and given != value:
        raise UnsupportedModelError(f"config field {field}={given!r}: only {value} is implemented")
