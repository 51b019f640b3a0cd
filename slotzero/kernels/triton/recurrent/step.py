"""The scan of recurrent layers token by token: one token per row, or a few with a trail.

A program has some value dims of one head of one row. It reads their states once, takes the row's
tokens in order, and writes the states or, with a trail, the state after each token. Everything is
in float32, and a token's arithmetic is the same in both cases. Rows of one token among longer rows
are computed here too, and all rows with kda or in deterministic mode.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.torch_recurrent import L2_EPS
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.recurrent.rows import load_begin, num_real, snapshot_row, softplus
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights

TILE = 4096  # values of a state: each thread of 4 warps moves 8 times 16 bytes of float32
EPS = tl.constexpr(L2_EPS)


@triton.jit(do_not_specialize=["rows_stride"])
def _step_kernel(
    mixed, gates, beta, a_log, dt_bias, skip, slots, positions, row_slots, row_counts, row_ends,
    table, kept, rows, trail, out,
    mixed_stride, gates_stride, beta_stride, rows_stride, trail_stride, trail_step,
    least, most,
    HEADS: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr, STATE: tl.constexpr,
    VALUES_AT: tl.constexpr, KEYS_AT: tl.constexpr, QUERIES_AT: tl.constexpr,
    KDA: tl.constexpr, LONG: tl.constexpr, PADDED: tl.constexpr,
    SPAN: tl.constexpr, INTERVAL: tl.constexpr,
    DIMS: tl.constexpr, STATES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute a delta rule if beta is given, else mamba. With counts, only rows of one token or, if
    LONG, rows of any length."""
    may_follow(PDL)
    parts: tl.constexpr = (DIM + DIMS - 1) // DIMS
    held: tl.constexpr = HEADS * DIM * STATE
    head, row = tl.program_id(0) // parts, tl.program_id(1).to(tl.int64)
    dim, n = tl.program_id(0) % parts * DIMS + tl.arange(0, DIMS), tl.arange(0, STATES)
    is_dim, is_n = dim < DIM, n < STATE
    inside = is_dim[:, None] & is_n[None, :]
    offset = (head * DIM + dim)[:, None] * STATE + n[None, :]
    rate = tl.exp(tl.load(a_log + head).to(tl.float32))
    if KDA:
        shift = tl.load(dt_bias + head * STATE + n, mask=is_n, other=0.0).to(tl.float32)
    else:
        shift = tl.load(dt_bias + head).to(tl.float32)
    by_skip = 0.0
    if skip is not None:
        by_skip = tl.load(skip + head).to(tl.float32)
    group = head // (HEADS // GROUPS) * STATE
    wait_for_writer(PDL)

    first, num = row * SPAN, SPAN
    if row_counts is not None:
        count = tl.load(row_counts + row)
        begin = tl.load(row_ends + row) - count
        first = begin.to(tl.int64)
        if LONG:
            num = num_real(slots, begin, count, tl.load(row_slots + row), PADDED)
            if num == 0:
                return
        elif count != 1:
            return
    slot, start = tl.load(slots + first).to(tl.int64), tl.load(positions + first)
    h = load_begin(table, kept, rows, slot, start, rows_stride, offset, inside, held, INTERVAL)
    for i in range(num):
        token = first + i
        real = tl.load(slots + token) > 0
        at = mixed + token * mixed_stride
        value = tl.load(at + VALUES_AT + head * DIM + dim, mask=is_dim, other=0.0).to(tl.float32)
        key = tl.load(at + KEYS_AT + group + n, mask=is_n, other=0.0).to(tl.float32)
        query = tl.load(at + QUERIES_AT + group + n, mask=is_n, other=0.0).to(tl.float32)
        if KDA:
            at = gates + token * gates_stride + head * STATE + n
            step = softplus(tl.load(at, mask=is_n, other=0.0).to(tl.float32) + shift)
            h *= tl.exp(-rate * step)[None, :]
        else:
            step = tl.load(gates + token * gates_stride + head).to(tl.float32) + shift
            step = tl.minimum(tl.maximum(softplus(step), least), most)
            h *= tl.exp(-rate * step)
        if beta is not None:
            key *= tl.rsqrt(tl.sum(key * key, axis=0) + EPS)
            query *= tl.rsqrt(tl.sum(query * query, axis=0) + EPS) * STATE**-0.5
            strength = tl.sigmoid(tl.load(beta + token * beta_stride + head).to(tl.float32))
            change = (value - tl.sum(h * key[None, :], axis=1)) * strength
        else:
            change = value * step
        h += change[:, None] * key[None, :]
        y = tl.where(real, tl.sum(h * query[None, :], axis=1) + by_skip * value, 0.0)
        target = out + token * (HEADS * DIM) + head * DIM + dim
        tl.store(target, y.to(out.dtype.element_ty), mask=is_dim)
        if trail is not None:
            # 64-bit offsets: a trail may have more values than 32 bits can index.
            target = trail + row * trail_stride + (token - first) * trail_step + offset
            left = tl.where(real, h, 0.0).to(trail.dtype.element_ty)
            tl.store(target, left, mask=inside)
        elif LONG and INTERVAL > 0:
            into = snapshot_row(rows, slot, start + i + 1, rows_stride, INTERVAL)
            if into > 0:
                tl.store(kept + into * held + offset, h.to(kept.dtype.element_ty), mask=inside)
    if trail is None and slot > 0:
        tl.store(table + slot * held + offset, h.to(table.dtype.element_ty), mask=inside)
        if INTERVAL > 0 and not LONG:
            into = snapshot_row(rows, slot, start + SPAN, rows_stride, INTERVAL)
            if into > 0:
                tl.store(kept + into * held + offset, h.to(kept.dtype.element_ty), mask=inside)


