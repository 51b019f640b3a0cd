"""Paged attention of a decode step: one token per row, each row with its own length.

The grid of a captured size is fixed; `plan` assigns the work to it in the graph, once per step. The
keys that a row sees (all, or the window at its end) are cut into chunks of one common size, chosen
so that all chunks fit the grid, and each program computes one chunk of one KV head. The last
program of a row to finish merges its chunks, in their order, so the result does not depend on which
program that is. The attention sink is counted in the chunk with the newest position only.

Every program applies norm and RoPE to the query heads of its KV head. The program of the newest
position also does so for the key, stores key and value, and attends to them in registers. In layers
that do not store, they are read from the pages, where an earlier layer stored them in this step.
Rows of slot 0 store nothing and get zeros. All earlier positions were stored in earlier steps, so
their pages are read before `wait_for_writer`.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.attention_plans import DecodePlan
from slotzero.kernels.triton.attention.float8 import (
    add_values,
    as_query,
    as_stored,
    joined,
    load_kv_scales,
    load_values,
    no_values,
    numbers,
    separated,
    values_in,
)
from slotzero.kernels.triton.attention.window import first_seen
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.linear.activation import LOG2E, tanh
from slotzero.kernels.types import Angles, Heads, PagedKv, QkNorms


@triton.jit(do_not_specialize=["rows", "num_done", "num_chunks", "spare", "smallest"])
def plan_kernel(
    slots, positions, query_positions, rows,
    row_of, slot_of, begin_of, end_of, first_of, count_of, done,
    num_done, num_chunks, spare, smallest,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SPAN: tl.constexpr, SPLIT_NEWEST: tl.constexpr,
    MAY_BE_EMPTY: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the plan, in one program. Never launched with overlap, so that later kernels may read
    the plan without a wait.

    `query_positions`: by token, SPAN per row; a window reaches back from the first of a row. With
    SPLIT_NEWEST the newest position, which is not stored yet, is a separate chunk. With
    MAY_BE_EMPTY a row may begin at position -1, and has no keys then."""
    r = tl.arange(0, ROWS)
    slot = tl.load(slots + r, mask=r < rows, other=0)
    position = tl.load(positions + r, mask=r < rows, other=0)
    length = tl.where(slot > 0, position + 1, 0)
    if MAY_BE_EMPTY:
        length = tl.maximum(length, 0)
    low = tl.zeros_like(length)  # the first key that the row sees
    if WINDOW is not None:
        query_position = tl.load(query_positions + r * SPAN, mask=slot > 0, other=0)
        low = tl.where(slot > 0, first_seen(query_position, WINDOW, CHUNKED), 0)
    stored = length
    if SPLIT_NEWEST:
        stored = tl.maximum(length - 1, 0)
    seen = stored - low
    share = tl.cdiv(tl.sum(seen.to(tl.int64), axis=0), spare).to(tl.int32)
    chunk = tl.maximum(tl.cdiv(share, smallest), 1) * smallest
    count = tl.cdiv(seen, chunk) + 1 if SPLIT_NEWEST else tl.maximum(tl.cdiv(seen, chunk), 1)
    count = tl.where(r < rows, count, 0)
    last = tl.cumsum(count, axis=0)
    first = last - count
    for i in range(tl.max(count, axis=0)):
        mine = i < count
        tl.store(row_of + first + i, r, mask=mine)
        tl.store(slot_of + first + i, slot, mask=mine)
        begin, end = low + i * chunk, tl.minimum(low + (i + 1) * chunk, stored)
        if SPLIT_NEWEST:
            begin, end = tl.minimum(begin, stored), tl.where(i == count - 1, length, end)
        tl.store(begin_of + first + i, begin, mask=mine)
        tl.store(end_of + first + i, end, mask=mine)
        tl.store(first_of + first + i, first, mask=mine)
        tl.store(count_of + first + i, count, mask=mine)
    used = tl.sum(count, axis=0)
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_chunks, BLOCK):
        unused = (start + lane >= used) & (start + lane < num_chunks)
        tl.store(row_of + start + lane, -1, mask=unused)
    for start in range(0, num_done, BLOCK):
        tl.store(done + start + lane, 0, mask=start + lane < num_done)


