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

from slotzero.kernels.triton.linear.round_float8 import to_float8

MOST = tl.constexpr(65504.0)  # the largest float16


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
            wide = q.to(tl.float32)
            wide = tl.where(wide > MOST, MOST, tl.where(wide < -MOST, -MOST, wide))
            q = wide.to(tl.float16)
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
def numbers(stored, DTYPE: tl.constexpr):
    """Return what the pages hold as numbers before their scale."""
    if stored.dtype == tl.uint8:
        stored = stored.to(tl.float8e4nv, bitcast=True).to(DTYPE)
    return stored
