"""Paged attention of uniform rows: a few new tokens behind a stored context, as in a verify pass.

Row r is tokens [r * span, (r + 1) * span): the real ones are stored one after another from the
row's start on, the rest is padding, slot 0. This is decode.py with more queries: a program takes
all (token, head of the group) pairs of a row and KV head, so that the context is read once for all
of them; if a tile does not hold them all, several programs share them. The plan is decode's too,
made for each row's first token: keys before the start are cut into chunks, and the program with the
newest chunk takes the row's own keys from `qkv`, norms, rotates and stores them, and attends to
them without reading them back; layers that do not store read them from the pages. With a window a
chunk may hold no key that a later token sees; it then leaves the token's softmax unchanged.

With branches a row is a tree, or new nodes of one: the tree may have begun before the row's start,
so bits select both stored and own keys. No token has a position before that of its row's first.

Padding stores nothing, gets zeros and is never read. Nor is a key that was not stored, or that no
token sees.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.attention_plans import DecodePlan, VerifyPlan
from slotzero.kernels.triton.attention.decode import (
    apply_softcap,
    load_norm,
    load_pages,
    load_table,
    norm_and_rotate,
    norm_values,
    plan_kernel,
)
from slotzero.kernels.triton.attention.float8 import (
    add_values,
    as_query,
    as_stored,
    in_pairs,
    joined,
    load_kv_scales,
    no_values,
    numbers,
    values_in,
)
from slotzero.kernels.triton.attention.tree_mask import load_branches, sees, union_of
from slotzero.kernels.triton.attention.window import first_seen
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.activation import LOG2E
from slotzero.kernels.types import NO_BRANCHES, Angles, Branches, Heads, PagedKv, QkNorms, Rows

MAX_PAIRS = 128  # (token, head of the group) pairs of a row and KV head that a tile holds
LARGE_PAIRS = 32  # for head sizes above 256, whose sums would fill all registers
MAX_PARTS = 4  # tiles of a row; each of them reads the context
FEW_ROWS = 8  # up to here, own keys are a chunk of their own: more but shorter programs
MERGED_PAIRS = 16  # at a time


@triton.jit
def load_halves(source, apart, real, half, DIM: tl.constexpr):
    """Load rows in two halves, [rows, half] each; zeros where a row is not real."""
    at = source[:, None] + half[None, :]
    inside = real[:, None] & (half < DIM // 2)[None, :]
    return tl.load(at, mask=inside, other=0.0), tl.load(at + apart, mask=inside, other=0.0)


@triton.jit
def load_angles(cos, sin, token, real, half, DIM: tl.constexpr):
    at = token[:, None] * (DIM // 2) + half[None, :]
    inside = real[:, None] & (half < DIM // 2)[None, :]
    return tl.load(cos + at, mask=inside, other=0.0), tl.load(sin + at, mask=inside, other=0.0)


@triton.jit
def _in_window(key, end, query_position, WINDOW: tl.constexpr, CHUNKED: tl.constexpr):
    """Return which keys before `end` are in the window of each pair's token, [pairs or 1, keys]."""
    seen = (key < end)[None, :]
    if WINDOW is not None:
        seen = seen & (key[None, :] >= first_seen(query_position, WINDOW, CHUNKED)[:, None])
    return seen


@triton.jit
def softmax_level(peak):
    """Return what to subtract from scores: 0 instead of -inf for a softmax without keys so far."""
    return tl.where(peak == float("-inf"), 0.0, peak)


