"""Sums of non-negative numbers that do not depend on the order in which they are added.

How a kernel adds up a tile depends on how its threads share the tile, and so on the tile's shape.
Integers have one sum in any order. So numbers are rounded to multiples of a power of two that
follows from the numbers alone, and the multiples are added as integers.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

INTEGERS = tl.constexpr(8388608.0)  # 2 ** 23: from here to its double, float32 has integers only
INTEGERS_BITS = tl.constexpr(0x4B000000)
LEAST_EXPONENT, MOST_EXPONENT = tl.constexpr(30), tl.constexpr(254)
MOST_SUMMED = tl.constexpr(128)  # numbers of at most 2 ** 23 whose sum is less than 2 ** 31


@triton.jit
def as_integers(x):
    """Return x, at least 0 and at most 2 ** 23, rounded to integers."""
    return (x + INTEGERS).to(tl.int32, bitcast=True) - INTEGERS_BITS


@triton.jit
def exact_sum(x, AXIS: tl.constexpr):
    """Sum at most MOST_SUMMED non-negative float32 along an axis, with an error of at most
    2 ** -16 of the sum. A sum with an infinite number is infinite."""
    tl.static_assert(x.shape[AXIS] <= MOST_SUMMED)
    top = tl.max(x, axis=AXIS, keep_dims=True)
    exponent = (top.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.minimum(tl.maximum(exponent, LEAST_EXPONENT), MOST_EXPONENT)
    # 2 ** 22 at the highest power of two that is not above the largest number.
    fine = ((254 + 22 - exponent) << 23).to(tl.float32, bitcast=True)
    unit = ((exponent - 22) << 23).to(tl.float32, bitcast=True)
    total = tl.sum(as_integers(x * fine), axis=AXIS, keep_dims=True).to(tl.float32) * unit
    total = tl.where(top < float("inf"), total, top)
    return tl.reshape(total, _without(x.shape, AXIS))


@triton.constexpr_function
def _without(shape, axis):
    return [size for i, size in enumerate(shape) if i != axis]
