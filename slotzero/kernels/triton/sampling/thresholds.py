"""The filters of a row (top-k, top-p, min-p) as one threshold, the floor: the lowest scaled logit
that may be sampled.

A floor is the lowest value with less than a budget of weight above it (top-k: 1 per token; top-p:
its probability). The k highest values are in the k highest groups of 64, so few groups are read,
and no kernel sorts. Sums are computed by one program in one order.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels.triton.launch import may_follow, wait_for_writer
from slotzero.kernels.triton.sampling.packed import (
    CHUNK,
    GROUP,
    GROUPS,
    INF,
    NO_TOKEN,
    SIGNLESS,
    is_finite,
    scaled_logit,
    value_of,
)

LAST_KEY = tl.constexpr(0x7F800000)  # the key of -inf


@triton.jit
def _key(scaled):
    """Return the bits of the magnitude, which order values <= 0; the smallest is likeliest."""
    return scaled.to(tl.int32, bitcast=True) & SIGNLESS


@triton.jit
def _list_groups(keys, lane, num_groups, num_wanted, listed):
    """List the groups that reach a threshold: `num_wanted`, ties, and at most as many more; or all
    except those of only -inf, of which a grammar makes many."""
    low = 0 * num_wanted
    edge = low + LAST_KEY
    num_members = num_groups
    while (low < edge) & (num_members > 2 * num_wanted):
        mid = low + (edge - low + 1) // 2
        num_above = tl.sum((keys < mid).to(tl.int32))
        if num_above < num_wanted:
            low = tl.min(tl.where(keys < mid, LAST_KEY, keys))
        else:
            edge = tl.max(tl.where(keys < mid, keys, 0))
            num_members = num_above
    member = (lane < num_groups) & (keys <= edge) & (keys < LAST_KEY)
    count = tl.cumsum(member.to(tl.int32), axis=0)
    tl.debug_barrier()  # every thread is done with the previous list
    tl.store(listed + count - 1, lane, mask=member)
    tl.debug_barrier()
    return edge, tl.max(count)


@triton.jit
def _split(mid, listed, num_listed, row, BY_MASS: tl.constexpr):
    """Return the weight of listed values above `mid`, the last key above, and the first not above.

    The weight of a value is 1 or, by mass, exp(scaled logit).
    """
    group, lane = tl.arange(0, GROUPS), tl.arange(0, GROUP)
    weight = tl.zeros((GROUPS, GROUP), tl.float64)
    above = tl.zeros((GROUPS, GROUP), tl.int32)
    below = above + LAST_KEY
    for first in range(0, num_listed, GROUPS):
        at = tl.load(listed + first + group, mask=first + group < num_listed, other=1 << 24)
        scaled = scaled_logit(row, (at * GROUP)[:, None] + lane[None, :])
        key = _key(scaled)
        each = tl.exp(scaled) if BY_MASS else 1.0
        weight += tl.where(key < mid, each, 0.0).to(tl.float64)
        above = tl.maximum(above, tl.where(key < mid, key, 0))
        below = tl.minimum(below, tl.where(key < mid, LAST_KEY, key))
    return tl.sum(weight), tl.max(above), tl.min(below)


@triton.jit
def _find_floor(budget, high, listed, num_listed, row, BY_MASS: tl.constexpr):
    """Return the lowest listed value with less than `budget` weight above it: a key <= `high`."""
    low = 0 * high
    while low < high:
        mid = low + (high - low + 1) // 2
        weight, above, below = _split(mid, listed, num_listed, row, BY_MASS)
        if weight < budget:
            low = below
        else:
            high = above
    return low


@triton.jit(do_not_specialize=["chunks"])
def floor_kernel(
    logits, slots, tables, scratch, vocab, stride, chunks,
    CHUNKS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    r = tl.program_id(0).to(tl.int64)
    wait_for_writer(PDL)
    slot = tl.load(slots + r).to(tl.int64)
    temperature = tl.load(tables.temperature + slot)
    if (slot > 0) & (temperature > 0):
        top_k = tl.load(tables.top_k + slot)
        top_p = tl.load(tables.top_p + slot).to(tl.float64)
        floor = tl.log(tl.load(tables.min_p + slot).to(tl.float64)).to(tl.float32)
        by_k = (top_k > 0) & (top_k < vocab)
        chunk = tl.arange(0, CHUNKS)
        best = tl.load(scratch.best + r * chunks + chunk, mask=chunk < chunks, other=NO_TOKEN)
        peak = value_of(tl.max(best))
        if (by_k | (top_p < 1)) & is_finite(peak):
            adjusted = scratch.adjusted + r * chunks * CHUNK
            changed = tl.load(scratch.changed + r)
            row = (logits + r * stride, adjusted, changed, vocab, peak, temperature)
            num_groups = chunks * GROUPS
            lane = tl.arange(0, CHUNKS * GROUPS)
            groups = scratch.groups + r * num_groups + lane
            highest = tl.load(groups, mask=lane < num_groups, other=-INF)
            keys = _key(tl.div_rn(highest - peak, temperature))
            mass = tl.load(scratch.mass + r * chunks + chunk, mask=chunk < chunks, other=0.0)
            total = tl.sum(mass * tl.exp(((value_of(best) - peak) / temperature).to(tl.float64)))
            listed = scratch.listed + r * num_groups
            num_wanted = tl.where(by_k, top_k, GROUPS)
            edge, num_listed, is_enough = LAST_KEY, 0, False
            while not is_enough:  # top-p alone may need more groups than listed
                edge, num_listed = _list_groups(keys, lane, num_groups, num_wanted, listed)
                if by_k:
                    edge = _find_floor(top_k.to(tl.float64), edge, listed, num_listed, row, False)
                reached = _split(edge + 1, listed, num_listed, row, True)[0]
                total = tl.where(by_k, reached, total)
                is_enough = by_k | (edge == LAST_KEY) | (reached >= top_p * total)
                num_wanted *= 8
            if top_p < 1:
                edge = _find_floor(top_p * total, edge, listed, num_listed, row, True)
            floor = tl.maximum(floor, -edge.to(tl.float32, bitcast=True))
        tl.store(scratch.floor + r, floor)
