"""Shared functions of the recurrent kernels: initial states of rows, snapshot rows, cutting long
rows into chunks, and softplus.

Chunks are cut at multiples of their size in the text, so a row's arithmetic does not depend on its
place in the step, and a snapshot is always due at the end of a chunk.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

COUNTED = tl.constexpr(128)  # rows, or tokens of a row, that are examined at a time


@triton.jit
def snapshot_row(rows, slot, after, rows_stride, INTERVAL: tl.constexpr):
    """Return the snapshot row of the state after the first `after` tokens of a slot; 0: none."""
    is_there = (slot > 0) & (after > 0) & (after % INTERVAL == 0)
    at = rows + slot * rows_stride + after // INTERVAL - 1
    return tl.load(at, mask=is_there, other=0).to(tl.int64)


@triton.jit
def load_begin(
    table, kept, rows, slot, start, rows_stride, offset, inside,
    SIZE: tl.constexpr, INTERVAL: tl.constexpr,
):  # fmt: skip
    """Load the state that a row begins with, at an offset, in float32: zeros at the start of a
    text, the snapshot at its start if there is one, else the slot's state."""
    own = tl.where((slot > 0) & (start > 0), inside, False)
    if INTERVAL > 0:
        found = snapshot_row(rows, slot, start, rows_stride, INTERVAL)
        own = tl.where(found == 0, own, False)
    state = tl.load(table + slot * SIZE + offset, mask=own, other=0.0).to(tl.float32)
    if INTERVAL > 0:
        there = tl.where(found > 0, inside, False)
        snapshot = tl.load(kept + found * SIZE + offset, mask=there, other=0.0).to(tl.float32)
        state = tl.where(there, snapshot, state)
    return state


@triton.jit
def num_real(slots, begin, count, row_slot, PADDED: tl.constexpr):
    """Return the number of real tokens of a row, which precede its padding."""
    num = tl.where(row_slot > 0, count, 0)
    if PADDED:
        past = begin + num
        num = tl.zeros_like(num)
        for first in range(begin, past, COUNTED):
            token = first + tl.arange(0, COUNTED)
            num += tl.sum((tl.load(slots + token, mask=token < past, other=0) > 0).to(tl.int32))
    return num


@triton.jit
def find_chunk(chunk, row_slots, row_starts, row_counts, num_rows, SIZE: tl.constexpr):
    """Find a chunk by its index over all rows, in order -> its row, and the position at which it
    begins. The row is past the last if there is no such chunk. Rows of one token have none."""
    row, first, used = 0, 0, 0  # first: index of the row's first chunk
    for low in range(0, num_rows, COUNTED):
        r = low + tl.arange(0, COUNTED)
        is_row = r < num_rows
        start = tl.load(row_starts + r, mask=is_row, other=0)
        count = tl.load(row_counts + r, mask=is_row, other=0)
        is_used = (tl.load(row_slots + r, mask=is_row, other=0) > 0) & (count > 1)
        chunks = tl.where(is_used, (start + count - 1) // SIZE - start // SIZE + 1, 0)
        past = used + tl.cumsum(chunks, 0)
        is_before = is_row & (past <= chunk)
        row += tl.sum(is_before.to(tl.int32), axis=0)
        first = tl.maximum(first, tl.max(tl.where(is_before, past, 0), axis=0))
        used += tl.sum(chunks, axis=0)
    start = tl.load(row_starts + row, mask=row < num_rows, other=0)
    return row, (start // SIZE + chunk - first) * SIZE


@triton.jit
def chunk_tokens(
    row, low, lane, slots, row_slots, row_starts, row_counts, row_ends,
    SIZE: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Return the token of each lane of a row's chunk that begins at position `low`, and whether the
    lane has a real token."""
    count, start = tl.load(row_counts + row), tl.load(row_starts + row)
    begin = tl.load(row_ends + row) - count
    num = num_real(slots, begin, count, tl.load(row_slots + row), PADDED)
    position = low + lane
    real = (lane < SIZE) & (position >= start) & (position < start + num)
    return (begin + position - start).to(tl.int64), real


@triton.jit
def softplus(x):
    """Return log(1 + exp(x)), accurate also where it is small."""
    power = tl.exp(-tl.abs(x))
    one = 1.0 + power
    small = tl.where(
        one == 1.0, power, tl.log(one) * (power / tl.where(one == 1.0, 1.0, one - 1.0))
    )
    return tl.maximum(x, 0.0) + small


@triton.jit
def falling(total, lane):
    """Return the decay from token j to token i >= j as [i, j], else 0; `total` holds cumulative
    sums of log decays."""
    left = total[:, None] - total[None, :]
    return tl.exp(tl.where(lane[:, None] >= lane[None, :], left, float("-inf")))
