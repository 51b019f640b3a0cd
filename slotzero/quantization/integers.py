"""Integer weights of compressed-tensors: packed into words, or one byte each.

Stored integers are signed; we add half their range to make codes of them.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError
from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import WeightFormat
from slotzero.quantization.method import Layout, TensorSource, WeightPart, finite, take, take_one
from slotzero.quantization.words import num_words, unpack_words, words_around

ALL = slice(None)


@dataclass(frozen=True)
class IntegerLayout(Layout):
    bits: int
    group: int | None
    is_symmetric: bool
    is_per_tensor: bool = False  # one scale for the whole weight
    has_order: bool = False  # a table says which group an input feature is in

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(
            "uint4" if self.bits == 4 else "uint8",
            self.group,
            zero=1 << (self.bits - 1) if self.is_symmetric else 0,
            has_offsets=not self.is_symmetric,
            is_scattered=self.has_order,
        )

    def tensors(self, module: str) -> Mapping[str, bool]:
        fields = [*self.weight_fields, "weight_scale"]
        if not self.is_symmetric:
            fields.append("weight_zero_point")
        if self.has_order:
            fields.append("weight_g_idx")
        return {f"{module}.{field}": True for field in fields}

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        codes = self.read_codes(source, module, part)
        scales = self._read_scales(source, module, part)
        order = self._read_order(source, module, part) if self.has_order else None
        if self.is_symmetric:
            return QuantizedRows(codes, scales, group_of=order)
        zeros = self.read_zeros(source, f"{module}.weight_zero_point", part)
        return QuantizedRows(codes, scales, -zeros.float() * scales, order)

    @property
    @abstractmethod
    def weight_fields(self) -> tuple[str, ...]:
        """Return the names of the tensors that hold the integers."""

    @abstractmethod
    def read_codes(self, source: TensorSource, module: str, part: WeightPart) -> Tensor: ...

    @abstractmethod
    def read_zeros(self, source: TensorSource, name: str, part: WeightPart) -> Tensor:
        """Read the codes of zero, [rows, groups]."""

    def scales_shape(self, part: WeightPart) -> tuple[int, int]:
        num_rows, columns = part.shape
        return num_rows, self.format.num_groups(columns)

    def _read_scales(self, source: TensorSource, module: str, part: WeightPart) -> Tensor:
        name, shape = f"{module}.weight_scale", self.scales_shape(part)
        if not self.is_per_tensor:
            return finite(source, name, take(source, name, shape, part.rows, ALL))
        num_rows = len(range(part.shape[0])[part.rows])
        return finite(source, name, take_one(source, name)).expand(num_rows, 1)

    def _read_order(self, source: TensorSource, module: str, part: WeightPart) -> Tensor:
        name, columns = f"{module}.weight_g_idx", part.shape[1]
        groups = take(source, name, (columns,), dtype=torch.int32)
        last = self.format.num_groups(columns) - 1
        if groups.min() < 0 or groups.max() > last:
            raise CorruptCheckpointError(
                f"{source.name}: tensor {name} holds groups other than 0 to {last}; fetch it again"
            )
        return groups


class PackedLayout(IntegerLayout):
    """Words of 4-bit or 8-bit integers; zeros are packed along the output features."""

    weight_fields = "weight_packed", "weight_shape"

    def read_codes(self, source: TensorSource, module: str, part: WeightPart) -> Tensor:
        (num_rows, columns), name = part.shape, f"{module}.weight_shape"
        stored = take(source, name, (2,)).tolist()
        if stored != [num_rows, columns]:
            raise CorruptCheckpointError(
                f"{source.name}: tensor {name} is {stored}, and the model asks for "
                f"{[num_rows, columns]}"
            )
        name, shape = f"{module}.weight_packed", (num_rows, num_words(columns, self.bits))
        words = take(source, name, shape, part.rows, ALL, dtype=torch.int32)
        return unpack_words(words, self.bits)[:, :columns]

    def read_zeros(self, source: TensorSource, name: str, part: WeightPart) -> Tensor:
        num_rows, num_groups = self.scales_shape(part)
        held, place = words_around(range(num_rows)[part.rows], self.bits)
        shape = num_words(num_rows, self.bits), num_groups
        words = take(source, name, shape, held, ALL, dtype=torch.int32)
        return unpack_words(words.T, self.bits)[:, place].T


class ByteLayout(IntegerLayout):
    """Signed bytes."""

    weight_fields = ("weight",)

    def read_codes(self, source: TensorSource, module: str, part: WeightPart) -> Tensor:
        name = f"{module}.weight"
        return _from_signed(take(source, name, part.shape, part.rows, ALL, dtype=torch.int8))

    def read_zeros(self, source: TensorSource, name: str, part: WeightPart) -> Tensor:
        if self.is_per_tensor:
            return _from_signed(take_one(source, name, torch.int8)).view(1, 1)
        shape = self.scales_shape(part)
        return _from_signed(take(source, name, shape, part.rows, ALL, dtype=torch.int8))


def _from_signed(integers: Tensor) -> Tensor:
    """Add 128."""
    return integers.view(torch.uint8) ^ 0x80
