"""KV pages in FP8 for the attention kernels: codes of e4m3, one byte each.

Codes become float16, which holds all of them exactly and takes one instruction for two. Queries
become float16 too: those in bfloat16 keep their bits, unless they are beyond the largest float16,
to which they are cut, or so small that they do not count. In float32, all of it is float32.

The scale of keys is part of the softmax scale, and that of values is applied to the result, so that
nothing in a loop is scaled. Pages that hold numbers have no scales, and pass through unchanged.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.linear.float8 import to_float8

MOST = tl.constexpr(65504.0)  # the largest float16
IS_COMPILED = tl.constexpr(not INTERPRETED)


@triton.jit
def load_kv_scales(kv_scales, MLA: tl.constexpr = False):
    """Return the scales of keys and values."""
    k_scale, v_scale = 1.0, 1.0
    if kv_scales is not None:
        k_scale = tl.load(kv_scales)
        v_scale = k_scale if MLA else tl.load(kv_scales + 1)
    return k_scale, v_scale


@triton.jit
def as_query(q, kv_pages):
    """Return queries in the type in which they are multiplied with what the pages hold."""
    if kv_pages.dtype.element_ty == tl.uint8:  # noqa: SIM102  decided at compile time
        if q.dtype == tl.bfloat16:
            q = tl.clamp(q.to(tl.float32), -MOST, MOST, tl.PropagateNan.ALL).to(tl.float16)
    return q


@triton.jit
def as_stored(x, scale, kv_pages):
    """Return keys or values as the pages hold them."""
    if kv_pages.dtype.element_ty == tl.uint8:
        wide = x.to(tl.float32)
        x = to_float8(tl.div_rn(wide, tl.zeros_like(wide) + scale)).to(tl.uint8, bitcast=True)
    return x


@triton.jit
def as_read(stored, scale, DTYPE: tl.constexpr):
    """Return what the pages hold as numbers, scaled."""
    if stored.dtype == tl.uint8:
        stored = (numbers(stored, tl.float32) * scale).to(DTYPE)
    return stored


@triton.jit
def values_in(kv_pages, values_at):
    """Return where values begin. Codes of values are read in pairs, as 16-bit integers: matrix
    units want two keys of one dimension side by side, and the transposition for that, from shared
    memory, moves 16 bits."""
    v_pages = kv_pages + values_at
    if kv_pages.dtype.element_ty == tl.uint8:
        v_pages = v_pages.to(tl.pointer_type(tl.int16), bitcast=True)
    return v_pages


@triton.jit
def load_values(
    v_pages, row, beside, known, ROW: tl.constexpr, VALUE_DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Load the values [keys, dim] of stored rows `row + beside`, which have ROW numbers each, or
    their pairs [keys, dim / 2]; zeros if not known."""
    each: tl.constexpr = 2 if v_pages.dtype.element_ty == tl.int16 else 1
    dim, size = tl.arange(0, WIDTH // each), ROW // each
    at = v_pages + (row * size)[:, None] + ((beside * size)[:, None] + dim[None, :])
    return tl.load(at, mask=known[:, None] & (dim < VALUE_DIM // each)[None, :], other=0)


@triton.jit
def in_pairs(v, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return codes of values [ROWS, WIDTH] in pairs."""
    if v.dtype == tl.uint8:
        even, odd = tl.split(tl.reshape(v, [ROWS, WIDTH // 2, 2]))
        v = even.to(tl.int16) | (odd.to(tl.int16) << 8)
    return v


@triton.jit
def no_values(kv_pages, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return sums of no values: (all,), or for codes (even dimensions, odd ones)."""
    if kv_pages.dtype.element_ty == tl.uint8:
        zeros = tl.zeros([ROWS, WIDTH // 2], tl.float32)
        return zeros, zeros
    else:  # noqa: RET505
        return (tl.zeros([ROWS, WIDTH], tl.float32),)


@triton.jit
def add_values(acc, shrink, weight, v, DTYPE: tl.constexpr):
    """Add weighted values to such sums."""
    if v.dtype == tl.int16:
        even, odd = split_pairs(v, DTYPE)
        weight = weight.to(DTYPE)
        return (
            tl.dot(weight, even, acc[0] * shrink[:, None], input_precision="ieee"),
            tl.dot(weight, odd, acc[1] * shrink[:, None], input_precision="ieee"),
        )
    else:  # noqa: RET505
        weight = weight.to(v.dtype)
        return (tl.dot(weight, v, acc[0] * shrink[:, None], input_precision="ieee"),)


@triton.jit
def separated(values, kv_pages, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return such sums of a tensor [ROWS, WIDTH]."""
    if kv_pages.dtype.element_ty == tl.uint8:
        return tl.split(tl.reshape(values, [ROWS, WIDTH // 2, 2]))
    else:  # noqa: RET505
        return (values,)


@triton.jit
def joined(acc, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return such sums as one tensor [ROWS, WIDTH]."""
    if len(acc) == 2:
        return tl.reshape(tl.join(acc[0], acc[1]), [ROWS, WIDTH])
    else:  # noqa: RET505
        return acc[0]


@triton.jit
def split_pairs(pairs, DTYPE: tl.constexpr):
    """Return the numbers of pairs of codes: the first of each pair, and the second."""
    if DTYPE == tl.float16 and IS_COMPILED:  # noqa: SIM300
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 sorted;
            .reg .b16 low, high;
            prmt.b32 sorted, $2, 0, 0x3120;
            mov.b32 {low, high}, sorted;
            cvt.rn.f16x2.e4m3x2 $0, low;
            cvt.rn.f16x2.e4m3x2 $1, high;
            }""",
            "=r,=r,r", [pairs], (tl.float16, tl.float16), True, 2,
        )  # fmt: skip
    else:  # noqa: RET505
        even, odd = (pairs & 255).to(tl.uint8), (pairs >> 8 & 255).to(tl.uint8)
        return numbers(even, DTYPE), numbers(odd, DTYPE)


@triton.jit
def numbers(stored, DTYPE: tl.constexpr):
    """Return what the pages hold as numbers before their scale."""
    if stored.dtype == tl.uint8:
        stored = stored.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return stored
