"""Bit masks of the keys that a token of a draft tree sees, shared by the attention kernels."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.tree_shape import MAX_PLACES

PLACES = tl.constexpr(MAX_PLACES)


@triton.jit
def load_branches(bases, seen, token, place, real):
    """Return the base of each token, and the bits of the keys seen from there to its place."""
    base = tl.load(bases + token, mask=real, other=0)
    bits = tl.load(seen + token, mask=real, other=0)
    own = tl.minimum(tl.where(real, place - base, 0), PLACES - 1)
    return base, bits & ((tl.full(bits.shape, 2, tl.int64) << own) - 1)


@triton.jit
def sees(key, base, bits):
    i = key - base
    return (i < 0) | ((i < PLACES) & ((bits >> (i & 63)) & 1 != 0))


@triton.jit
def union_of(base, bits):
    """Return a base and bits that cover every key that at least one of these tokens sees."""
    last = tl.max(base, axis=0)
    return last, tl.reduce_or(bits >> tl.minimum(last - base, 63), axis=0)
