"""Readers for single fields of a config.json; an unsupported value raises with the reason."""

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
    """Read the activation of the MLPs."""
    field = "hidden_activation" if config.get("hidden_activation") else "hidden_act"
    name = config.get(field) or "silu"
    if name not in ACTIVATIONS:
        raise UnsupportedModelError(
            f"config field {field}={name!r} is not implemented, and ignoring it would change "
            f"results; implemented: {', '.join(ACTIVATIONS)}"
        )
    return ACTIVATIONS[name]


def mapping(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """Read a field whose value is an object; return an empty one if the field is absent."""
    value = config.get(field)
    if value is not None and not isinstance(value, Mapping):
        raise UnsupportedModelError(f"config field {field}={value!r}: must be a JSON object")
    return value or {}


def eps(config: Mapping[str, Any]) -> float:
    return float(config.get("rms_norm_eps", 1e-6))


def positive(config: Mapping[str, Any], field: str) -> int:
    """Read a required field whose value is a positive integer."""
    value = config.get(field)
    if not isinstance(value, int) or value < 1:
        raise UnsupportedModelError(f"config field {field}={value!r}: must be a positive integer")
    return value


def multiplier(config: Mapping[str, Any], field: str) -> float:
    """Read a factor that is 1 unless the field is set."""
    return float(config.get(field) or 1.0)


def either(config: Mapping[str, Any], *fields: str) -> str:
    """Return the name of the first of these fields that is set; of the first one if none is."""
    return next((field for field in fields if config.get(field) is not None), fields[0])


def require(config: Mapping[str, Any], field: str, value: object) -> None:
    """Raise if the field is set to any value but the one that is implemented."""
    given = config.get(field)
    if given is not None and given != value:
        raise UnsupportedModelError(f"config field {field}={given!r}: only {value} is implemented")
