"""Gumbel noise of sampling: the integers of sampling/noise.py, and a cheap bound of the noise."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

MAX_GUMBEL = tl.constexpr(16.7)  # the largest is 16.64


@triton.jit
def _mix(word):
    word = (word ^ (word >> 16)) * 0x7FEB352D
    word = (word ^ (word >> 15)) * 0x846CA68B
    return word ^ (word >> 16)


@triton.jit
def noise_key(start, seed, position):
    key = tl.full((), start, tl.uint32)
    key = _mix((key ^ tl.load(seed).to(tl.uint32)) + 0x9E3779B9)
    key = _mix((key ^ tl.load(seed + 1).to(tl.uint32)) + 0x9E3779B9)
    return _mix((key ^ position.to(tl.uint32)) + 0x9E3779B9)


@triton.jit
def cell_of(index, noise):
    low, high = noise
    return ((_mix(index.to(tl.uint32) + low) ^ high) >> 9).to(tl.int32)


@triton.jit
def gumbel(cell):
    """Return the Gumbel noise, each logarithm rounded to float32 as in the reference."""
    uniform = (cell.to(tl.float32) + 0.5) * 2.0**-23
    inner = tl.log(uniform.to(tl.float64)).to(tl.float32)
    return -tl.log(-inner.to(tl.float64)).to(tl.float32)


@triton.jit
def gumbel_bound(cell):
    """Return an upper bound of the noise without a logarithm.

    -log(-log u) <= -log(1 - u), and the bits of a float, read as an integer, are a lower bound of
    its logarithm in base 2.
    """
    rest = (2.0 - (cell | 0x3F800000).to(tl.float32, bitcast=True)) - 2.0**-24  # 1 - u
    return (127.0 - rest.to(tl.int32, bitcast=True).to(tl.float32) * 2.0**-23) * 0.6931472 + 1e-3
