"""The scan over long rows: the pass that carries the state from chunk to chunk of a row.

The relations between the tokens of a chunk were computed before, for all chunks at once (see
mamba.py and delta.py). From them, for the tokens i of a chunk and the state h [state_size, dim]
before it:

    change = values - removed h
    y_i    = into_i (q_i h) + sum over j of pairs_ij change_j + skip value_i
    h     <- passed h + sum over j of k_j (onto_j change_j)

where `passed` is that of the last token, and only a delta rule has `removed`. A program has some
value dims of one head of one row, and takes the row's chunks in order. Products are in the model's
dtype with float32 sums. The grid follows from the padded sizes alone; padding gets zeros. Rows of
one token are left to step.py.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.recurrent.rows import load_begin, num_real, snapshot_row
from slotzero.kernels.triton.recurrent.step import constants
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import Scan, States

CHUNK, WIDE_CHUNK = 64, 16  # tokens; in float32, whose products do not use matrix units
LEAST = 16  # lanes of a matrix product, at least
DIMS, WIDE_DIMS = 32, 16  # value dims per program; in float32


class Chunks(NamedTuple):
    """Relations between each token of a step and the other tokens of its chunk."""

    pairs: Tensor  # [T, heads, lanes]: weight of each token of the chunk
    scales: Tensor  # [3, T, heads] float32: into, onto and passed
    changes: Tensor | None = None  # [T, heads, dim], instead of values
    removed: Tensor | None = None  # [T, heads, state_size]


@triton.jit(do_not_specialize=["num_tokens", "num_rows", "rows_stride"])
def _pass_kernel(
    mixed, values, pairs, removed, scales, skip, slots,
    row_slots, row_starts, row_counts, row_ends, table, kept, rows, out,
    num_tokens, num_rows, mixed_stride, values_stride, rows_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    VALUES_AT: tl.constexpr, KEYS_AT: tl.constexpr, QUERIES_AT: tl.constexpr,
    SIZE: tl.constexpr, LANES: tl.constexpr, INTERVAL: tl.constexpr, PADDED: tl.constexpr,
    DIMS: tl.constexpr, STATES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    parts: tl.constexpr = (DIM + DIMS - 1) // DIMS
    held: tl.constexpr = HEADS * DIM * STATE
    head, row = tl.program_id(0) // parts, tl.program_id(1)
    dim, n = tl.program_id(0) % parts * DIMS + tl.arange(0, DIMS), tl.arange(0, STATES)
    lane = tl.arange(0, LANES)
    is_dim, is_n = (dim < DIM)[None, :], (n < STATE)[None, :]
    by_skip = 0.0
    if skip is not None:
        by_skip = tl.load(skip + head).to(tl.float32)
    group = head // (HEADS // GROUPS) * STATE
    out += head * DIM + dim[None, :]
    wait_for_writer(PDL)

    if row == num_rows:  # tokens after the last row
        _zeros(out, tl.load(row_ends + num_rows - 1), num_tokens, lane, is_dim, HEADS * DIM, LANES)
        return
    slot = tl.load(row_slots + row).to(tl.int64)
    start, count = tl.load(row_starts + row), tl.load(row_counts + row)
    if count == 1:
        return
    end = tl.load(row_ends + row)
    begin = end - count
    num = num_real(slots, begin, count, slot, PADDED)
    _zeros(out, begin + num, end, lane, is_dim, HEADS * DIM, LANES)
    if num == 0:
        return

    offset = (head * DIM + dim)[None, :] * STATE + n[:, None]
    inside = is_dim & (n < STATE)[:, None]
    h = load_begin(table, kept, rows, slot, start, rows_stride, offset, inside, held, INTERVAL)
    past = start + num
    for low in tl.range(start // SIZE * SIZE, past, SIZE):
        position = low + lane
        real = ((lane < SIZE) & (position >= start) & (position < past))[:, None]
        token = (begin + position - start).to(tl.int64)[:, None]
        whole = begin + tl.minimum(low + SIZE, past) - 1 - start  # the chunk's last token
        whole = tl.load(scales + (2 * num_tokens + whole).to(tl.int64) * HEADS + head)
        at_scale = scales + token * HEADS + head
        into = tl.load(at_scale, mask=real, other=0.0)
        onto = tl.load(at_scale + num_tokens.to(tl.int64) * HEADS, mask=real, other=0.0)
        at = mixed + token * mixed_stride + group + n[None, :]
        query = tl.load(at + QUERIES_AT, mask=real & is_n, other=0.0)
        key = tl.load(at + KEYS_AT, mask=real & is_n, other=0.0)
        at = values + token * values_stride + VALUES_AT + head * DIM + dim[None, :]
        value = tl.load(at, mask=real & is_dim, other=0.0)
        at = pairs + (token * HEADS + head) * LANES + lane[None, :]
        pair = tl.load(at, mask=real, other=0.0)

        narrow = h.to(query.dtype)
        y = tl.dot(query, narrow, input_precision=PRECISION) * into
        change = value.to(tl.float32)
        if skip is not None:
            y += change * by_skip
        if removed is not None:
            at = removed + (token * HEADS + head) * STATE + n[None, :]
            taken = tl.load(at, mask=real & is_n, other=0.0)
            change -= tl.dot(taken, narrow, input_precision=PRECISION)
        y = tl.dot(pair, change.to(pair.dtype), y, input_precision=PRECISION)
        added = (change * onto).to(key.dtype)
        h = tl.dot(key.T, added, h * whole, input_precision=PRECISION)
        tl.store(out + token * (HEADS * DIM), y.to(out.dtype.element_ty), mask=real & is_dim)
        if INTERVAL > 0 and low + SIZE <= past:
            snapshot = snapshot_row(rows, slot, low + SIZE, rows_stride, INTERVAL)
            if snapshot > 0:
                tl.store(kept + snapshot * held + offset, h.to(kept.dtype.element_ty), mask=inside)
    tl.store(table + slot * held + offset, h.to(table.dtype.element_ty), mask=inside)


@triton.jit
def _zeros(out, begin, end, lane, is_dim, stride: tl.constexpr, LANES: tl.constexpr):
    for first in range(begin, end, LANES):
        token = (first + lane).to(tl.int64)[:, None]
        nothing = tl.zeros([LANES, 1], out.dtype.element_ty)
        target = out + token * stride
        tl.store(target, tl.broadcast_to(nothing, target.shape), mask=(token < end) & is_dim)


class ChunkCut(NamedTuple):
    """How rows are cut into chunks, and the tile of a program."""

    size: int  # tokens of a chunk; snapshots are due at ends of chunks
    lanes: int  # the same, padded for a matrix product
    states: int  # the state size, padded
    dims: int  # value dims per program
    warps: int
    stages: int  # chunks whose inputs a program holds at once

    def num_chunks(self, num_tokens: int, rows: Rows) -> int:
        """Return the most chunks that a step of `num_tokens` tokens, padding included, can have.

        Both ends of a row may be in a chunk that is not full.
        """
        return min(num_tokens, num_tokens // self.size + 2 * len(rows.slots))


def cut_for(shape: Scan, dtype: torch.dtype) -> ChunkCut:
    is_wide = dtype is torch.float32
    size = math.gcd(WIDE_CHUNK if is_wide else CHUNK, shape.interval)
    lanes, states = max(LEAST, size), padded(shape.state_size)
    dims = min(padded(shape.head_dim), WIDE_DIMS if is_wide else DIMS)
    keys = states * (3 if shape.kind == "delta" else 2)
    each, held = lanes * (keys + dims + lanes) * dtype.itemsize, states * dims * dtype.itemsize
    stages = 2 if 2 * each + held <= shared_memory() else 1
    return ChunkCut(size, lanes, states, dims, 8 if is_wide else 4, stages)


def padded(size: int) -> int:
    return max(LEAST, int(triton.next_power_of_2(size)))


def precision(dtype: torch.dtype) -> str | None:
    return "ieee" if dtype is torch.float32 else None


def scan_chunks(
    mixed: Tensor,
    d: Tensor | None,
    chunks: Chunks,
    tokens: Tokens,
    rows: Rows,
    states: States,
    shape: Scan,
    out: Tensor,
) -> None:
    values = mixed if chunks.changes is None else chunks.changes.flatten(1)
    places = constants(shape)
    if chunks.changes is not None:
        places["VALUES_AT"] = 0
    cut = cut_for(shape, mixed.dtype)
    launch(
        _pass_kernel,
        (triton.cdiv(shape.head_dim, cut.dims) * shape.num_heads, len(rows.slots) + 1),
        mixed, values, chunks.pairs, chunks.removed, chunks.scales, d, tokens.slots, *rows[:4],
        states.scan, states.scan_kept, states.rows, out,
        len(mixed), len(rows.slots), mixed.stride(0), values.stride(0),
        0 if states.rows is None else states.rows.stride(0), **places,
        SIZE=cut.size, LANES=cut.lanes, INTERVAL=shape.interval, PADDED=rows.span > 0,
        DIMS=cut.dims, STATES=cut.states, PRECISION=precision(mixed.dtype),
        num_warps=cut.warps, num_stages=cut.stages, **overlap(),
    )  # fmt: skip
