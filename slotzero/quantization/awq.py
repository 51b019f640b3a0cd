"""AWQ weights, as AutoAWQ's GEMM kernel stores them: integers of 4 bits, [in, out] and packed along
the output features, those of a word in the order 0, 2, 4, 6, 1, 3, 5, 7.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError
from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import WeightFormat
from slotzero.quantization.method import (
    Method,
    TensorSource,
    WeightPart,
    finite,
    flag_of,
    group_of,
    is_layer_linear,
    matches,
    names_of,
    refuse_field,
    scale_dtype_of,
    settings_of,
    take,
)
from slotzero.quantization.words import num_words, unpack_words, words_around

BITS, MIDDLE = 4, 8
PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word of each of its output features."""
ALL = slice(None)


@dataclass(frozen=True)
class AwqMethod(Method):
    group: int | None
    has_zeros: bool
    scale_dtype: torch.dtype
    ignored: tuple[str, ...] = ()

    name = "awq"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        given = settings_of(config)
        if given.get("bits") != BITS:
            raise refuse_field("bits", given.get("bits"), str(BITS))
        for field in ("version", "format", "checkpoint_format"):
            if str(given.get(field) or "gemm").lower() != "gemm":
                raise refuse_field(field, given[field], "gemm")
        if (given.get("backend") or "autoawq") != "autoawq":
            raise refuse_field("backend", given["backend"], "autoawq")
        return cls(
            group_of(given),
            flag_of(given, "zero_point", True),
            scale_dtype_of(config),
            names_of(given, "modules_to_not_convert"),
        )

    def format_of(self, module: str) -> WeightFormat | None:
        if not is_layer_linear(module) or matches(module, self.ignored):
            return None
        return self._format

    @property
    def _format(self) -> WeightFormat:
        return WeightFormat(
            "uint4",
            self.group,
            zero=0 if self.has_zeros else MIDDLE,
            has_offsets=self.has_zeros,
            scale_dtype=self.scale_dtype,
        )

    def tensors(self, module: str) -> Mapping[str, bool]:
        fields = {"qweight": True, "scales": True, "qzeros": self.has_zeros}
        return {f"{module}.{field}": needed for field, needed in fields.items()}

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        num_rows, columns = part.shape
        groups = self._format.num_groups(columns)
        codes = _read_codes(source, f"{module}.qweight", columns, part)
        name = f"{module}.scales"
        stored = take(source, name, (groups, num_rows), ALL, part.rows)
        scales = finite(source, name, stored, self.scale_dtype).T
        name = f"{module}.qzeros"
        if not self.has_zeros and name not in source.names():
            return QuantizedRows(codes, scales)
        zeros = _read_codes(source, name, groups, part)
        if self.has_zeros:
            return QuantizedRows(codes, scales, -zeros.float() * scales)
        if (zeros != MIDDLE).any():
            raise CorruptCheckpointError(
                f"{source.name}: tensor {name} holds zeros other than {MIDDLE}, although "
                "quantization_config has zero_point=false; fetch it again"
            )
        return QuantizedRows(codes, scales)


def _read_codes(source: TensorSource, name: str, length: int, part: WeightPart) -> Tensor:
    """Read some output features of packed codes [length, out] -> [rows, length]."""
    num_rows, _ = part.shape
    held, place = words_around(range(num_rows)[part.rows], BITS)
    shape = length, num_words(num_rows, BITS)
    words = take(source, name, shape, ALL, held, dtype=torch.int32)
    codes = unpack_words(words, BITS).view(length, -1, len(PLACES))
    ordered = codes[..., list(PLACES)].flatten(-2)  # [length, output features]
    return ordered[:, place].T.contiguous()
