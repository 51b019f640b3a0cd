"""A row of logits in chunks: chunk sizes, and values packed with their indices.

A value and its index are packed into one integer, so that the largest integer is the highest value
and, among equal values, the first.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

GROUP = tl.constexpr(64)
GROUPS = tl.constexpr(64)  # per chunk
CHUNK = tl.constexpr(64 * 64)

INF = tl.constexpr(float("inf"))
SIGNLESS = tl.constexpr(0x7FFFFFFF)
NO_TOKEN = tl.constexpr(-2139095041 << 32)  # packed: -inf, below every packed index
BROKEN = tl.constexpr(0x7FFFFFFF << 32)  # packed: NaN


@triton.jit
def pack(value, place):
    """Pack values and indices. NaN is the highest value of all, and the two zeros are equal."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)
    order = tl.where(value == value, bits ^ ((bits >> 31) & SIGNLESS), SIGNLESS)
    return (order.to(tl.int64) << 32) | (place ^ SIGNLESS).to(tl.int64)


@triton.jit
def value_of(packed):
    order = (packed >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & SIGNLESS)).to(tl.float32, bitcast=True)


@triton.jit
def place_of(packed):
    return (packed & SIGNLESS).to(tl.int32) ^ SIGNLESS


@triton.jit
def is_finite(x):
    return tl.abs(x) < INF


@triton.jit
def read_logits(logits, adjusted, changed, vocab, index):
    """Return the logits to sample from; -inf past the vocabulary."""
    num_made = tl.where(changed != 0, vocab, 0)
    made = tl.load(adjusted + index, mask=index < num_made, other=-INF)
    came = tl.load(logits + index, mask=index < vocab - num_made, other=-INF)
    return tl.where(changed != 0, made, came.to(tl.float32))


@triton.jit
def mass_of(x, peak, temperature):
    """Return the sum of exp((x - peak) / temperature) over a chunk."""
    peak = tl.where(peak == -INF, 0.0, peak)
    return tl.sum(tl.sum(tl.exp((x - peak) / temperature), axis=1).to(tl.float64))


@triton.jit
def scaled_logit(row, index):
    """Return (logit - peak) / temperature, at most 0, rounded as in the reference."""
    logits, adjusted, changed, vocab, peak, temperature = row
    return tl.div_rn(read_logits(logits, adjusted, changed, vocab, index) - peak, temperature)
