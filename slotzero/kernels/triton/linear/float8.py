"""Numbers in float8 (e4m3): how they are rounded, and their scale."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels import quantized
from slotzero.kernels.triton.launch import INTERPRETED

MAX, SMALLEST = tl.constexpr(quantized.FLOAT8_MAX), tl.constexpr(quantized.SMALLEST_SCALE)
ROUNDS_UP = tl.constexpr(INTERPRETED)  # the interpreter rounds halves up, and has no NaN
NOT_A_NUMBER = tl.constexpr(0x7F)


@triton.jit
def to_float8(x):
    """Round to e4m3, to the nearest even number or the largest one; NaN stays NaN."""
    if ROUNDS_UP:  # make it a number of float8, which no conversion changes
        x = tl.where(x > MAX, MAX, tl.where(x < -MAX, -MAX, x))
        exponent = tl.maximum((x.to(tl.int32, bitcast=True) >> 23) & 255, 121)
        large = (((exponent + 20) << 23) | 0x400000).to(tl.float32, bitcast=True)
        x = (x + large) - large
        codes = tl.where(x == x, x.to(tl.float8e4nv).to(tl.uint8, bitcast=True), NOT_A_NUMBER)
        return codes.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def scale_of(peak):
    """Return the scale of numbers up to this size."""
    return tl.maximum(tl.div_rn(peak, MAX), SMALLEST)