@triton.jit
def load_norm(norm, half, DIM: tl.constexpr):
    """Load a norm's weight in two halves, [1, half] each."""
    present = half < DIM // 2
    a = tl.load(norm + half, mask=present, other=0.0).to(tl.float32)[None, :]
    b = tl.load(norm + DIM // 2 + half, mask=present, other=0.0).to(tl.float32)[None, :]
    return a, b


@triton.jit
def norm_and_rotate(a, b, by_a, by_b, cos, sin, eps, DIM: tl.constexpr, NORM: tl.constexpr):
    """Apply norm and RoPE to heads in two halves, [heads, half] each, rounding as torch_ops.py."""
    dtype = a.dtype
    a, b = a.to(tl.float32), b.to(tl.float32)
    if NORM:
        square = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        scale = (1.0 / tl.sqrt_rn(square / DIM + eps))[:, None]
        a = ((a * scale).to(dtype).to(tl.float32) * by_a).to(dtype).to(tl.float32)
        b = ((b * scale).to(dtype).to(tl.float32) * by_b).to(dtype).to(tl.float32)
    return (a * cos - b * sin).to(dtype), (b * cos + a * sin).to(dtype)


@triton.jit
def norm_values(v, eps, VALUE_DIM: tl.constexpr):
    """Apply an RMSNorm without a weight to each row of v [rows, dim]; zeros past VALUE_DIM."""
    wide = v.to(tl.float32)
    square = tl.sum(wide * wide, axis=1) / VALUE_DIM
    return (wide * (1.0 / tl.sqrt_rn(square + eps))[:, None]).to(v.dtype)


@triton.jit
def load_table(table, key, end, PAGE: tl.constexpr):
    return tl.load(table + key // PAGE, mask=key < end, other=0).to(tl.int64)


@triton.jit
def load_pages(
    kv_pages, v_pages, page, kv_head, key, known, half,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Load keys in two halves, [half, keys] each, and values; zeros where `known` is false."""
    size: tl.constexpr = DIM + VALUE_DIM
    row = (page * PAGE + key % PAGE) * KV_HEADS + kv_head
    key_at = kv_pages + (row * size)[None, :] + half[:, None]
    present = known[None, :] & (half < DIM // 2)[:, None]
    a = tl.load(key_at, mask=present, other=0.0)
    b = tl.load(key_at + DIM // 2, mask=present, other=0.0)
    v = load_values(v_pages, row, tl.zeros_like(row), known, size, VALUE_DIM, WIDTH)
    return a, b, v


@triton.jit
def apply_softcap(score, SOFTCAP: tl.constexpr):
    """Apply the softcap to a scaled score; the result is an exponent of base 2."""
    if SOFTCAP is not None:
        score = tanh(score) * (SOFTCAP * LOG2E)
    return score


@triton.jit
def attend_keys(qa, qb, a, b, v, known, scale, peak, total, acc, SOFTCAP: tl.constexpr):
    """Add one tile of keys to the running softmax, in base 2."""
    a, b = numbers(a, qa.dtype), numbers(b, qa.dtype)
    score = tl.dot(qa, a, input_precision="ieee")
    score = apply_softcap(tl.dot(qb, b, score, input_precision="ieee") * scale, SOFTCAP)
    score = tl.where(known[None, :], score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    weight = tl.exp2(score - new_peak[:, None])
    shrink = tl.exp2(peak - new_peak)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = add_values(acc, shrink, weight, v, qa.dtype)
    return new_peak, total, acc


@triton.jit
def attend_own(
    qa, qb, ka, kb, own_v, by_ka, by_kb, c, s, sink, kv_pages, values_at, place, k_scale, v_scale,
    eps, scale,
    GROUP: tl.constexpr, SINKS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Start the softmax with the newest position, rounded as stored, and the sink; store the KV.
    Return peak, total and acc."""
    half, dim = tl.arange(0, HALF), tl.arange(0, WIDTH)
    in_half = half[None, :] < DIM // 2
    if NORM_VALUES:
        own_v = norm_values(own_v[None, :], eps, VALUE_DIM).reshape([WIDTH])
    if STORES:
        ka, kb = norm_and_rotate(ka, kb, by_ka, by_kb, c, s, eps, DIM, NORM)
        ka, kb = as_stored(ka, k_scale, kv_pages), as_stored(kb, k_scale, kv_pages)
        own_v = as_stored(own_v, v_scale, kv_pages)
        tl.store(kv_pages + place + half[None, :], ka, mask=in_half)
        tl.store(kv_pages + place + DIM // 2 + half[None, :], kb, mask=in_half)
        tl.store(kv_pages + place + values_at + dim, own_v, mask=dim < VALUE_DIM)
    ka, kb, own_v = numbers(ka, qa.dtype), numbers(kb, qa.dtype), numbers(own_v, qa.dtype)
    product = qa.to(tl.float32) * ka.to(tl.float32) + qb.to(tl.float32) * kb.to(tl.float32)
    peak = apply_softcap(tl.sum(product, axis=1) * scale, SOFTCAP)
    total = tl.full([GROUP], 1.0, tl.float32)
    acc = tl.zeros([GROUP, WIDTH], tl.float32) + own_v.to(tl.float32)[None, :]
    if SINKS:
        new_peak = tl.maximum(peak, sink)
        shrink = tl.exp2(peak - new_peak)
        total = total * shrink + tl.exp2(sink - new_peak)
        acc, peak = acc * shrink[:, None], new_peak
    return peak, total, separated(acc, kv_pages, GROUP, WIDTH)


@triton.jit
def merge_chunks(
    partial, peak_of, total_of, out, kv_head, first, count, dim, v_scale,
    HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, GROUP_SIZE: tl.constexpr, MERGED: tl.constexpr,
    WIDTH: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Merge all chunks of a row, in order, for the heads of one KV head. BATCH chunks are loaded at
    once, so that their loads overlap."""
    g, lane = tl.arange(0, MERGED), tl.arange(0, BATCH)
    real = g < GROUP_SIZE
    head = kv_head * GROUP_SIZE + g
    inside = real[:, None] & (dim < VALUE_DIM)[None, :]
    peak = tl.full([MERGED], float("-inf"), tl.float32)
    total = tl.zeros([MERGED], tl.float32)
    acc = tl.zeros([MERGED, WIDTH], tl.float32)
    for start in range(first, first + count, BATCH):
        known = real[:, None] & (start + lane < first + count)[None, :]
        at = head[:, None] + (start + lane)[None, :] * HEADS
        its_peak = tl.load(peak_of + at, mask=known, other=float("-inf"))
        its_total = tl.load(total_of + at, mask=known, other=0.0)
        its_at = partial + at[:, :, None] * VALUE_DIM + dim[None, None, :]
        its_acc = tl.load(its_at, mask=known[:, :, None] & inside[:, None, :], other=0.0)
        new_peak = tl.maximum(peak, tl.max(its_peak, axis=1))
        old, new = tl.exp2(peak - new_peak), tl.exp2(its_peak - new_peak[:, None])
        total = total * old + tl.sum(its_total * new, axis=1)
        acc = acc * old[:, None] + tl.sum(its_acc * new[:, :, None], axis=1)
        peak = new_peak
    result = (acc / total[:, None] * v_scale).to(out.dtype.element_ty)
    tl.store(out + head[:, None] * VALUE_DIM + dim[None, :], result, mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def _decode_kernel(
    qkv, q_norm, k_norm, sinks, cos, sin, kv_pages, page_table, kv_scales, out,
    row_of, slot_of, begin_of, end_of, first_of, count_of, done, partial, peak_of, total_of,
    qkv_stride, values_at, table_stride, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, MERGED: tl.constexpr,
    BATCH: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr,
    STORES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    kv_head, chunk = tl.program_id(0), tl.program_id(1)
    row, slot = tl.load(row_of + chunk), tl.load(slot_of + chunk).to(tl.int64)
    begin, end = tl.load(begin_of + chunk), tl.load(end_of + chunk)
    first, count = tl.load(first_of + chunk), tl.load(count_of + chunk)
    if row < 0:
        wait_for_writer(PDL)
        return
    is_last = chunk == first + count - 1
    group_size: tl.constexpr = HEADS // KV_HEADS
    g, half, dim = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, WIDTH)
    head = kv_head * group_size + g
    # values_at is DIM, but not a constant for the compiler, which would cost registers.
    v_pages, table = values_in(kv_pages, values_at), page_table + slot * table_stride
    stored = end - is_last.to(tl.int32)  # the newest position is not in the pages yet

    # Constants and keys stored by earlier steps do not depend on the kernel before: load them now.
    key = begin + tl.arange(0, KEYS)
    page = load_table(table, key, stored, PAGE)
    if EARLY:
        a, b, v = load_pages(
            kv_pages, v_pages, page, kv_head, key, key < stored, half,
            KV_HEADS, DIM, VALUE_DIM, PAGE, WIDTH,
        )  # fmt: skip
    newest = tl.maximum(end - 1, 0)
    new_page = tl.load(table + newest // PAGE).to(tl.int64)
    place = ((new_page * PAGE + newest % PAGE) * KV_HEADS + kv_head) * (DIM + VALUE_DIM)
    by_qa, by_qb, by_ka, by_kb = 1.0, 1.0, 1.0, 1.0
    if NORM:
        by_qa, by_qb = load_norm(q_norm, half, DIM)
        if STORES:
            by_ka, by_kb = load_norm(k_norm, half, DIM)
    k_scale, v_scale = load_kv_scales(kv_scales)
    sink = 0.0
    if sinks is not None:
        sink = tl.load(sinks + head, mask=g < group_size, other=0.0).to(tl.float32) * LOG2E
    wait_for_writer(PDL)

    row64 = row.to(tl.int64)
    in_half = half[None, :] < DIM // 2
    q_at = qkv + row64 * qkv_stride + head[:, None] * DIM + half[None, :]
    q_inside = (g < group_size)[:, None] & in_half
    qa = tl.load(q_at, mask=q_inside, other=0.0)
    qb = tl.load(q_at + DIM // 2, mask=q_inside, other=0.0)
    k_at = kv_pages + place
    if STORES:
        k_at = qkv + row64 * qkv_stride + (HEADS + kv_head) * DIM
    ka = tl.load(k_at + half[None, :], mask=in_half, other=0.0)
    kb = tl.load(k_at + DIM // 2 + half[None, :], mask=in_half, other=0.0)
    v_at = kv_pages + place + values_at
    if STORES:
        v_at = qkv + row64 * qkv_stride + (HEADS + KV_HEADS) * DIM + kv_head * VALUE_DIM
    own_v = tl.load(v_at + dim, mask=dim < VALUE_DIM, other=0.0)
    angle = row64 * (DIM // 2) + half[None, :]
    c, s = (
        tl.load(cos + angle, mask=in_half, other=0.0),
        tl.load(sin + angle, mask=in_half, other=0.0),
    )
    inside = (g < group_size)[:, None] & (dim < VALUE_DIM)[None, :]
    out_at = out + (row64 * HEADS + head[:, None]) * VALUE_DIM + dim[None, :]
    if slot == 0:
        tl.store(out_at, tl.zeros([GROUP, WIDTH], out.dtype.element_ty), mask=inside)
        return

    qa, qb = norm_and_rotate(qa, qb, by_qa, by_qb, c, s, eps, DIM, NORM)
    qa, qb = as_query(qa, kv_pages), as_query(qb, kv_pages)
    scale *= k_scale * (LOG2E if SOFTCAP is None else 1.0 / SOFTCAP)
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = no_values(kv_pages, GROUP, WIDTH)
    if is_last:
        peak, total, acc = attend_own(
            qa, qb, ka, kb, own_v, by_ka, by_kb, c, s, sink, kv_pages, values_at, place,
            k_scale, v_scale, eps, scale, GROUP, sinks is not None, DIM, VALUE_DIM, SOFTCAP, HALF,
            WIDTH, NORM, NORM_VALUES, STORES,
        )  # fmt: skip

    begin_loop = begin
    if EARLY:
        begin_loop += KEYS
        if begin < stored:
            peak, total, acc = attend_keys(
                qa, qb, a, b, v, key < stored, scale, peak, total, acc, SOFTCAP
            )
    for start in tl.range(begin_loop, stored, KEYS, num_stages=STAGES):
        key = start + tl.arange(0, KEYS)
        if EARLY:  # the compiler pipelines this form better in short loops
            page = load_table(table, key, stored, PAGE)
        a, b, v = load_pages(
            kv_pages, v_pages, page, kv_head, key, key < stored, half,
            KV_HEADS, DIM, VALUE_DIM, PAGE, WIDTH,
        )  # fmt: skip
        if not EARLY:
            page = load_table(table, key + KEYS, stored, PAGE)  # one tile ahead
        peak, total, acc = attend_keys(
            qa, qb, a, b, v, key < stored, scale, peak, total, acc, SOFTCAP
        )

    acc = joined(acc, GROUP, WIDTH)
    if count == 1:
        result = (acc / total[:, None] * v_scale).to(out.dtype.element_ty)
        tl.store(out_at, result, mask=inside)
        return

    flat = chunk * HEADS + head
    tl.store(partial + flat[:, None] * VALUE_DIM + dim[None, :], acc, mask=inside)
    tl.store(peak_of + flat, peak, mask=g < group_size)
    tl.store(total_of + flat, total, mask=g < group_size)
    tl.debug_barrier()  # all writes of the program, then the count that publishes them
    if tl.atomic_add(done + row * KV_HEADS + kv_head, 1, sem="acq_rel") == count - 1:
        tl.store(done + row * KV_HEADS + kv_head, 0)  # for the next layer
        tl.debug_barrier()
        merge_chunks(
            partial, peak_of, total_of, out + row64 * HEADS * VALUE_DIM, kv_head, first, count, dim,
            v_scale, HEADS, VALUE_DIM, group_size, MERGED, WIDTH, BATCH,
        )  # fmt: skip


def plan(slots: Tensor, positions: Tensor, heads: Heads) -> DecodePlan:
    rows, kv_heads = len(slots), heads.num_kv_heads
    programs, smallest = cut_for(rows)
    spare = max(rows, triton.cdiv(programs, kv_heads) - rows)
    num_chunks = rows + spare
    ints = slots.new_empty(6, num_chunks)
    floats = torch.empty(2, num_chunks, heads.num_heads, device=slots.device)
    partial = torch.empty(num_chunks, heads.num_heads, heads.value_dim, device=slots.device)
    done = slots.new_empty(rows, kv_heads)
    peak, total = floats.unbind()
    row, slot, begin, end, first, num = ints.unbind()
    planned = DecodePlan(row, slot, begin, end, first, num, done, partial, peak, total)
    launch(
        plan_kernel, (1,), slots, positions, positions, rows, *planned[:7], rows * kv_heads,
        num_chunks, spare, smallest, WINDOW=heads.window, CHUNKED=heads.is_chunked, SPAN=1,
        SPLIT_NEWEST=False, MAY_BE_EMPTY=False, ROWS=max(256, triton.next_power_of_2(rows)),
        BLOCK=1024,
    )  # fmt: skip
    return planned


def attend(
    qkv: Tensor,
    norms: QkNorms,
    sinks: Tensor | None,
    angles: Angles,
    kv: PagedKv,
    plan: DecodePlan,
    heads: Heads,
) -> Tensor:
    dim, value_dim, kv_heads = heads.head_dim, heads.value_dim, heads.num_kv_heads
    out = qkv.new_empty(len(qkv), heads.out_size)
    group = triton.next_power_of_2(heads.num_heads // kv_heads)
    half = max(16, triton.next_power_of_2(dim // 2))
    width = max(32, triton.next_power_of_2(value_dim))
    keys, warps, stages, early = shape_for(len(qkv), qkv.dtype.itemsize, dim + value_dim)
    launch(
        _decode_kernel, (kv_heads, len(plan.row)),
        qkv, *norms, sinks, *angles, *kv, out, *plan,
        qkv.stride(0), dim, kv.page_table.stride(0), heads.norm_eps, heads.scale,
        HEADS=heads.num_heads, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
        SOFTCAP=heads.softcap, PAGE=kv.pages.shape[1], GROUP=max(16, group), MERGED=group,
        BATCH=max(1, min(16, 2048 * warps // (group * width))), HALF=half, WIDTH=width, KEYS=keys,
        STAGES=stages, EARLY=early, NORM=norms.q is not None,
        NORM_VALUES=heads.norms_values and heads.stores, STORES=heads.stores,
        num_warps=warps, **overlap(),
    )  # fmt: skip
    return out


def cut_for(rows: int) -> tuple[int, int]:
    """Return the number of programs to use, and the minimum keys of a chunk; see benchmarks/h200.

    A small batch is cut so that every multiprocessor has work. A large one is cut less finely: with
    whole rows, the longest would end long after the others.
    """
    return (512, 64) if rows <= 64 else (4096, 256)


def shape_for(rows: int, itemsize: int, size: int) -> tuple[int, int, int, bool]:
    """Return keys per tile, warps, stages, and whether to load a tile early; see benchmarks/h200.

    A small batch needs short programs, a large one many concurrent ones. With float32 or large
    heads (`size` is that of a key plus its value), half as many keys fit into the same memory. With
    the largest heads, a tile that is loaded early would not fit into registers.
    """
    if size > 512:
        return (32, 4, 2, False) if itemsize <= 2 else (16, 8, 2, False)
    small = 2 if itemsize * size > 512 else 1
    if rows <= 64:
        return 64 // small, 4 if 2 <= rows <= 8 else 2, 2, True
    if rows <= 128:
        return 64 // small, 2, 2, False
    return 32 // small, 1, 2, False
