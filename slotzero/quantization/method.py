"""The contract of a quantisation method: the way in which a checkpoint stores quantised weights.

A method reads a module's tensors into QuantizedRows. It does not know blocks, ranks or kernels: the
rows that it reads are those of the checkpoint.
"""

import fnmatch
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import WeightFormat

FIELD = "config field quantization_config"
_IN_LAYER = re.compile(r"(?:.*\.)?layers\.\d+\.")
_KEPT = ("gate", "shared_expert_gate", "router", "conv1d", "eh_proj")
"""Names of modules that checkpoints keep in the compute type, though they lie in a layer."""

CACHE_SCALES = (
    ".k_scale",
    ".v_scale",
    ".kv_scale",
    ".k_proj.output_scale",
    ".v_proj.output_scale",
)
"""Ends of the names of tensors that scale an 8-bit KV cache; they do not change any weight."""


class TensorSource(Protocol):
    """The part of a checkpoint that a method needs."""

    name: str

    def names(self) -> Collection[str]: ...
    def read(self, name: str) -> Tensor: ...
    def read_part(self, name: str, *wanted: slice) -> tuple[Tensor, tuple[int, ...]]: ...


class WeightPart(NamedTuple):
    """The part of a module's weight that is read: some rows, all columns."""

    rows: slice
    shape: tuple[int, int]  # of the whole weight: output features, input features
    experts: slice | None = None  # where one tensor holds all experts
    num_experts: int = 0


class Method(ABC):
    """How a checkpoint's weights are quantised. Equal methods store all modules alike."""

    name: str
    """The quant_method of config.json."""
    kv_cache_scheme: bool = False
    """Whether the checkpoint asks for a KV cache in float8."""

    @abstractmethod
    def format_of(self, module: str) -> WeightFormat | None:
        """Return the storage format of a module's weight; None: it is not quantised."""

    @abstractmethod
    def tensors(self, module: str) -> Mapping[str, bool]:
        """Return the tensors of a quantised module, and whether each must be there."""

    @abstractmethod
    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        """Read part of a quantised weight."""


class Layout(ABC):
    """How one quantised weight is stored. A method has one layout, or one per group of modules."""

    @property
    @abstractmethod
    def format(self) -> WeightFormat: ...

    @abstractmethod
    def tensors(self, module: str) -> Mapping[str, bool]:
        """See Method.tensors."""

    @abstractmethod
    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        """See Method.read."""


def take(
    source: TensorSource,
    name: str,
    shape: Sequence[int],
    *wanted: slice,
    of: str = "",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Read part of a tensor, which must have this shape and type."""
    tensor, whole = source.read_part(name, *(wanted or (slice(None),) * len(shape)))
    if tuple(whole) != tuple(shape):
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} has shape {list(whole)}, and {list(shape)} is needed"
            + (f" for {of}" if of else "")
        )
    _check_dtype(source, name, tensor, dtype)
    return tensor


def _check_dtype(
    source: TensorSource, name: str, tensor: Tensor, dtype: torch.dtype | None
) -> None:
    if dtype is not None and tensor.dtype is not dtype:
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} is {tensor.dtype}, and {dtype} is needed"
        )


def check_plain(source: str, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor that is not quantised; refuse one of bytes, whose scales nothing names."""
    if tensor.itemsize == 1:
        raise UnsupportedModelError(
            f"{source}: tensor {name} is {tensor.dtype}, and by its config it is not quantised: "
            "its scales are unknown"
        )
    return tensor


def take_one(source: TensorSource, name: str, dtype: torch.dtype | None = None) -> Tensor:
    """Read a tensor of one number, stored with one axis or none -> [1]."""
    tensor = source.read(name)
    if tensor.shape not in ((), (1,)):
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} has shape {list(tensor.shape)}, and one number is needed"
        )
    _check_dtype(source, name, tensor, dtype)
    return tensor.view(1)


