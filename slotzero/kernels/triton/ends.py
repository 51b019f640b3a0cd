"""What surrounds a product and is fused into it: RMSNorm, bias, activation, the residual.

The program that adds to the residual multiplies by the next norm's weight and leaves the sum of its
squares; the product that follows adds those up and scales its result, so that nobody waits for a
norm.

Where programs share out a tile's inner dimension, whoever is done last adds all shares up, in
order: the sum does not depend on who that was.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels.triton.activation import activate


@triton.jit
def ask(
    squares, norm, out, m, n, rows, num_out, num_parts, out_stride,
    PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """What is needed at the end, requested at the beginning: the squares and the residual."""
    parts = tl.zeros([PARTS, ROWS], tl.float32)
    if squares is not None:
        for first in range(0, num_parts, PARTS):
            part = first + tl.arange(0, PARTS)[:, None]
            known = (part < num_parts) & (m[None, :] < rows)
            parts += tl.load(squares + part * rows + m[None, :], mask=known, other=0.0)
    before = tl.zeros([1, 1], tl.float32)
    if norm is not None:
        at = m[:, None].to(tl.int64) * out_stride + n[None, :]
        inside = (m[:, None] < rows) & (n[None, :] < num_out)
        before = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    return parts, before


@triton.jit
def is_last_share(
    acc, partial, arrived, tile, share, SHARES: tl.constexpr, LEAD: tl.constexpr,
    FOLLOW: tl.constexpr,
):  # fmt: skip
    """Leaves a share of the tile-th sum, [LEAD, FOLLOW] -> whether all the others are there."""
    tl.store(_share_of(partial, tile * SHARES + share, LEAD, FOLLOW), acc)
    tl.debug_barrier()  # all of the program's writes, then the count that makes them known
    is_last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SHARES - 1
    if is_last:
        tl.store(arrived + tile, 0)  # for the next product
    return is_last


@triton.jit
def add_shares(
    partial, tile, SHARES: tl.constexpr, LEAD: tl.constexpr, FOLLOW: tl.constexpr
):  # fmt: skip
    tl.debug_barrier()
    acc = tl.zeros([LEAD, FOLLOW], tl.float32)
    for i in tl.static_range(SHARES):
        acc += tl.load(_share_of(partial, tile * SHARES + i, LEAD, FOLLOW))
    return acc


@triton.jit
def _share_of(partial, number, LEAD: tl.constexpr, FOLLOW: tl.constexpr):
    at = partial + number * (LEAD * FOLLOW)
    return at + tl.arange(0, LEAD)[:, None] * FOLLOW + tl.arange(0, FOLLOW)[None, :]


@triton.jit
def finish(
    result, second, squares, parts, before, bias, slots, norm, out, weighted, squares_out, part,
    m, n, rows, num_out, out_stride, eps, INNER: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """result and second are [rows, features], the part-th of them. With a norm, out is the residual
    and added to."""
    row, feature = m[:, None], n[None, :]
    inside = (row < rows) & (feature < num_out)
    if squares is not None:
        scale = (1.0 / tl.sqrt_rn(tl.sum(parts, axis=0) / INNER + eps))[:, None]
        result *= scale
        second *= scale
    if bias is not None:
        result += tl.load(bias + feature, mask=feature < num_out, other=0.0).to(tl.float32)
    if ACTIVATION is not None:
        if bias is not None:
            value_bias = bias + num_out + feature
            second += tl.load(value_bias, mask=feature < num_out, other=0.0).to(tl.float32)
        result, second = activate(result, second, ACTIVATION)
        result = result * second
    if slots is not None:
        result = tl.where(tl.load(slots + row, mask=row < rows, other=0) > 0, result, 0.0)
    if norm is not None:
        result += before
    at = row.to(tl.int64) * out_stride + feature
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if norm is not None:
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        by = tl.load(norm + feature, mask=feature < num_out, other=0.0).to(tl.float32)
        tl.store(weighted + at, (wide * by).to(out.dtype.element_ty), mask=inside)
        tl.store(squares_out + part * rows + m, tl.sum(wide * wide, axis=1), mask=m < rows)
