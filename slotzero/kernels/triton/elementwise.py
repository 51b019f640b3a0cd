"""What stands beside products that are left to cuBLAS: residual and RMSNorm, SiLU-and-multiply."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.contract import Normed
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer

GATED_BLOCK = 1024


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    residual, delta, weight, out, squares, rows, size, eps,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    by = tl.load(weight + column, mask=inside, other=0.0)
    wait_for_writer(PDL)
    at = row * size + column
    value = tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    change = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        part_at = delta + part * rows.to(tl.int64) * size + at
        change += tl.load(part_at, mask=inside, other=0.0).to(tl.float32)
    value += change
    tl.store(residual + at, value.to(by.dtype), mask=inside)
    value = value.to(by.dtype).to(tl.float32)
    total = tl.sum(value * value, axis=0)
    if squares is not None:
        tl.store(squares + row, total)
    else:  # rounded before the weight is applied, as the checkpoints were trained
        value = (value / tl.sqrt_rn(total / size + eps)).to(by.dtype).to(tl.float32)
    tl.store(out + at, (value * by.to(tl.float32)).to(by.dtype), mask=inside)


@triton.jit(do_not_specialize=["rows", "num_parts"])
def _apply_kernel(
    x, squares, out, rows, size, num_parts, eps,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column, part = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    wait_for_writer(PDL)
    total = tl.load(squares + part * rows + row, mask=part < num_parts, other=0.0)
    value = tl.load(x + row * size + column, mask=column < size, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(total, axis=0) / size + eps)
    scaled = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out + row * size + column, scaled, mask=column < size)


@triton.jit
def _gated_kernel(joined, out, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_writer(PDL)
    gate = tl.load(joined + row * 2 * size + column, mask=inside, other=0.0)
    value = tl.load(joined + row * 2 * size + size + column, mask=inside, other=0.0)
    wide = gate.to(tl.float32)
    silu = (wide * tl.sigmoid(wide)).to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, (silu * value.to(tl.float32)).to(gate.dtype), mask=inside)


def add_norm(residual: Tensor, delta: Tensor, weight: Tensor, eps: float, late: bool) -> Normed:
    """Adds delta, [rows, size] or several such, to the residual, in place, and norms it; if late,
    the scale is left to others."""
    rows, size = residual.shape
    block = triton.next_power_of_2(size)
    out = torch.empty_like(residual)
    squares = torch.empty(1, rows, device=residual.device) if late else None
    launch(
        _add_norm_kernel, (rows,), residual, delta, weight, out, squares, rows, size, eps,
        BLOCK=block, PARTS=delta.numel() // residual.numel(),
        num_warps=min(8, max(1, block // 512)), **overlap(),
    )  # fmt: skip
    return Normed(out, squares)


def applied(normed: Normed, eps: float) -> Tensor:
    """The rows themselves, with the scale that was left to others"""
    x, squares = normed
    if squares is None:
        return x
    rows, size = x.shape
    block = triton.next_power_of_2(size)
    out = torch.empty_like(x)
    launch(
        _apply_kernel, (rows,), x, squares, out, rows, size, len(squares), eps,
        BLOCK=block, PARTS=triton.next_power_of_2(len(squares)),
        num_warps=min(8, max(1, block // 512)), **overlap(),
    )  # fmt: skip
    return out


def gated(joined: Tensor) -> Tensor:
    """[rows, 2 * size], gates and then values -> silu(gate) * value"""
    rows, size = joined.shape[0], joined.shape[1] // 2
    out = joined.new_empty(rows, size)
    grid = (rows, triton.cdiv(size, GATED_BLOCK))
    launch(_gated_kernel, grid, joined, out, size, BLOCK=GATED_BLOCK, **overlap())
    return out
