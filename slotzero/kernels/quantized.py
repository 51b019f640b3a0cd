"""Arithmetic of quantised weights in plain torch: the definition of every packed kernel.

`QuantizedRows` is the common form: one code per byte, in the order of the checkpoint's features. A
format's reader makes it, a rank takes its part of it, and a kernel set packs it.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.weights import (
    DenseWeight,
    JoinedWeight,
    LinearWeight,
    QuantizedWeight,
    WeightFormat,
)

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
SMALLEST_SCALE = 1e-12  # of rows that are all zeros
MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
MXFP4_BIAS = 127
INTEGER_MAX = 127.0  # of activations in 8 bits
SMALLEST_PEAK = 1e-30  # activations below it are rounded to zeros


class QuantizedRows(NamedTuple):
    """Rows of a quantised weight; experts, if there are several, come first."""

    codes: Tensor  # [..., rows, columns] uint8
    scales: Tensor  # [..., rows, groups]; uint8 for mxfp4
    offsets: Tensor | None = None  # [..., rows, groups]
    group_of: Tensor | None = None  # [columns] int32
    input_scale: Tensor | None = None  # [1]

    def to(self, device: torch.device) -> "QuantizedRows":
        return QuantizedRows._make(None if t is None else t.to(device) for t in self)

    def select(self, order: Tensor) -> "QuantizedRows":
        """Take rows in this order."""
        offsets = None if self.offsets is None else self.offsets.index_select(-2, order)
        codes, scales = self.codes.index_select(-2, order), self.scales.index_select(-2, order)
        return self._replace(codes=codes, scales=scales, offsets=offsets)

    def scaled(self, scale: float) -> "QuantizedRows":
        """Multiply all numbers by a scale."""
        if self.scales.dtype is torch.uint8:
            power = math.log2(scale)
            if power != int(power):
                raise UnsupportedModelError(f"mxfp4 weights cannot be scaled by {scale}")
            return self._replace(scales=self.scales + int(power))
        offsets = None if self.offsets is None else self.offsets * scale
        return self._replace(scales=self.scales.float() * scale, offsets=offsets)


def join_rows(parts: Sequence[QuantizedRows], names: Sequence[str]) -> QuantizedRows:
    """Join weights of one input, row after row. They share the largest scale of the input."""
    first, *others = parts
    if not others:
        return first
    for other, name in zip(others, names[1:], strict=True):
        if not _is_same(first.group_of, other.group_of):
            raise UnsupportedModelError(
                f"tensors {names[0]} and {name} are computed together and have different g_idx: "
                "not implemented"
            )
    return QuantizedRows(
        torch.cat([part.codes for part in parts], dim=-2),
        torch.cat([part.scales for part in parts], dim=-2),
        _joined([part.offsets for part in parts], lambda given: torch.cat(given, dim=-2)),
        first.group_of,
        _joined([part.input_scale for part in parts], lambda given: torch.stack(given).amax(0)),
    )


def stack_rows(experts: Sequence[QuantizedRows]) -> QuantizedRows:
    """Stack the weights of experts, without the scale of their input."""
    return QuantizedRows(
        torch.stack([rows.codes for rows in experts]),
        torch.stack([rows.scales for rows in experts]),
        _joined([rows.offsets for rows in experts], torch.stack),
    )


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def _joined(
    given: Sequence[Tensor | None], join: Callable[[list[Tensor]], Tensor]
) -> Tensor | None:
    there = [tensor for tensor in given if tensor is not None]
    return join(there) if there else None


def values_of(codes: Tensor, format: WeightFormat) -> Tensor:
    """Return codes, one per byte, as float32 numbers before their scale."""
    match format.codes:
        case "float8":
            return codes.view(FLOAT8).float()
        case "mxfp4":
            values = (*MXFP4_VALUES, *(-value for value in MXFP4_VALUES))
            return torch.tensor(values, device=codes.device)[codes.int()]
    return codes.float() - format.zero


def scales_of(scales: Tensor) -> Tensor:
    """Return scales as float32 numbers; bytes are exponents."""
    if scales.dtype is torch.uint8:
        return (scales.float() - MXFP4_BIAS).exp2()
    return scales.float()


def dequantise(rows: QuantizedRows, format: WeightFormat) -> Tensor:
    """Return [..., rows, columns] in float32."""
    columns = rows.codes.shape[-1]
    if rows.group_of is not None:
        groups = rows.group_of.long()
    else:
        groups = torch.arange(columns, device=rows.codes.device) // (format.group or columns)
    numbers = values_of(rows.codes, format) * scales_of(rows.scales)[..., groups]
    return numbers if rows.offsets is None else numbers + rows.offsets.float()[..., groups]


def quantise(weight: Tensor, format: WeightFormat) -> QuantizedRows:
    """Round a weight [..., rows, columns] to the nearest codes, with the least scales that hold the
    largest number of each group.

    Experts are rounded one after the other: in between, numbers take several times their memory.
    """
    if weight.ndim > 2:
        return stack_rows([quantise(one, format) for one in weight])
    columns = weight.shape[-1]
    group = format.group or columns
    groups = -(-columns // group)
    padded = F.pad(weight.float(), (0, groups * group - columns))
    grouped = padded.view(*padded.shape[:-1], groups, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    offsets = None
    match format.codes:
        case "float8":
            scales = _rounded(_divide(torch.maximum(high, -low), FLOAT8_MAX), format)
            codes = (grouped / scales[..., None]).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
            codes = codes.view(torch.uint8)
        case "mxfp4":
            power = (torch.maximum(high, -low).clamp_min(2.0**-120) / 6).log2().ceil()
            scales = (power + MXFP4_BIAS).clamp(0, 254).to(torch.uint8)
            codes = _nearest_mxfp4(grouped / power.exp2()[..., None])
        case _:
            top = (1 << format.bits) - 1
            if format.has_offsets:
                low = low.half().float() if format.has_half_offsets else low
                scales, offsets = _rounded(_divide(high - low, top), format), low
                numbers = (grouped - low[..., None]) / scales[..., None]
            else:
                largest = torch.maximum(
                    _divide(high, top - format.zero), _divide(-low, format.zero)
                )
                scales = _rounded(largest, format)
                numbers = grouped / scales[..., None] + format.zero
            codes = numbers.round().clamp(0, top).to(torch.uint8)
    return QuantizedRows(codes.flatten(-2)[..., :columns], scales, offsets)


def _rounded(scales: Tensor, format: WeightFormat) -> Tensor:
    """Return scales as they are stored."""
    return scales.clamp_min(SMALLEST_SCALE).to(format.scale_dtype).float()


def _nearest_mxfp4(numbers: Tensor) -> Tensor:
    """Return the codes of the nearest numbers; of two equally near, the even code."""
    values = torch.tensor(MXFP4_VALUES, device=numbers.device)
    middles = (values[1:] + values[:-1]) / 2
    size = numbers.abs()
    above = torch.bucketize(size, middles, right=True)
    below = torch.bucketize(size, middles)
    codes = torch.where(above % 2 == 0, above, below)
    return (codes + 8 * (numbers < 0)).to(torch.uint8)


def regroup(rows: QuantizedRows, columns: slice, group: int, finer: int) -> QuantizedRows:
    """Take some columns of consecutive groups, in groups of `finer` columns that divide both the
    groups and the first column."""
    first, last = columns.start, columns.stop
    repeat = group // finer

    def take(scales: Tensor) -> Tensor:
        each = scales if repeat == 1 else scales.repeat_interleave(repeat, dim=-1)
        return each[..., first // finer : -(-last // finer)]

    offsets = None if rows.offsets is None else take(rows.offsets)
    return rows._replace(codes=rows.codes[..., columns], scales=take(rows.scales), offsets=offsets)


def pack_pairs(codes: Tensor) -> Tensor:
    """Pack 4-bit codes along the last axis, two per byte, the earlier one in the low half."""
    codes = F.pad(codes, (0, codes.shape[-1] % 2))
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_pairs(packed: Tensor, columns: int) -> Tensor:
    """Undo `pack_pairs`."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)[..., :columns]


