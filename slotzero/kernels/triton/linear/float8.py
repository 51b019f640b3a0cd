"""Numbers in float8 (e4m3): rounding, and the scales of rows that are rounded."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels import quantized
from slotzero.kernels.triton.launch import INTERPRETED

MAX, SMALLEST = tl.constexpr(quantized.FLOAT8_MAX), tl.constexpr(quantized.SMALLEST_SCALE)
ROUNDS_UP = tl.constexpr(INTERPRETED)  # the interpreter rounds halves up, a card to even


@triton.jit
def to_float8(x):
    """Round to e4m3, to the nearest even number or the largest one; NaN stays NaN."""
    if ROUNDS_UP:  # make it a number of float8, which no conversion changes
        x = tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x))
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        large = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        x = (x + large) - large
    return x.to(tl.float8e4nv)


@triton.jit
def scale_of(peak):
    """Return the scale of numbers up to this size."""
    return tl.maximum(tl.div_rn(peak, MAX), SMALLEST)


@triton.jit
def load_row_scales(
    squares, peaks, input_scale, m, rows, num_parts, num_peaks, eps,
    INNER: tl.constexpr, DTYPE: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return the deferred norm scale of each row, and the scale of its codes."""
    part = tl.arange(0, PARTS)[:, None]
    by = tl.full([ROWS], 1.0, tl.float32)
    if squares is not None:
        total = tl.zeros([PARTS, ROWS], tl.float32)
        for first in range(0, num_parts, PARTS):
            known = (first + part < num_parts) & (m[None, :] < rows)
            total += tl.load(squares + (first + part) * rows + m[None, :], mask=known, other=0.0)
        by = 1.0 / tl.sqrt_rn(tl.sum(total, axis=0) / INNER + eps)
    if input_scale is not None:
        scale = tl.zeros([ROWS], tl.float32) + tl.load(input_scale)
    else:
        largest = tl.zeros([PARTS, ROWS], tl.float32)
        for first in range(0, num_peaks, PARTS):
            known = (first + part < num_peaks) & (m[None, :] < rows)
            its = tl.load(peaks + (first + part) * rows + m[None, :], mask=known, other=0.0)
            largest = tl.maximum(largest, its)
        peak = tl.max(largest, axis=0)
        if squares is not None:
            peak = (peak * by).to(DTYPE).to(tl.float32)
        scale = scale_of(peak)
    return by, scale


@triton.jit
def round_rows(value, by, scale, IS_LATE: tl.constexpr):
    """Round rows to float8; a deferred norm scale `by` is applied first, and rounded."""
    wide = value.to(tl.float32)
    if IS_LATE:
        wide = (wide * by[:, None]).to(value.dtype).to(tl.float32)
    return to_float8(wide * (1.0 / scale)[:, None])
