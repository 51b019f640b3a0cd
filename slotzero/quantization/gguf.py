"""Quantised weights of GGUF files. Blocks of 32 numbers, or K-quants: blocks of 256 whose groups of
16 or 32 have scales that are quantised too.

Types without a format here (Q2_K, Q3_K) are unpacked when they are read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError
from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import Codes, WeightFormat
from slotzero.quantization.method import (
    Method,
    TensorSource,
    WeightPart,
    finite,
    refuse_field,
    settings_of,
)

Bytes = npt.NDArray[np.uint8]


class BlockSource(TensorSource, Protocol):
    """A GGUF file: a source that also gives a tensor's blocks as they are stored."""

    def read_blocks(self, name: str) -> Bytes:
        """Return the blocks of a weight, uint8 [rows, bytes per row]."""


class Unpacked(NamedTuple):
    """Blocks of one type: codes uint8 [blocks, numbers], scales and offsets [blocks, groups]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None = None


class BlockFormat(NamedTuple):
    format: WeightFormat
    block_len: int  # numbers
    block_bytes: int
    unpack: Callable[[Tensor], Unpacked]  # uint8 [blocks, block_bytes]


@dataclass(frozen=True)
class GgufMethod(Method):
    types: Mapping[str, str] = field(hash=False)
    """The type of each module's weight."""

    name = "gguf"

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> Self:
        types = settings_of(config).get("types")
        if not isinstance(types, Mapping):
            raise refuse_field("types", types, "a mapping from modules to types")
        return cls(types)

    def format_of(self, module: str) -> WeightFormat | None:
        stored = BLOCK_FORMATS.get(self.types.get(module, ""))
        return None if stored is None else stored.format

    def tensors(self, module: str) -> Mapping[str, bool]:
        return {f"{module}.weight": True}

    def read(self, source: TensorSource, module: str, part: WeightPart) -> QuantizedRows:
        stored, name = BLOCK_FORMATS[self.types[module]], f"{module}.weight"
        given = cast(BlockSource, source).read_blocks(name)
        num_rows, columns = part.shape
        if columns % stored.block_len:
            raise CorruptCheckpointError(
                f"{source.name}: rows of tensor {name} have {columns} numbers, and "
                f"{self.types[module]} has blocks of {stored.block_len}"
            )
        shape = num_rows, columns // stored.block_len * stored.block_bytes
        if given.shape != shape:
            raise CorruptCheckpointError(
                f"{source.name}: tensor {name} has {list(given.shape)} bytes, and {list(shape)} "
                f"are needed for a weight {[num_rows, columns]} of type {self.types[module]}"
            )
        wanted = torch.from_numpy(given[part.rows].copy())
        codes, scales, offsets = stored.unpack(wanted.view(-1, stored.block_bytes))
        rows = len(wanted)
        return QuantizedRows(
            codes.reshape(rows, columns),
            finite(source, name, scales).reshape(rows, -1),
            None if offsets is None else finite(source, name, offsets).reshape(rows, -1),
        )


_LOW_HALVES = 0x0F0F0F0F0F0F0F0F  # of eight bytes


def _halves(data: Tensor) -> Tensor:
    """Return pairs of bytes as float16, widened to float32."""
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: Tensor, run: int) -> Tensor:
    """Return 4-bit codes [blocks, numbers]: of each run of bytes first all low halves, then all
    high halves. Eight bytes are processed at a time."""
    words = data.contiguous().view(torch.int64).view(len(data), -1, run // 8)
    codes = torch.stack((words & _LOW_HALVES, words >> 4 & _LOW_HALVES), dim=-2)
    return codes.flatten(1).view(torch.uint8)


def _bits_of(data: Tensor) -> Tensor:
    """Return the bits of 4 bytes, the lowest first: [blocks, 4] -> [blocks, 32]."""
    return (data[..., None] >> torch.arange(8).to(torch.uint8) & 1).flatten(-2)


def _unpack_q4_0(blocks: Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 2:], 16), _halves(blocks[:, :2]))