@triton.jit
def _attend_keys(
    qa, qb, a, b, v, seen, key, past, tree, scale, peak, total, acc,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Add one tile of keys before `past` to the running softmax, as in decode.py. Each pair sees
    the keys that `seen` and its branch allow."""
    a, b = numbers(a, qa.dtype), numbers(b, qa.dtype)
    score = tl.dot(qa, a, input_precision="ieee")
    score = apply_softcap(tl.dot(qb, b, score, input_precision="ieee") * scale, SOFTCAP)
    score = tl.where(seen, score, float("-inf"))
    if tree is not None:
        tree_start, base, bits = tree
        if past > tree_start:
            mine = sees(key[None, :], base[:, None], bits[:, None])
            score = tl.where(mine, score, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(score, axis=1))
    level = new_peak
    if WINDOW is not None or tree is not None:
        level = softmax_level(new_peak)
    weight = tl.exp2(score - level[:, None])
    shrink = tl.exp2(peak - level)
    total = total * shrink + tl.sum(weight, axis=1)
    acc = add_values(acc, shrink, weight, v, qa.dtype)
    return new_peak, total, acc


@triton.jit
def _merge(
    partial, peak_of, total_of, out, row, kv_head, first, count, begin, end, num_real, dim,
    v_scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, SPAN: tl.constexpr,
    MERGED: tl.constexpr, WIDTH: tl.constexpr, BATCH: tl.constexpr,
):  # fmt: skip
    """Merge all chunks of a row, in order, a batch at a time, as in decode.py, for tokens
    [begin, end), a few pairs at a time. Padding has no results and gets zeros."""
    group: tl.constexpr = HEADS // KV_HEADS
    lane = tl.arange(0, BATCH)
    its = (first.to(tl.int64) * KV_HEADS + kv_head) * (SPAN * group)
    partial, peak_of, total_of = partial + its * VALUE_DIM, peak_of + its, total_of + its
    for some in range(begin * group, end * group, MERGED):
        pair = some + tl.arange(0, MERGED)
        place, head = pair // group, kv_head * group + pair % group
        real = place < tl.minimum(num_real, end)
        peak = tl.full([MERGED], float("-inf"), tl.float32)
        total = tl.zeros([MERGED], tl.float32)
        acc = tl.zeros([MERGED, WIDTH], tl.float32)
        for start in range(0, count, BATCH):
            known = real[:, None] & (start + lane < count)[None, :]
            at = pair[:, None] + (start + lane)[None, :] * (SPAN * HEADS)
            its_peak = tl.load(peak_of + at, mask=known, other=float("-inf"))
            its_total = tl.load(total_of + at, mask=known, other=0.0)
            its_at = partial + at[:, :, None] * VALUE_DIM + dim[None, None, :]
            inside = known[:, :, None] & (dim < VALUE_DIM)[None, None, :]
            its_acc = tl.load(its_at, mask=inside, other=0.0)
            new_peak = tl.maximum(peak, tl.max(its_peak, axis=1))
            level = softmax_level(new_peak)
            old, new = tl.exp2(peak - level), tl.exp2(its_peak - level[:, None])
            total = total * old + tl.sum(its_total * new, axis=1)
            acc = acc * old[:, None] + tl.sum(its_acc * new[:, :, None], axis=1)
            peak = new_peak
        result = (acc / tl.where(real, total, 1.0)[:, None] * v_scale).to(out.dtype.element_ty)
        out_at = out + ((row * SPAN + place) * HEADS + head)[:, None] * VALUE_DIM + dim[None, :]
        inside = (place < end)[:, None] & (dim < VALUE_DIM)[None, :]
        tl.store(out_at, result, mask=inside)


@triton.jit(do_not_specialize=["table_stride", "starts"])
def _verify_kernel(
    qkv, q_norm, k_norm, sinks, cos, sin, kv_pages, page_table, kv_scales, out, starts, token_slots,
    row_of, slot_of, begin_of, end_of, first_of, count_of, done, partial, peak_of, total_of,
    bases, bits_seen, query_positions, qkv_stride, values_at, table_stride, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    SPAN: tl.constexpr,
    PARTS: tl.constexpr, TOKENS: tl.constexpr, PAIRS: tl.constexpr, OWN: tl.constexpr,
    MERGED: tl.constexpr, BATCH: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, NORM: tl.constexpr,
    NORM_VALUES: tl.constexpr, STORES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    kv_head, part, chunk = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS, tl.program_id(1)
    row, slot = tl.load(row_of + chunk), tl.load(slot_of + chunk).to(tl.int64)
    begin, end = tl.load(begin_of + chunk), tl.load(end_of + chunk)
    first, count = tl.load(first_of + chunk), tl.load(count_of + chunk)
    if row < 0:
        wait_for_writer(PDL)
        return
    is_last = chunk == first + count - 1
    group: tl.constexpr = HEADS // KV_HEADS
    # The program has tokens [first_place, last_place) of the row.
    first_place, last_place = part * TOKENS, tl.minimum((part + 1) * TOKENS, SPAN)
    pair, own = first_place * group + tl.arange(0, PAIRS), tl.arange(0, OWN)
    half, dim = tl.arange(0, HALF), tl.arange(0, WIDTH)
    place, head = pair // group, kv_head * group + pair % group  # place: index in the row
    # values_at is DIM, but not a constant for the compiler, which would cost registers.
    v_pages, table = values_in(kv_pages, values_at), page_table + slot * table_stride
    stored = end - is_last.to(tl.int32)  # the first token's own key is not in the pages

    # Constants and keys stored by earlier steps are loaded before the query is known.
    key = begin + tl.arange(0, KEYS)
    page = load_table(table, key, stored, PAGE)
    if EARLY:
        a, b, v = load_pages(
            kv_pages, v_pages, page, kv_head, key, key < stored, half,
            KV_HEADS, DIM, VALUE_DIM, PAGE, WIDTH,
        )  # fmt: skip
    start, row64 = tl.load(starts + row), row.to(tl.int64)
    their_slots = tl.load(token_slots + row64 * SPAN + own, mask=own < SPAN, other=0)
    num_real = tl.sum((their_slots > 0).to(tl.int32), axis=0)
    real, is_own = place < tl.minimum(num_real, last_place), own < tl.where(is_last, num_real, 0)
    query_position, tree = start + place, None
    if bits_seen is not None:
        its = row64 * SPAN + place
        base, bits = load_branches(bases, bits_seen, its, start + place, real)
        # All tokens see all keys before the first tree.
        tree_start = tl.min(tl.where(real, base, start), axis=0)
        last_base, any_bits = union_of(base, bits)
        tree = (tree_start, base, bits)
        if WINDOW is not None:
            query_position = tl.load(query_positions + its, mask=real, other=0)
    new_page = tl.load(table + (start + own) // PAGE, mask=is_own, other=0).to(tl.int64)
    at = ((new_page * PAGE + (start + own) % PAGE) * KV_HEADS + kv_head) * (DIM + VALUE_DIM)
    by_qa, by_qb, by_ka, by_kb = 1.0, 1.0, 1.0, 1.0
    if NORM:
        by_qa, by_qb = load_norm(q_norm, half, DIM)
        if STORES:
            by_ka, by_kb = load_norm(k_norm, half, DIM)
    k_scale, v_scale = load_kv_scales(kv_scales)
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    acc = no_values(kv_pages, PAIRS, WIDTH)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32) * LOG2E
        peak, total = tl.where(is_last, sink, peak), tl.where(is_last, 1.0, total)
    wait_for_writer(PDL)

    token, own_token = row64 * SPAN + place, row64 * SPAN + own
    inside = (place < last_place)[:, None] & (dim < VALUE_DIM)[None, :]
    out_at = out + (token * HEADS + head)[:, None] * VALUE_DIM + dim[None, :]
    if num_real <= first_place:
        tl.store(out_at, tl.zeros([PAIRS, WIDTH], out.dtype.element_ty), mask=inside)
        return
    q_at = qkv + token * qkv_stride + head * DIM
    qa, qb = load_halves(q_at, DIM // 2, real, half, DIM)
    k_at = kv_pages + at
    if STORES:
        k_at = qkv + own_token * qkv_stride + (HEADS + kv_head) * DIM
    ka, kb = load_halves(k_at, DIM // 2, is_own, half, DIM)
    v_at = kv_pages + at + values_at
    if STORES:
        v_at = qkv + own_token * qkv_stride + (HEADS + KV_HEADS) * DIM + kv_head * VALUE_DIM
    own_inside = is_own[:, None] & (dim < VALUE_DIM)[None, :]
    own_v = tl.load(v_at[:, None] + dim[None, :], mask=own_inside, other=0.0)
    c, s = load_angles(cos, sin, token, real, half, DIM)
    if STORES:
        own_c, own_s = load_angles(cos, sin, own_token, is_own, half, DIM)

    qa, qb = norm_and_rotate(qa, qb, by_qa, by_qb, c, s, eps, DIM, NORM)
    qa, qb = as_query(qa, kv_pages), as_query(qb, kv_pages)
    scale *= k_scale * (LOG2E if SOFTCAP is None else 1.0 / SOFTCAP)
    if is_last:
        if NORM_VALUES:
            own_v = norm_values(own_v, eps, VALUE_DIM)
        if STORES:
            ka, kb = norm_and_rotate(ka, kb, by_ka, by_kb, own_c, own_s, eps, DIM, NORM)
            new_a, new_b = as_stored(ka, k_scale, kv_pages), as_stored(kb, k_scale, kv_pages)
            new_v = as_stored(own_v, v_scale, kv_pages)
            is_mine = own < tl.where(part == 0, num_real, 0)  # to store
            stored_half = is_mine[:, None] & (half < DIM // 2)[None, :]
            tl.store(kv_pages + at[:, None] + half[None, :], new_a, mask=stored_half)
            tl.store(kv_pages + at[:, None] + DIM // 2 + half[None, :], new_b, mask=stored_half)
            mine = is_mine[:, None] & (dim < VALUE_DIM)[None, :]
            tl.store(kv_pages + values_at + at[:, None] + dim[None, :], new_v, mask=mine)
        else:
            new_a, new_b, new_v = ka, kb, own_v
        seen = _in_window(start + own, start + num_real, query_position, WINDOW, CHUNKED)
        if tree is None:
            seen = seen & (own[None, :] <= place[:, None])
        peak, total, acc = _attend_keys(
            qa, qb, new_a.T, new_b.T, in_pairs(new_v, OWN, WIDTH), seen, start + own, start + OWN,
            tree, scale, peak, total, acc, WINDOW, SOFTCAP,
        )  # fmt: skip

    begin_loop = begin
    if EARLY:
        begin_loop += KEYS
        if begin < stored:
            seen = _in_window(key, stored, query_position, WINDOW, CHUNKED)
            peak, total, acc = _attend_keys(
                qa, qb, a, b, v, seen, key, begin + KEYS, tree, scale,
                peak, total, acc, WINDOW, SOFTCAP,
            )  # fmt: skip
    for tile in tl.range(begin_loop, stored, KEYS, num_stages=STAGES):
        key = tile + tl.arange(0, KEYS)
        if EARLY:  # the compiler pipelines this form better in short loops
            page = load_table(table, key, stored, PAGE)
        known = key < stored
        if tree is not None:
            known = known & sees(key, last_base, any_bits)
        a, b, v = load_pages(
            kv_pages, v_pages, page, kv_head, key, known, half,
            KV_HEADS, DIM, VALUE_DIM, PAGE, WIDTH,
        )  # fmt: skip
        if not EARLY:
            page = load_table(table, key + KEYS, stored, PAGE)  # one tile ahead
        seen = _in_window(key, stored, query_position, WINDOW, CHUNKED)
        peak, total, acc = _attend_keys(
            qa, qb, a, b, v, seen, key, tile + KEYS, tree, scale,
            peak, total, acc, WINDOW, SOFTCAP,
        )  # fmt: skip

    acc = joined(acc, PAIRS, WIDTH)
    if count == 1:
        result = tl.where(real[:, None], acc / total[:, None] * v_scale, 0.0)
        tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)
        return

    flat = (chunk.to(tl.int64) * KV_HEADS + kv_head) * (SPAN * group) + pair
    known = real[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(partial + flat[:, None] * VALUE_DIM + dim[None, :], acc, mask=known)
    tl.store(peak_of + flat, peak, mask=real)
    tl.store(total_of + flat, total, mask=real)
    tl.debug_barrier()  # all writes of the program, then the count that publishes them
    done += row * (KV_HEADS * PARTS) + tl.program_id(0)
    if tl.atomic_add(done, 1, sem="acq_rel") == count - 1:
        tl.store(done, 0)  # for the next layer
        tl.debug_barrier()
        _merge(
            partial, peak_of, total_of, out, row64, kv_head, first, count,
            first_place, last_place, num_real, dim, v_scale,
            HEADS, KV_HEADS, VALUE_DIM, SPAN, MERGED, WIDTH, BATCH,
        )  # fmt: skip


def takes(span: int, heads: Heads) -> bool:
    """Return whether rows of `span` tokens fit these tiles on this card."""
    most = tile_tokens(heads)
    return most > 0 and 0 < span <= MAX_PARTS * most


def tile_tokens(heads: Heads) -> int:
    """Return the largest number of a row's tokens whose pairs one tile holds."""
    size = padded_rows(max(heads.head_dim, heads.value_dim), 32)
    # Shared memory holds at most all queries in float32, and the keys and values loaded ahead.
    pairs = MAX_PAIRS if size <= 256 else LARGE_PAIRS
    while 4 * pairs * size + (64 << 10) > shared_memory() and pairs > 16:
        pairs //= 2
    return pairs // (heads.num_heads // heads.num_kv_heads)


def plan(
    token_slots: Tensor,
    rows: Rows,
    heads: Heads,
    branches: Branches | None = None,
) -> VerifyPlan:
    num_rows, kv_heads, pairs = len(rows.slots), heads.num_kv_heads, _pairs(rows.span, heads)
    parts, tokens = _cut(rows.span, heads)
    spare, smallest, splits_newest = cut_for(num_rows, kv_heads * parts, _pairs(tokens, heads))
    num_chunks = num_rows * (1 + splits_newest) + spare
    num_chunks += -num_chunks % 4  # the parts of one allocation are aligned
    ints = rows.slots.new_empty(6, num_chunks)
    done = rows.slots.new_empty(num_rows, kv_heads * parts)
    floats = torch.empty(2, num_chunks, kv_heads, pairs, device=done.device)
    partial = torch.empty(num_chunks, kv_heads, pairs, heads.value_dim, device=done.device)
    row, slot, begin, end, first, num = ints.unbind()
    chunks = DecodePlan(row, slot, begin, end, first, num, done, partial, *floats.unbind())
    query_positions, far = (rows.starts, 1) if branches is None else (branches.positions, rows.span)
    launch(
        plan_kernel, (1,), rows.slots, rows.starts, query_positions, num_rows, *chunks[:7],
        done.numel(), num_chunks, spare, smallest,
        WINDOW=heads.window, CHUNKED=heads.is_chunked, SPAN=far, SPLIT_NEWEST=splits_newest,
        MAY_BE_EMPTY=False, ROWS=padded_rows(num_rows, 256), BLOCK=1024,
    )  # fmt: skip
    return VerifyPlan(rows.starts, token_slots, chunks, branches)


def attend(
    qkv: Tensor,
    norms: QkNorms,
    sinks: Tensor | None,
    angles: Angles,
    kv: PagedKv,
    plan: VerifyPlan,
    heads: Heads,
) -> Tensor:
    span, num_chunks = len(qkv) // len(plan.starts), len(plan.chunks.row)
    parts, tokens = _cut(span, heads)
    dim, value_dim, kv_heads = heads.head_dim, heads.value_dim, heads.num_kv_heads
    out = qkv.new_empty(len(qkv), heads.out_size)
    pairs, width = padded_rows(_pairs(tokens, heads), 16), padded_rows(value_dim, 32)
    keys, warps, stages, early = shape_for(pairs, qkv.dtype.itemsize, dim + value_dim)
    launch(
        _verify_kernel, (kv_heads * parts, num_chunks),
        qkv, *norms, sinks, *angles, *kv, out, plan.starts, plan.token_slots,
        *plan.chunks, *(plan.branches or NO_BRANCHES),
        qkv.stride(0), dim, kv.page_table.stride(0), heads.norm_eps, heads.scale,
        HEADS=heads.num_heads, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
        WINDOW=heads.window, CHUNKED=heads.is_chunked, SOFTCAP=heads.softcap,
        PAGE=kv.pages.shape[1], SPAN=span, PARTS=parts, TOKENS=tokens, PAIRS=pairs,
        OWN=padded_rows(span, 16), MERGED=MERGED_PAIRS,
        BATCH=max(1, min(16, 2048 * warps // (MERGED_PAIRS * width))),
        HALF=padded_rows(dim // 2, 16), WIDTH=width, KEYS=keys, STAGES=stages,
        EARLY=early and plan.branches is None,  # a tree's bits are known too late
        NORM=norms.q is not None, NORM_VALUES=heads.norms_values and heads.stores,
        STORES=heads.stores, num_warps=warps, **overlap(),
    )  # fmt: skip
    return out


def cut_for(rows: int, kv_heads: int, pairs: int) -> tuple[int, int, bool]:
    """Return chunks beyond one per row, the minimum keys of one, and whether to split the newest.

    Contexts are spread over 512 programs, as in a small decode batch. But a single program merges a
    row and reads all pairs of its chunks: the more pairs, the fewer and longer chunks pay off.
    """
    most = max(16, 512 // pairs) * rows
    spare = max(rows, min(triton.cdiv(512, kv_heads) - rows, most))
    smallest = 256 if rows > 64 else max(64, 2 * padded_rows(pairs, 16))
    return spare, smallest, rows <= FEW_ROWS


def shape_for(pairs: int, itemsize: int, size: int) -> tuple[int, int, int, bool]:
    """Return keys per tile, warps, stages, and whether to load a tile early.

    With more than two stages, the compiler waits for one load after another unless a tile was
    loaded early. `size` is that of a key plus its value. Queries and their sums are distributed
    over the threads: more pairs use more threads, so that no register spills; with 128 pairs of
    head size 256, or 32 of 512, some do, once per program.
    """
    if itemsize > 2:  # scalar multiply-adds, for exactness rather than speed
        return 16, 8, 2, False
    if size > 256:
        return 32, 8, 2, False
    if pairs > 32:
        return 64, 4 if pairs <= 64 else 8, 2, False
    return 64, 4, 2, pairs <= 16


def _cut(span: int, heads: Heads) -> tuple[int, int]:
    """Return the number of tiles of a row, and of tokens per tile."""
    parts = triton.cdiv(span, tile_tokens(heads))
    return parts, triton.cdiv(span, parts)


def _pairs(span: int, heads: Heads) -> int:
    return span * (heads.num_heads // heads.num_kv_heads)


def padded_rows(size: int, least: int) -> int:
    return max(least, int(triton.next_power_of_2(size)))
