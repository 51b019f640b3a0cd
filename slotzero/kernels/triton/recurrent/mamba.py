"""Mamba-2 over long rows: the relations between the tokens of a chunk, for all chunks at once.

With the decays a_i = exp(-rate dt_i), and a(j, i] their product over the tokens after j up to i:

    pairs_ij = (C_i B_j) dt_j a(j, i]  for j <= i
    into_i = passed_i = a(.., i], from the chunk's beginning;  onto_j = dt_j a(j, ..], to its end

A program has one chunk and some heads of one group, which share the products of B and C.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.recurrent.chunks import Chunks, cut_for, precision
from slotzero.kernels.triton.recurrent.rows import chunk_tokens, falling, find_chunk, softplus
from slotzero.kernels.triton.recurrent.step import constants
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import Scan, ScanWeights

MAX_HEADS = 8  # per program


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _relate_kernel(
    mixed, gates, a_log, dt_bias, slots, row_slots, row_starts, row_counts, row_ends, pairs, scales,
    num_tokens, num_rows, mixed_stride, gates_stride, least, most,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    VALUES_AT: tl.constexpr, KEYS_AT: tl.constexpr, QUERIES_AT: tl.constexpr,
    SIZE: tl.constexpr, LANES: tl.constexpr, PADDED: tl.constexpr, MINE: tl.constexpr,
    STATES: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    first, n, lane = tl.program_id(0) * MINE, tl.arange(0, STATES), tl.arange(0, LANES)
    group = first // (HEADS // GROUPS) * STATE
    wait_for_writer(PDL)

    row, low = find_chunk(tl.program_id(1), row_slots, row_starts, row_counts, num_rows, SIZE)
    if row >= num_rows:
        return
    token, real = chunk_tokens(
        row, low, lane, slots, row_slots, row_starts, row_counts, row_ends, SIZE, PADDED
    )
    inside = real[:, None] & (n < STATE)[None, :]
    at = mixed + token[:, None] * mixed_stride + group + n[None, :]
    key = tl.load(at + KEYS_AT, mask=inside, other=0.0)
    query = tl.load(at + QUERIES_AT, mask=inside, other=0.0)
    score = tl.dot(query, key.T, input_precision=PRECISION)

    for head in range(first, first + MINE):
        step = tl.load(gates + token * gates_stride + head, mask=real, other=0.0).to(tl.float32)
        step = softplus(step + tl.load(dt_bias + head).to(tl.float32))
        step = tl.where(real, tl.minimum(tl.maximum(step, least), most), 0.0)
        power = -tl.exp(tl.load(a_log + head).to(tl.float32)) * step
        total = tl.cumsum(power, axis=0)
        pair = score * falling(total, lane) * step[None, :]
        target = pairs + (token[:, None] * HEADS + head) * LANES + lane[None, :]
        tl.store(target, pair.to(pairs.dtype.element_ty), mask=real[:, None])
        into, onto = tl.exp(total), tl.exp(tl.sum(power, axis=0) - total) * step
        target, apart = scales + token * HEADS + head, num_tokens.to(tl.int64) * HEADS
        tl.store(target, into, mask=real)
        tl.store(target + apart, onto, mask=real)
        tl.store(target + 2 * apart, into, mask=real)


def relate(
    mixed: Tensor,
    gates: Tensor,
    weights: ScanWeights,
    tokens: Tokens,
    rows: Rows,
    shape: Scan,
) -> Chunks:
    num_tokens, num_heads, cut = len(mixed), shape.num_heads, cut_for(shape, mixed.dtype)
    pairs = mixed.new_empty(num_tokens, num_heads, cut.lanes)
    scales = torch.empty(3, num_tokens, num_heads, device=mixed.device)
    of_group = num_heads // shape.num_groups
    mine = max(m for m in range(1, MAX_HEADS + 1) if of_group % m == 0)
    launch(
        _relate_kernel, (num_heads // mine, cut.num_chunks(num_tokens, rows)),
        mixed, gates, weights.a_log, weights.dt_bias, tokens.slots, *rows[:4], pairs, scales,
        num_tokens, len(rows.slots), mixed.stride(0), gates.stride(0), *shape.dt_limit,
        **constants(shape), SIZE=cut.size, LANES=cut.lanes, PADDED=rows.span > 0,
        MINE=mine, STATES=cut.states, PRECISION=precision(mixed.dtype), **overlap(),
    )  # fmt: skip
    return Chunks(pairs, scales)