def finite(
    source: TensorSource, name: str, scales: Tensor, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return numbers in float32; refuse any that are not finite in float32 or in `dtype`, in which
    they are kept."""
    if not scales.is_floating_point():
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} is {scales.dtype}, and floating point is needed"
        )
    if not scales.to(dtype).isfinite().all():
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} holds a number that is not finite; fetch it again"
        )
    return scales.float()


def read_input_scale(source: TensorSource, module: str) -> Tensor:
    """Return the static scale of a module's input, [1]."""
    name = f"{module}.input_scale"
    scale = finite(source, name, take_one(source, name))
    if not (scale > 0).all():
        raise CorruptCheckpointError(
            f"{source.name}: tensor {name} must be positive, and it is {scale.item()}"
        )
    return scale


def settings_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the quantization_config of a config.json."""
    given = config["quantization_config"]
    return given if isinstance(given, Mapping) else {}


def refuse_field(field: str, value: object, implemented: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{FIELD} has {field}={value!r}: implemented is {implemented}")


def flag_of(given: Mapping[str, Any], field: str, default: bool) -> bool:
    """Return a field that is true or false; null counts as missing."""
    value = given.get(field)
    if not isinstance(value, bool | None):
        raise refuse_field(field, value, "true or false")
    return default if value is None else value


def names_of(given: Mapping[str, Any], field: str) -> tuple[str, ...]:
    """Return a field that is a list of names, perhaps in several lists; null counts as empty."""
    value = given.get(field) or ()
    lists = value if isinstance(value, list | tuple) else (None,)
    names = [name for one in lists for name in (one if isinstance(one, list | tuple) else (one,))]
    if not all(isinstance(name, str) for name in names):
        raise refuse_field(field, value, "a list of names")
    for name in names:
        _check_pattern(field, name)
    return tuple(names)


def _check_pattern(field: str, name: str) -> None:
    try:
        re.compile(name.removeprefix("re:") if name.startswith("re:") else "")
    except re.error:
        raise refuse_field(field, name, "valid regular expressions") from None


def group_of(given: Mapping[str, Any]) -> int | None:
    """Return the field group_size; None: a whole row is one group."""
    size = given.get("group_size")
    if not is_count(size) and size != -1:
        raise refuse_field("group_size", size, "a positive number, or -1 for whole rows")
    return None if size == -1 else size


def scale_dtype_of(config: Mapping[str, Any]) -> torch.dtype:
    """Return the type that holds the scales of integer weights, which are stored in float16 or in
    the model's own type."""
    stored = config.get("dtype") or config.get("torch_dtype") or "float16"
    return torch.float16 if stored == "float16" else torch.float32


def is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def has_float8_cache(given: Mapping[str, Any]) -> bool:
    """Return whether the field kv_cache_scheme asks for a KV cache in float8."""
    scheme = given.get("kv_cache_scheme")
    if scheme is None:
        return False
    known = {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "symmetric": True,
        "dynamic": False,
    }
    if not isinstance(scheme, Mapping) or any(scheme.get(k, v) != v for k, v in known.items()):
        implemented = "8-bit float with one static scale per tensor"
        raise refuse_field("kv_cache_scheme", scheme, implemented)
    return True


def is_linear(module: str) -> bool:
    """Return whether a module is a linear layer that is quantised where a config says no more: not
    a router, a norm, an embedding or a convolution."""
    *parents, name = module.split(".")
    return (
        name not in _KEPT
        and "router" not in parents
        and not name.endswith("norm")
        and not any("embed" in part for part in (*parents, name))
    )


def is_layer_linear(module: str) -> bool:
    """Return whether a module is such a linear layer in one of the decoder's layers."""
    return is_linear(module) and _IN_LAYER.match(module) is not None


class _Patterns(NamedTuple):
    names: frozenset[str]
    others: tuple[str, ...]  # globs and regular expressions


@cache
def _sorted_patterns(patterns: tuple[str, ...]) -> _Patterns:
    others = tuple(p for p in patterns if p.startswith("re:") or "*" in p)
    plain = (p for p in patterns if p not in others)
    return _Patterns(frozenset(in_text_model(p).strip(".") for p in plain), others)


def matches(module: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a list of modules names this one: itself, a parent of it, the last part of its
    name, or a pattern (re:...) or glob that fits.

    Names are looked up, not tried one by one: a model may have 100,000 modules, and leave out
    hundreds.
    """
    names, others = _sorted_patterns(patterns)
    if names:
        parts = module.split(".")
        num = len(parts)
        runs = (".".join(parts[i:j]) for i in range(num) for j in range(i + 1, num + 1))
        if not names.isdisjoint(runs):
            return True
    return any(_matches(module, pattern) for pattern in others)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    parts = f".{module}.".split(".")
    starts = (".".join(parts[1:end]) for end in range(2, len(parts)))
    return any(fnmatch.fnmatchcase(start, pattern) for start in starts)


def in_text_model(name: str) -> str:
    """Return a module's name in the text model, from that in a multimodal model."""
    return name.replace("language_model.model.", "model.").replace("language_model.", "")