def scan_in_turn(
    mixed: Tensor,
    gates: Tensor,
    beta: Tensor | None,
    weights: ScanWeights,
    step: RecurrentStep,
    shape: Scan,
    out: Tensor,
    in_turn: bool,
) -> None:
    """Scan rows of as many tokens as the trail has. Without a trail, scan rows of one token: those
    among the given rows or, without rows, every token. With kda and in deterministic mode
    (`in_turn`), scan rows of any length."""
    tokens, rows, states, trail = step
    left = None if trail is None else trail.scan
    span, strides = (1, (0, 0)) if left is None else (left.shape[1], left.stride()[:2])
    state_block = triton.next_power_of_2(shape.state_size)
    dim_block = min(triton.next_power_of_2(shape.head_dim), max(1, TILE // state_block))
    num_rows = len(mixed) // span if rows is None else len(rows.slots)
    given: tuple[Tensor | None, ...] = (None,) * 3
    if rows is not None and trail is None:
        given = rows.slots, rows.counts, rows.ends
    is_kda = shape.kind == "kda"
    launch(
        _step_kernel, (triton.cdiv(shape.head_dim, dim_block) * shape.num_heads, num_rows),
        mixed, gates, beta, *weights, *tokens, *given,
        states.scan, states.scan_kept, states.rows, left, out,
        mixed.stride(0), gates.stride(0), 0 if beta is None else beta.stride(0),
        0 if states.rows is None else states.rows.stride(0), *strides, *shape.dt_limit,
        **constants(shape), KDA=is_kda, LONG=(is_kda or in_turn) and given[0] is not None,
        PADDED=rows is not None and rows.span > 0, SPAN=span, INTERVAL=shape.interval,
        DIMS=dim_block, STATES=state_block, enable_fp_fusion=not in_turn, **overlap(),
    )  # fmt: skip


def constants(shape: Scan) -> dict[str, int]:
    """Return the shape, and the offsets of a token's values, keys and queries (mamba: x, B, C)."""
    first, second, _ = shape.sizes
    places = (0, first, first + second) if shape.kind == "mamba" else (first + second, first, 0)
    return {
        "HEADS": shape.num_heads, "DIM": shape.head_dim, "GROUPS": shape.num_groups,
        "STATE": shape.state_size,
        "VALUES_AT": places[0], "KEYS_AT": places[1], "QUERIES_AT": places[2],
    }  # fmt: skip
