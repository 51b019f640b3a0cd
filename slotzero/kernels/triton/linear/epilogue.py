"""Prologue and epilogue of a fused product: RMSNorm, bias, activation, residual.

The program that adds to the residual multiplies by the next norm's weight and stores the sum of its
squares; the following product adds these up and scales its result, so that no kernel waits for a
norm.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels.triton.linear.activation import activate


@triton.jit
def load_early(
    squares, norm, out, m, n, rows, num_out, num_parts, out_stride,
    PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Load at the beginning what the epilogue needs: the squares and the residual."""
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
def scale_of_norm(squares, parts, eps, INNER: tl.constexpr):
    """Return the deferred scale of each row, [rows], from its partial sums; None without one."""
    scale = None
    if squares is not None:
        scale = 1.0 / tl.sqrt_rn(tl.sum(parts, axis=0) / INNER + eps)
    return scale


@triton.jit
def result_of(
    result, second, x_scales, scales, by_norm, bias, slots, before, row, feature, rows, num_out,
    ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Return what a product stores, from its sums [rows, features]. With scales, which only codes
    in float8 have, these come first. What was `before` is added last."""
    if scales is not None:
        x_scale = tl.load(x_scales + row, mask=row < rows, other=0.0)
        scale = tl.load(scales + feature, mask=feature < num_out, other=0.0).to(tl.float32)
        result *= x_scale * scale
        if ACTIVATION is not None:
            at = scales + num_out + feature
            scale = tl.load(at, mask=feature < num_out, other=0.0).to(tl.float32)
            second *= x_scale * scale
    if by_norm is not None:
        result *= by_norm[:, None]
        second *= by_norm[:, None]
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
    if before is not None:
        result += before
    return result


@triton.jit
def finish(
    result, second, x_scales, scales, squares, parts, before, bias, slots, norm, out, weighted,
    squares_out, part, m, n, rows, num_out, out_stride, eps,
    INNER: tl.constexpr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Apply the epilogue to result and second, which are part `part` of [rows, features]. With a
    norm, out is the residual, and the result is added to it."""
    row, feature = m[:, None], n[None, :]
    inside = (row < rows) & (feature < num_out)
    added = None
    if norm is not None:
        added = before
    result = result_of(
        result, second, x_scales, scales, scale_of_norm(squares, parts, eps, INNER), bias, slots,
        added, row, feature, rows, num_out, ACTIVATION,
    )  # fmt: skip
    at = row.to(tl.int64) * out_stride + feature
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if norm is not None:
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        by = tl.load(norm + feature, mask=feature < num_out, other=0.0).to(tl.float32)
        tl.store(weighted + at, (wide * by).to(out.dtype.element_ty), mask=inside)
        tl.store(squares_out + part * rows + m, tl.sum(wide * wide, axis=1), mask=m < rows)