def pack_rows(rows: QuantizedRows, format: WeightFormat) -> dict[str, Tensor]:
    """Return the tensors of a weight in the plain layout of WeightFormat.shapes."""
    packed = rows._asdict() | {
        "codes": pack_pairs(rows.codes) if format.bits == 4 else rows.codes,
        "scales": rows.scales.to(format.scale_dtype),
    }
    return {field: tensor for field, tensor in packed.items() if tensor is not None}


def unpack_rows(weight: QuantizedWeight) -> QuantizedRows:
    """Return the rows of a weight in the plain layout."""
    codes = weight.codes
    if weight.format.bits == 4:
        codes = unpack_pairs(codes, weight.in_features)
    return QuantizedRows(codes, weight.scales, weight.offsets, weight.group_of, weight.input_scale)


def embed_rows(ids: Tensor, weight: QuantizedWeight) -> Tensor:
    """Return rows of a weight in the plain layout: ids [T] -> [T, in_features]."""
    picked = weight._replace(
        codes=weight.codes[ids],
        scales=weight.scales[ids],
        offsets=None if weight.offsets is None else weight.offsets[ids],
    )
    return dequantise(unpack_rows(picked), weight.format).to(weight.dtype)


def select_expert(weights: LinearWeight, expert: int) -> LinearWeight:
    """Return the weight of one expert."""

    def of_expert(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[expert]

    match weights:
        case DenseWeight(data, bias):
            return weights._replace(data=data[expert], bias=of_expert(bias))
        case QuantizedWeight():
            return weights._replace(  # all experts share the scale of their input
                codes=weights.codes[expert],
                scales=weights.scales[expert],
                bias=of_expert(weights.bias),
                offsets=of_expert(weights.offsets),
                group_of=of_expert(weights.group_of),
            )
        case JoinedWeight(parts):
            chosen = [select_expert(part, expert) for part in parts]
            return weights._replace(
                parts=tuple(p for p in chosen if not isinstance(p, JoinedWeight))
            )


def round_input(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Round the input of a linear layer as its format asks; return it in float32.

    Zeros in front of float8's own rounding cannot be told from the number, so a row of zeros stays
    zeros. Numbers are multiplied by the reciprocal of their scale, which is faster than a division.
    """
    wide, format = x.float(), weight.format
    match format.activations:
        case "plain":
            return wide
        case "float8_static":
            assert weight.input_scale is not None
            scales = weight.input_scale.float()
        case "float8_row":
            scales = _divide(wide.abs().amax(-1, keepdim=True), FLOAT8_MAX)
            scales = scales.clamp_min(SMALLEST_SCALE)
        case "float8_group":
            scales = _group_scales(wide, format.group or wide.shape[-1])
    rounded = (wide * scales.reciprocal()).clamp(-FLOAT8_MAX, FLOAT8_MAX).to(FLOAT8)
    return rounded.float() * scales


def _divide(x: Tensor, by: float) -> Tensor:
    """Divide by a number. (CUDA would multiply by its reciprocal, which is rounded.)"""
    return x / x.new_full((), by)


def _group_scales(x: Tensor, group: int) -> Tensor:
    """Return the scale of each number: of the largest in its token's group."""
    columns = x.shape[-1]
    padded = F.pad(x.abs(), (0, -columns % group))
    grouped = padded.view(*padded.shape[:-1], padded.shape[-1] // group, group)
    scales = _divide(grouped.amax(-1, keepdim=True), FLOAT8_MAX).clamp_min(SMALLEST_SCALE)
    return scales.expand_as(grouped).flatten(-2)[..., :columns]


def integer_product(x: Tensor, rows: QuantizedRows, format: WeightFormat, chunk: int) -> Tensor:
    """Multiply x [T, columns] by a weight with activations in 8 bits: the definition of products in
    integers, slow and in float64 except for the rounding of activations.

    Each chunk of activations has a scale, its largest size / 127. Sums of codes are exact integers.
    """
    columns = x.shape[-1]
    padding = 0, -columns % chunk
    chunks = F.pad(x.float(), padding).view(len(x), -1, chunk)
    peaks = chunks.abs().amax(-1)
    is_small = peaks < SMALLEST_PEAK
    inverse = (INTEGER_MAX / peaks).masked_fill(is_small, 0.0)
    scales = (peaks / INTEGER_MAX).masked_fill(is_small, 0.0).double()  # [T, chunks]
    rounded = (chunks * inverse[..., None]).round().double()
    codes = F.pad(rows.codes, padding).view(len(rows.codes), -1, chunk).double() - format.zero
    sums = torch.einsum("tck,nck->tnc", rounded, codes)  # exact: far below 2**53
    first = torch.arange(0, columns, chunk, device=x.device) // (format.group or columns)
    made = (sums * scales[:, None] * scales_of(rows.scales).double()[:, first]).sum(-1)
    if rows.offsets is not None:
        made += (rounded.sum(-1) * scales) @ rows.offsets.double()[:, first].T
    return made.float()
