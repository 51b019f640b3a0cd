"""The packed layout of 4-bit and 8-bit codes: as matrix units hold their first operand.

A fragment is the operand of one warp: 16 output features by 16 input features, four words of two
codes in each of 32 lanes. Here a block of 16 by 128 codes is stored such that a lane loads its
words 16 bytes at a time, and masks and shifts of a word yield pairs of numbers where an instruction
expects them. No number changes its lane.

Input features of a block are divided into four chunks of 32. A half word (16 bits) holds the codes
of one place in each of the four chunks, or in two of them if codes have 8 bits. Within a chunk,
lane `t` of four has eight neighbouring input features, so that it loads those of the rows at once.

This module knows the layout. It does not know how a kernel uses it (`fragment_codes.py`).
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.quantized import QuantizedRows
from slotzero.kernels.weights import QuantizedWeight, WeightFormat

FEATURES, DEPTH = 16, 128  # of a block
CHUNKS = 4  # of a block's input features
LEAST_GROUP = DEPTH // CHUNKS
MXFP4_PLACES = (  # in a half word, of a code's mantissa bit, its exponent's two bits and its sign
    (6, 7, 8, 15),
    (3, 4, 5, 12),
    (0, 1, 2, 9),
    (11, 10, 13, 14),
)  # the first is in place for bfloat16; a shift moves the second and the third there
SIGN = 128  # of an 8-bit code, which is stored as a signed number

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


def takes(format: WeightFormat) -> bool:
    """Return whether weights of this format are stored in fragments: if each chunk has one scale,
    and its input features are consecutive."""
    return (
        format.codes in ("uint4", "uint8", "mxfp4")
        and not format.is_scattered
        and (format.group is None or math.gcd(format.group, DEPTH) >= LEAST_GROUP)
    )


def holds(weight: QuantizedWeight) -> bool:
    """Return whether a weight is stored in fragments. Deterministic mode stores none so."""
    return weight.codes.dtype is torch.int32


def parts(format: WeightFormat) -> int:
    """Return how many half words hold the codes of one place in all chunks."""
    return format.bits * CHUNKS // 16


@functools.cache
def scale_groups(format: WeightFormat, in_features: int) -> tuple[int, int]:
    """Return how many groups of scales are stored, and into how many of them a block is cut."""
    groups = format.num_groups(in_features)
    if groups == 1:
        return 1, 1
    assert format.group is not None
    if format.group % DEPTH == 0:
        return groups, 1
    return -(-in_features // DEPTH), DEPTH // math.gcd(format.group, DEPTH)


def shapes(out_features: int, in_features: int, format: WeightFormat) -> Shapes:
    """Return shape and dtype of each tensor of a weight, by field of QuantizedWeight."""
    blocks, depth = -(-out_features // FEATURES), -(-in_features // DEPTH)
    words = parts(format) * 2 * 32 * 4
    groups, cut = scale_groups(format, in_features)
    scales = blocks, groups, FEATURES // 2, cut, 2
    ours: Shapes = {
        "codes": ((blocks, depth, words), torch.int32),
        "scales": (scales, format.scale_dtype),
        "offsets": (scales, torch.float32),
    }
    plain = format.shapes(out_features, in_features)
    return {field: ours.get(field, shape) for field, shape in plain.items()}


def pack(rows: QuantizedRows, format: WeightFormat) -> dict[str, Tensor]:
    """Pack a weight [..., out_features, in_features] into tensors of `shapes`."""
    made = {"codes": _pack_codes(rows.codes, format)}
    columns = rows.codes.shape[-1]
    made["scales"] = _pack_scales(rows.scales.to(format.scale_dtype), format, columns)
    if rows.offsets is not None:
        made["offsets"] = _pack_scales(rows.offsets.float(), format, columns)
    if rows.input_scale is not None:
        made["input_scale"] = rows.input_scale
    return made


def _pack_codes(codes: Tensor, format: WeightFormat) -> Tensor:
    *lead, features, columns = codes.shape
    padded = F.pad(codes, (0, -columns % DEPTH, 0, -features % FEATURES))
    if format.codes == "uint8":
        padded = padded ^ SIGN
    each = CHUNKS // parts(format)
    split = padded.reshape(
        *lead, -1, 2, 8, padded.shape[-1] // DEPTH, parts(format), each, 4, 2, 2, 2
    )  # [..., block, half, row, depth, part, code, t, u, v, d]
    half: Tensor | None = None
    for i in range(each):
        placed = _placed(split.select(-5, i).int(), i, format)
        half = placed if half is None else half | placed
    assert half is not None
    first = len(lead)
    block, high, row, depth, part, t, u, v, d = range(first, first + 9)
    ordered = half.to(torch.int16).permute(*range(first), block, depth, part, u, row, t, v, high, d)
    return ordered.flatten(first + 2).view(torch.int32)


def _placed(codes: Tensor, i: int, format: WeightFormat) -> Tensor:
    """Return codes at the place of the i-th in a half word."""
    if format.codes != "mxfp4":
        return codes << i * format.bits
    placed = torch.zeros_like(codes)
    for bit, place in enumerate(MXFP4_PLACES[i]):
        placed |= (codes >> bit & 1) << place
    return placed


def _pack_scales(scales: Tensor, format: WeightFormat, columns: int) -> Tensor:
    groups, cut = scale_groups(format, columns)
    if cut > 1:
        assert format.group is not None
        scales = scales.repeat_interleave(format.group * cut // DEPTH, dim=-1)
    scales = scales[..., : groups * cut]
    *lead, features, given = scales.shape
    padded = F.pad(scales, (0, groups * cut - given, 0, -features % FEATURES))
    split = padded.reshape(*lead, -1, 2, 8, groups, cut)
    first = split.ndim - 5
    block, high, row, group, part = range(first, first + 5)
    return split.permute(*range(first), block, group, row, part, high).contiguous()
