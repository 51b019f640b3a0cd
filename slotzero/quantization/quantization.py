"""What becomes of a model's weights: how they are stored, and how they are kept in memory.

`--quantization` may convert weights while they load, or unpack packed ones; otherwise they stay as
the checkpoint has them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from torch import Tensor

from slotzero.errors import ConfigError, UnsupportedModelError
from slotzero.kernels.quantized import QuantizedRows, dequantise, regroup
from slotzero.kernels.weights import WeightFormat
from slotzero.quantization.awq import AwqMethod
from slotzero.quantization.compressed_tensors import CompressedTensorsMethod
from slotzero.quantization.fp8 import Fp8Method
from slotzero.quantization.gguf import GgufMethod
from slotzero.quantization.gptq import GptqMethod
from slotzero.quantization.method import FIELD, Method, TensorSource, WeightPart
from slotzero.quantization.modelopt import ModelOptMethod
from slotzero.quantization.mxfp4 import Mxfp4Method

CHOICE = "slotzero_quantization"
"""The field of a checkpoint's config that holds the user's --quantization."""
METHODS: Mapping[str, Callable[[Mapping[str, Any]], Method]] = {
    "fp8": Fp8Method.parse,
    "compressed-tensors": CompressedTensorsMethod.parse,
    "modelopt": ModelOptMethod.parse,
    "gptq": GptqMethod.parse,
    "awq": AwqMethod.parse,
    "mxfp4": Mxfp4Method.parse,
    "gguf": GgufMethod.parse,
}
ONLINE: Mapping[str, WeightFormat] = {
    "fp8": WeightFormat("float8", activations="float8_row"),
    "int8": WeightFormat("uint8", 128, zero=128),
    "int4": WeightFormat("uint4", 32, zero=8),
}
GROUPS = 128, 64, 32


@dataclass(frozen=True)
class Quantization:
    stored: Method | None = None
    """How the checkpoint is quantised; None: not at all."""
    online: WeightFormat | None = None
    """The format into which weights are converted while they load."""
    unpacks: bool = False
    """Unpack quantised weights to the compute type."""

    @property
    def asks_for_fp8_cache(self) -> bool:
        return self.stored is not None and self.stored.kv_cache_scheme

    def format_of(self, module: str, in_features: int, is_sensitive: bool) -> WeightFormat | None:
        """Return the format in which a linear layer's weight is kept; None: the compute type."""
        if self.online is not None:
            return None if is_sensitive else _fit_online(self.online, in_features)
        if self.stored is None or self.unpacks:
            return None
        format = self.stored.format_of(module)
        if format is not None and format.is_scattered:
            return replace(format, groups=format.num_groups(in_features))
        return format

    def tensors(self, module: str) -> Mapping[str, bool] | None:
        """Return the tensors that the checkpoint has for a quantised module, and whether each must
        be there; None: the module is not quantised."""
        if self.stored is None or self.stored.format_of(module) is None:
            return None
        return self.stored.tensors(module)

    def read_rows(
        self,
        source: TensorSource,
        module: str,
        part: WeightPart,
        columns: slice,
        format: WeightFormat,
    ) -> QuantizedRows:
        """Read some rows and columns of a quantised weight in the format in which it is kept."""
        assert self.stored is not None
        stored = self.stored.format_of(module)
        assert stored is not None
        rows = self.stored.read(source, module, part)
        if stored.is_scattered:
            assert rows.group_of is not None
            return rows._replace(
                codes=rows.codes[..., columns], group_of=rows.group_of[columns].contiguous()
            )
        if stored.group is None:
            return rows._replace(codes=rows.codes[..., columns])
        return regroup(rows, columns, stored.group, format.group or stored.group)

    def read_dense(
        self, source: TensorSource, module: str, part: WeightPart, columns: slice
    ) -> Tensor:
        """Read some rows and columns of a quantised weight as float32 numbers."""
        assert self.stored is not None
        format = self.stored.format_of(module)
        assert format is not None
        return dequantise(self.stored.read(source, module, part), format)[..., columns]


NOT_QUANTIZED = Quantization()


def fit(format: WeightFormat, in_features: int) -> WeightFormat:
    """Return the format for a rank's part of the input features: if groups do not divide them, the
    groups are cut into smaller ones that do."""
    if format.group is None or format.is_scattered or in_features % format.group == 0:
        return format
    return replace(format, group=gcd(format.group, in_features))


def _fit_online(format: WeightFormat, in_features: int) -> WeightFormat:
    """Return the format with the largest groups that divide the input features."""
    if format.group is None:
        return format
    return replace(
        format, group=next((g for g in GROUPS if g <= format.group and in_features % g == 0), None)
    )


def parse_quantization(config: Mapping[str, Any]) -> Quantization:
    """Return what a checkpoint's config and the user's choice ask for; refuse the rest by name."""
    choice, given = config.get(CHOICE, "auto"), config.get("quantization_config")
    stored = _parse_method(config) if given else None
    if choice == "auto":
        return Quantization(stored)
    if choice == "none":
        return Quantization(stored, unpacks=True)
    if stored is not None and stored.name != "gguf":
        raise ConfigError(
            f"quantization={choice}: the checkpoint is quantised already ({stored.name}); drop the "
            "setting, or use the unquantised checkpoint"
        )
    return Quantization(stored, online=ONLINE[choice])


def refuse_quantized(config: Mapping[str, Any], name: str, kind: str) -> None:
    """Raise if a checkpoint of this kind is quantised, for loaders that read plain tensors only."""
    if config.get("quantization_config"):
        raise UnsupportedModelError(
            f"{name}: a quantised {kind} (config field quantization_config) is not implemented; "
            "use the unquantised one"
        )


def _parse_method(config: Mapping[str, Any]) -> Method:
    given = config["quantization_config"]
    if not isinstance(given, Mapping):
        raise UnsupportedModelError(f"{FIELD}={given!r}: must be a mapping")
    name = str(given.get("quant_method"))
    if name not in METHODS:
        raise UnsupportedModelError(
            f"{FIELD} has quant_method={name!r}: implemented are {', '.join(METHODS)}"
        )
    return METHODS[name](config)
