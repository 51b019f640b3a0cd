"""Rounding of a linear layer's input to float8, with a deferred norm scale applied first."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels import quantized
from slotzero.kernels.triton.launch import (
    INTERPRETED,
    launch,
    may_follow,
    overlap,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.elementwise import num_warps
from slotzero.kernels.types import Normed
from slotzero.kernels.weights import QuantizedWeight

MAX, SMALLEST = tl.constexpr(quantized.FLOAT8_MAX), tl.constexpr(quantized.SMALLEST_SCALE)
ROUNDS_UP = tl.constexpr(INTERPRETED)  # the interpreter rounds halves up, and has no NaN
NOT_A_NUMBER = tl.constexpr(0x7F)


@triton.jit
def to_float8(x):
    """Round to e4m3, to the nearest even number; NaN stays NaN."""
    x = tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x))
    if ROUNDS_UP:  # make it a number of float8, which no conversion changes
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        large = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        x = (x + large) - large
        codes = tl.where(x == x, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), NOT_A_NUMBER)
        return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit(do_not_specialize=["rows", "num_parts"])
def _round_kernel(
    x, squares, input_scale, out, scales, rows, num_parts, x_stride, eps,
    SIZE: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write a row's codes and the scales of its groups or, without scales, the rounded numbers."""
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group, lane = tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    column = group[:, None] * GROUP + lane[None, :]
    inside = (lane < GROUP)[None, :] & (column < SIZE)
    wait_for_writer(PDL)
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    if squares is not None:
        part = tl.arange(0, PARTS)
        total = tl.load(squares + part * rows + row, mask=part < num_parts, other=0.0)
        wide *= 1.0 / tl.sqrt_rn(tl.sum(total, axis=0) / SIZE + eps)
        wide = wide.to(value.dtype).to(tl.float32)
    if input_scale is not None:
        scale = tl.zeros([GROUPS], tl.float32) + tl.load(input_scale)
    else:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), axis=1), MAX), SMALLEST)
        is_broken = tl.max((wide != wide).to(tl.int32), axis=1) > 0
        scale = tl.where(is_broken, float("nan"), scale)
    codes = to_float8(tl.div_rn(wide, tl.broadcast_to(scale[:, None], [GROUPS, BLOCK])))
    at = out + row * SIZE + column
    if scales is not None:
        tl.store(at, codes.to(tl.uint8, bitcast=True), mask=inside)
        tl.store(scales + group * rows.to(tl.int64) + row, scale, mask=group * GROUP < SIZE)
    else:
        tl.store(at, (codes.to(tl.float32) * scale[:, None]).to(value.dtype), mask=inside)


def round_input(x: Normed, weight: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """Return the codes of the normed rows, as bytes, and their scales [groups, rows]."""
    size = x.x.shape[1]
    codes = torch.empty(x.x.shape, dtype=torch.uint8, device=x.x.device)
    scales = torch.empty(triton.cdiv(size, _group(weight)), len(x.x), device=x.x.device)
    _round(x, weight, codes, scales)
    return codes, scales


def rounded(x: Normed, weight: QuantizedWeight) -> Tensor:
    """Return the normed rows, rounded to float8 and back to their type."""
    out = torch.empty(x.x.shape, dtype=x.x.dtype, device=x.x.device)
    _round(x, weight, out, None)
    return out


def _group(weight: QuantizedWeight) -> int:
    """Return the number of input features that share a scale."""
    format = weight.format
    if format.activations == "float8_group" and format.group is not None:
        return format.group
    return weight.in_features


def _round(x: Normed, weight: QuantizedWeight, out: Tensor, scales: Tensor | None) -> None:
    rows, size = x.x.shape
    group, num_parts = _group(weight), 0 if x.squares is None else len(x.squares)
    groups, block = triton.next_power_of_2(triton.cdiv(size, group)), triton.next_power_of_2(group)
    is_static = weight.format.activations == "float8_static"
    launch(
        _round_kernel, (rows,),
        x.x, x.squares, weight.input_scale if is_static else None, out, scales, rows, num_parts,
        x.x.stride(0), x.eps,
        SIZE=size, GROUP=group, GROUPS=groups, BLOCK=block,
        PARTS=triton.next_power_of_2(max(1, num_parts)),
        num_warps=num_warps(groups * block), **overlap(),
    )  # fmt: skip