def _unpack_q4_1(blocks: Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 4:], 16), _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _unpack_q5_0(blocks: Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 6:], 16) | _bits_of(blocks[:, 2:6]) << 4
    return Unpacked(codes, _halves(blocks[:, :2]))


def _unpack_q5_1(blocks: Tensor) -> Unpacked:
    codes = _nibbles(blocks[:, 8:], 16) | _bits_of(blocks[:, 4:8]) << 4
    return Unpacked(codes, _halves(blocks[:, :2]), _halves(blocks[:, 2:4]))


def _unpack_q8_0(blocks: Tensor) -> Unpacked:
    return Unpacked(blocks[:, 2:] ^ 0x80, _halves(blocks[:, :2]))


def _unpack_q4_k(blocks: Tensor) -> Unpacked:
    return Unpacked(_nibbles(blocks[:, 16:], 32), *_scales_of_k(blocks))


def _unpack_q5_k(blocks: Tensor) -> Unpacked:
    high = blocks[:, 16:48]  # bit i of byte j belongs to number 32 * i + j
    fifth = high[:, None] >> torch.arange(8).to(torch.uint8)[:, None] & 1
    codes = _nibbles(blocks[:, 48:], 32) | fifth.flatten(1) << 4
    return Unpacked(codes, *_scales_of_k(blocks))


def _scales_of_k(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and offsets of 8 groups. Each has 6 bits of 12 bytes: groups 0 to 3 the
    lower bits of the bytes 0 to 3 (offsets: 4 to 7); groups 4 to 7 half of the bytes 8 to 11, and
    the two bits that the former leave."""
    low, middle, high = blocks[:, 4:16].reshape(-1, 3, 4).unbind(1)
    scales = torch.cat((low & 63, high & 15 | low >> 2 & 48), dim=-1)
    offsets = torch.cat((middle & 63, high >> 4 | middle >> 2 & 48), dim=-1)
    return _halves(blocks[:, :2]) * scales, -(_halves(blocks[:, 2:4]) * offsets)


def _unpack_q6_k(blocks: Tensor) -> Unpacked:
    lower = _nibbles(blocks[:, :128], 64)
    pairs = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    upper = (pairs >> torch.arange(0, 8, 2).to(torch.uint8)[:, None] & 3).flatten(1)
    scales = _halves(blocks[:, 208:]) * blocks[:, 192:208].view(torch.int8)
    return Unpacked(lower | upper << 4, scales)


def _of_32(codes: Codes, zero: int | None = None) -> WeightFormat:
    """Return the format of blocks of 32, whose scales are float16; without a zero, they have
    offsets in float16."""
    return WeightFormat(
        codes,
        32,
        zero=zero or 0,
        has_offsets=zero is None,
        has_half_offsets=zero is None,
        scale_dtype=torch.float16,
    )


BLOCK_FORMATS: Mapping[str, BlockFormat] = {
    "Q4_0": BlockFormat(_of_32("uint4", zero=8), 32, 18, _unpack_q4_0),
    "Q4_1": BlockFormat(_of_32("uint4"), 32, 20, _unpack_q4_1),
    "Q5_0": BlockFormat(_of_32("uint8", zero=16), 32, 22, _unpack_q5_0),
    "Q5_1": BlockFormat(_of_32("uint8"), 32, 24, _unpack_q5_1),
    "Q8_0": BlockFormat(_of_32("uint8", zero=128), 32, 34, _unpack_q8_0),
    "Q4_K": BlockFormat(WeightFormat("uint4", 32, has_offsets=True), 256, 144, _unpack_q4_k),
    "Q5_K": BlockFormat(WeightFormat("uint8", 32, has_offsets=True), 256, 176, _unpack_q5_k),
    "Q6_K": BlockFormat(WeightFormat("uint8", 16, zero=32), 256, 210, _unpack_q6_k),
}
"""The formats of GGUF's types. Codes of 5 and 6 bits take a byte each."""
