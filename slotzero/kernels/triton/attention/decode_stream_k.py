"""Stream-K decode attention for large batches: all rows end to end, cut into equal shares.

decode.py gives every program one chunk of one row. With many rows there are more programs than run
at once, and the last of them leave most of the card idle. Here a fixed number of programs, as many
as run at once, take equal shares of the sequence of tiles of all rows (a tile: KEYS keys from a
multiple of KEYS on), so all end together, and one loop continues from row to row: while a row ends
and the next one begins, the tiles of the next one are already being loaded.

`plan` computes, once per step, where each share begins. A row within one share is finished there.
For other rows every share stores its part, and the program that finishes last merges them in order,
as in decode.py. The cost of beginning a row is counted as additional tiles. A row of slot 0 is one
tile without keys.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.attention_plans import StreamKPlan
from slotzero.kernels.triton.attention.decode import (
    attend_keys,
    attend_own,
    load_norm,
    load_table,
    merge_chunks,
    norm_and_rotate,
)
from slotzero.kernels.triton.attention.float8 import (
    as_query,
    joined,
    load_kv_scales,
    load_values,
    no_values,
    values_in,
)
from slotzero.kernels.triton.attention.window import first_seen
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    num_processors,
    overlap,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.activation import LOG2E
from slotzero.kernels.types import Angles, Heads, PagedKv, QkNorms

FEWEST_ROWS = 17  # with fewer, every row is cut, and decode.py cuts finer
MOST_SIZE, MOST_GROUP = 512, 16  # key plus value; query heads per KV head
MOST_SHARES = 512  # one row may have all shares, and the plan visits them one by one
FEWEST_SHARES = 0.9  # fraction of the most, if that cuts all rows the same way
SMALLEST = 4  # tiles of a share, at least: few tiles are cut into fewer shares


class StreamKShape(NamedTuple):
    """Launch shape of the stream-K kernel."""

    programs: int  # per multiprocessor, as many as run at once
    keys: int  # per tile
    warps: int
    stages: int
    row_cost: int  # cost of beginning a row, in tiles


@triton.jit
def _lowest(newest, WINDOW: tl.constexpr, CHUNKED: tl.constexpr, KEYS: tl.constexpr):
    """Return the first key of a row's first tile."""
    low = newest * 0
    if WINDOW is not None:
        low = first_seen(newest, WINDOW, CHUNKED) // KEYS * KEYS
    return low


@triton.jit(do_not_specialize=["rows", "num_done", "num_shares", "smallest"])
def _plan_kernel(
    slots, positions, rows, row_of, begin_of, tile_of, slot_of, newest_of, first_of, count_of, done,
    num_done, num_shares, smallest,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, KEYS: tl.constexpr, COST: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the plan, in one program. Never launched with overlap: the kernels after it may read
    the plan without a wait.

    Share i begins at i / shares of the total cost: all tiles, plus COST per row.
    """
    r = tl.arange(0, ROWS)
    slot = tl.load(slots + r, mask=r < rows, other=0)
    position = tl.load(positions + r, mask=r < rows, other=0)
    newest = tl.where(slot > 0, position, 0)
    low = _lowest(newest, WINDOW, CHUNKED, KEYS)
    tiles = tl.where(r < rows, tl.maximum(tl.cdiv(newest - low, KEYS), 1), 0)
    cost = tl.where(r < rows, tiles + COST, 0).to(tl.int64)
    after, tile = tl.cumsum(cost, axis=0), tl.cumsum(tiles, axis=0) - tiles
    before, whole = after - cost, tl.sum(cost, axis=0)
    shares = tl.minimum(num_shares, tl.maximum(whole // smallest, 1))
    # The last shares that begin no later than the row's first tile, and than its last tile.
    first = ((before + COST + 1) * shares - 1) // whole
    last = ((before + COST + tiles) * shares - 1) // whole
    tl.store(slot_of + r, slot, mask=r <= rows)
    tl.store(newest_of + r, newest, mask=r <= rows)
    tl.store(first_of + r, r + first, mask=r < rows)
    tl.store(count_of + r, last - first + 1, mask=r < rows)
    begin, end = tl.cdiv(before * shares, whole), tl.cdiv(after * shares, whole)
    for i in range(tl.max(end - begin, axis=0)):
        mine = begin + i < end
        skip = tl.maximum((begin + i) * whole // shares - before - COST, 0)
        tl.store(row_of + begin + i, r, mask=mine)
        tl.store(begin_of + begin + i, low + skip * KEYS, mask=mine)
        tl.store(tile_of + begin + i, tile + skip, mask=mine)
    lane = tl.arange(0, BLOCK)
    for start in range(0, num_shares + 1, BLOCK):
        unused = (start + lane >= shares) & (start + lane <= num_shares)
        tl.store(tile_of + start + lane, tl.sum(tiles, axis=0), mask=unused)
        tl.store(row_of + start + lane, 0, mask=unused & (start + lane < num_shares))
        tl.store(begin_of + start + lane, 0, mask=unused & (start + lane < num_shares))
    for start in range(0, num_done, BLOCK):
        tl.store(done + start + lane, 0, mask=start + lane < num_done)


@triton.jit
def _load_page(table, key, end, KNOWN: tl.constexpr, PAGE: tl.constexpr):
    page = 0
    if KNOWN:
        page = tl.load(table + key // PAGE, mask=key < end, other=0)
    return page


@triton.jit
def _load_four(table, begin, end, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """Return the page numbers of a tile, at most four, as scalars, which need no layout."""
    a = _load_page(table, begin, end, True, PAGE)
    b = _load_page(table, begin + PAGE, end, KEYS >= 2 * PAGE, PAGE)
    c = _load_page(table, begin + 2 * PAGE, end, KEYS >= 4 * PAGE, PAGE)
    d = _load_page(table, begin + 3 * PAGE, end, KEYS >= 4 * PAGE, PAGE)
    return a, b, c, d


@triton.jit
def _load_tile(
    kv_pages, v_pages, table, p0, p1, p2, p3, begin, known, end, kv_head, half,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr, PAGE: tl.constexpr,
    KEYS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Load keys in two halves, [half, keys] each, and values; zeros if not known."""
    key = tl.arange(0, KEYS)
    size: tl.constexpr = DIM + VALUE_DIM
    if KEYS <= 4 * PAGE:
        part = key // PAGE
        page = tl.where(part == 0, p0, tl.where(part == 1, p1, tl.where(part == 2, p2, p3)))
        page = page.to(tl.int64)
    else:
        page = load_table(table, begin + key, end, PAGE)
    start = page * PAGE
    if PAGE > KEYS:
        start += begin % PAGE
    # Few values differ from tile to tile; the rest is computed once.
    row, beside = start * KV_HEADS + kv_head, key % PAGE * KV_HEADS
    key_at = kv_pages + (row * size)[None, :] + ((beside * size)[None, :] + half[:, None])
    present = known[None, :] & (half < DIM // 2)[:, None]
    a = tl.load(key_at, mask=present, other=0.0)
    b = tl.load(key_at + DIM // 2, mask=present, other=0.0)
    v = load_values(v_pages, row, beside, known, size, VALUE_DIM, WIDTH)
    return a, b, v


@triton.jit
def _begin_row(
    qkv, q_norm, k_norm, sinks, cos, sin, kv_pages, values_at, table, row, slot, newest,
    from_start, kv_head, k_scale, v_scale, qkv_stride, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    SOFTCAP: tl.constexpr, PAGE: tl.constexpr, GROUP: tl.constexpr, HALF: tl.constexpr,
    WIDTH: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr, STORES: tl.constexpr,
):  # fmt: skip
    """Return a row's queries in two halves, and the softmax of its newest position or of no key."""
    group_size: tl.constexpr = HEADS // KV_HEADS
    g, half, dim = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, WIDTH)
    head = kv_head * group_size + g
    in_half = half[None, :] < DIM // 2
    mine = qkv + row.to(tl.int64) * qkv_stride
    q_at = mine + head[:, None] * DIM + half[None, :]
    q_inside = (g < group_size)[:, None] & in_half
    qa = tl.load(q_at, mask=q_inside, other=0.0)
    qb = tl.load(q_at + DIM // 2, mask=q_inside, other=0.0)
    angle = row.to(tl.int64) * (DIM // 2) + half[None, :]
    c, s = (
        tl.load(cos + angle, mask=in_half, other=0.0),
        tl.load(sin + angle, mask=in_half, other=0.0),
    )
    by_qa, by_qb, by_ka, by_kb = 1.0, 1.0, 1.0, 1.0
    if NORM:
        by_qa, by_qb = load_norm(q_norm, half, DIM)
        if STORES:
            by_ka, by_kb = load_norm(k_norm, half, DIM)
    qa, qb = norm_and_rotate(qa, qb, by_qa, by_qb, c, s, eps, DIM, NORM)
    qa, qb = as_query(qa, kv_pages), as_query(qb, kv_pages)
    # Slot 0 gets a key with weight 1 and value 0, so that its result is zeros.
    peak = tl.zeros([GROUP], tl.float32) + tl.where(slot > 0, float("-inf"), 0.0)
    total = tl.zeros([GROUP], tl.float32) + tl.where(slot > 0, 0.0, 1.0)
    acc = no_values(kv_pages, GROUP, WIDTH)
    if from_start & (slot > 0):
        page = tl.load(table + newest // PAGE).to(tl.int64)
        place = ((page * PAGE + newest % PAGE) * KV_HEADS + kv_head) * (DIM + VALUE_DIM)
        k_at, v_at = kv_pages + place, kv_pages + place + values_at
        if STORES:
            k_at, v_at = mine + (HEADS + kv_head) * DIM, mine + (HEADS + KV_HEADS) * DIM
            v_at += kv_head * VALUE_DIM
        ka = tl.load(k_at + half[None, :], mask=in_half, other=0.0)
        kb = tl.load(k_at + DIM // 2 + half[None, :], mask=in_half, other=0.0)
        own_v = tl.load(v_at + dim, mask=dim < VALUE_DIM, other=0.0)
        sink = 0.0
        if sinks is not None:
            sink = tl.load(sinks + head, mask=g < group_size, other=0.0).to(tl.float32) * LOG2E
        peak, total, acc = attend_own(
            qa, qb, ka, kb, own_v, by_ka, by_kb, c, s, sink, kv_pages, values_at, place,
            k_scale, v_scale, eps, scale, GROUP, sinks is not None, DIM, VALUE_DIM, SOFTCAP, HALF,
            WIDTH, NORM, NORM_VALUES, STORES,
        )  # fmt: skip
    return qa, qb, peak, total, acc


@triton.jit
def _store_sums(
    at, acc, real, VALUE_DIM: tl.constexpr, GROUP: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store in two halves: converting to a layout for stores then takes half the shared memory."""
    half: tl.constexpr = WIDTH // 2
    dim = tl.arange(0, half)
    lower, upper = tl.split(tl.permute(tl.reshape(acc, [GROUP, 2, half]), (0, 2, 1)))
    tl.store(at + dim[None, :], lower, mask=real[:, None] & (dim < VALUE_DIM)[None, :])
    inside = real[:, None] & (half + dim < VALUE_DIM)[None, :]
    tl.store(at + half + dim[None, :], upper, mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def _stream_k_kernel(
    qkv, q_norm, k_norm, sinks, cos, sin, kv_pages, page_table, kv_scales, out,
    row_of, begin_of, tile_of, slot_of, newest_of, first_of, count_of, done,
    partial, peak_of, total_of,
    qkv_stride, values_at, table_stride, eps, scale,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    GROUP: tl.constexpr,
    MERGED: tl.constexpr, BATCH: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr,
    KEYS: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr, STORES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    kv_head, share = tl.program_id(0), tl.program_id(1)
    tile, end_tile = tl.load(tile_of + share), tl.load(tile_of + share + 1)
    row, begin = tl.load(row_of + share), tl.load(begin_of + share)
    if tile == end_tile:
        wait_for_writer(PDL)
        return
    slot, newest = tl.load(slot_of + row), tl.load(newest_of + row)
    next_slot, next_newest = tl.load(slot_of + row + 1), tl.load(newest_of + row + 1)
    table = page_table + slot.to(tl.int64) * table_stride
    p0, p1, p2, p3 = _load_four(table, begin, newest, KEYS, PAGE)
    from_start = begin == _lowest(
        newest, WINDOW, CHUNKED, KEYS
    )  # else an earlier share began the row

    group_size: tl.constexpr = HEADS // KV_HEADS
    g, half, dim = tl.arange(0, GROUP), tl.arange(0, HALF), tl.arange(0, WIDTH)
    head = kv_head * group_size + g
    inside = (g < group_size)[:, None] & (dim < VALUE_DIM)[None, :]
    # values_at is DIM, but not a constant for the compiler: see decode.py.
    v_pages, first_row, is_new = values_in(kv_pages, values_at), row, row >= 0
    k_scale, v_scale = load_kv_scales(kv_scales)
    scale *= k_scale * (LOG2E if SOFTCAP is None else 1.0 / SOFTCAP)
    qa = as_query(tl.zeros([GROUP, HALF], qkv.dtype.element_ty), kv_pages)
    qb = qa
    peak = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = no_values(kv_pages, GROUP, WIDTH)
    # The launch sets the stages: set here, the loads of page numbers would become blocking copies.
    for i in range(tile, end_tile):
        key = begin + tl.arange(0, KEYS)
        known = key < newest
        if WINDOW is not None:
            known &= key >= first_seen(newest, WINDOW, CHUNKED)
        a, b, v = _load_tile(
            kv_pages, v_pages, table, p0, p1, p2, p3, begin, known, newest, kv_head, half,
            KV_HEADS, DIM, VALUE_DIM, PAGE, KEYS, WIDTH,
        )  # fmt: skip
        # Everything that the loads of the next tile need, one tile ahead.
        its_row, its_slot, its_newest, its_table = row, slot, newest, table
        is_end = begin + KEYS >= newest
        row += is_end.to(tl.int32)
        lowest = _lowest(next_newest, WINDOW, CHUNKED, KEYS)
        begin = tl.where(is_end, lowest, begin + KEYS)
        slot, newest = tl.where(is_end, next_slot, slot), tl.where(is_end, next_newest, newest)
        table = page_table + slot.to(tl.int64) * table_stride
        p0, p1, p2, p3 = _load_four(table, begin, newest, KEYS, PAGE)
        next_slot, next_newest = tl.load(slot_of + row + 1), tl.load(newest_of + row + 1)

        if is_new:
            wait_for_writer(PDL)  # after the first tiles, which earlier steps have written
            qa, qb, peak, total, acc = _begin_row(
                qkv, q_norm, k_norm, sinks, cos, sin, kv_pages, values_at, its_table, its_row,
                its_slot, its_newest, from_start, kv_head, k_scale, v_scale, qkv_stride, eps, scale,
                HEADS, KV_HEADS, DIM, VALUE_DIM, SOFTCAP, PAGE, GROUP, HALF, WIDTH, NORM,
                NORM_VALUES, STORES,
            )  # fmt: skip
        peak, total, acc = attend_keys(qa, qb, a, b, v, known, scale, peak, total, acc, SOFTCAP)
        if is_end & from_start:
            result = joined(acc, GROUP, WIDTH) * (1.0 / total * v_scale)[:, None]
            result = result.to(out.dtype.element_ty)
            out_row = out + its_row.to(tl.int64) * (HEADS * VALUE_DIM)
            out_at = out_row + head[:, None] * VALUE_DIM + dim[None, :]
            tl.store(out_at, result, mask=inside)
        elif is_end | (i == end_tile - 1):
            flat = (its_row + share) * HEADS + head
            _store_sums(
                partial + flat[:, None] * VALUE_DIM, joined(acc, GROUP, WIDTH), g < group_size,
                VALUE_DIM, GROUP, WIDTH,
            )  # fmt: skip
            tl.store(peak_of + flat, peak, mask=g < group_size)
            tl.store(total_of + flat, total, mask=g < group_size)
        from_start |= is_end
        is_new = is_end

    # Only the first and the last row of a share can have parts in other shares.
    last_row = row - is_new.to(tl.int32)
    for its in range(first_row, last_row + 1, tl.maximum(last_row - first_row, 1)):
        count = tl.load(count_of + its)
        if count > 1:
            tl.debug_barrier()  # all writes of the program, then the count that publishes them
            if tl.atomic_add(done + its * KV_HEADS + kv_head, 1, sem="acq_rel") == count - 1:
                tl.store(done + its * KV_HEADS + kv_head, 0)  # for the next layer
                tl.debug_barrier()
                out_row = out + its * (HEADS * VALUE_DIM)
                merge_chunks(
                    partial, peak_of, total_of, out_row, kv_head, tl.load(first_of + its), count,
                    dim, v_scale, HEADS, VALUE_DIM, group_size, MERGED, WIDTH, BATCH,
                )  # fmt: skip


def takes(rows: int, heads: Heads) -> bool:
    group = heads.num_heads // heads.num_kv_heads
    size = heads.head_dim + heads.value_dim
    return rows >= FEWEST_ROWS and size <= MOST_SIZE and group <= MOST_GROUP


def plan(slots: Tensor, positions: Tensor, heads: Heads) -> StreamKPlan:
    rows, kv_heads = len(slots), heads.num_kv_heads
    shape = shape_for(heads)
    most = min(shape.programs * num_processors() // kv_heads, MOST_SHARES)
    shares = _shares(rows, max(1, most))
    row, begin, tile = slots.new_empty(3, shares + 1).unbind()
    slot, newest, first, num = slots.new_empty(4, rows + 1).unbind()
    done, parts = slots.new_empty(rows, kv_heads), rows + shares
    partial = torch.empty(parts, heads.num_heads, heads.value_dim, device=slots.device)
    peak, total = torch.empty(2, parts, heads.num_heads, device=slots.device).unbind()
    made = StreamKPlan(
        row[:-1], begin[:-1], tile, slot, newest, first, num, done, partial, peak, total
    )
    launch(
        _plan_kernel, (1,), slots, positions, rows, *made[:8], rows * kv_heads, shares, SMALLEST,
        WINDOW=heads.window, CHUNKED=heads.is_chunked, KEYS=shape.keys, COST=shape.row_cost,
        ROWS=max(256, triton.next_power_of_2(rows + 1)), BLOCK=1024,
    )  # fmt: skip
    return made


def attend(
    qkv: Tensor,
    norms: QkNorms,
    sinks: Tensor | None,
    angles: Angles,
    kv: PagedKv,
    plan: StreamKPlan,
    heads: Heads,
) -> Tensor:
    dim, value_dim, kv_heads = heads.head_dim, heads.value_dim, heads.num_kv_heads
    out = qkv.new_empty(len(qkv), heads.out_size)
    group = triton.next_power_of_2(heads.num_heads // kv_heads)
    width = max(32, triton.next_power_of_2(value_dim))
    shape = shape_for(heads)
    warps = min(8, shape.warps * (4 if qkv.dtype.itemsize > 2 else 1))
    stages = shape.stages + (kv.scales is not None)  # in FP8 two tiles have the bytes of one
    launch(
        _stream_k_kernel, (kv_heads, len(plan.row)),
        qkv, *norms, sinks, *angles, *kv, out, *plan,
        qkv.stride(0), dim, kv.page_table.stride(0), heads.norm_eps, heads.scale,
        HEADS=heads.num_heads, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
        WINDOW=heads.window, CHUNKED=heads.is_chunked, SOFTCAP=heads.softcap,
        PAGE=kv.pages.shape[1], GROUP=max(16, group), MERGED=group,
        BATCH=max(1, min(16, 2048 * warps // (group * width))),
        HALF=max(16, triton.next_power_of_2(dim // 2)), WIDTH=width, KEYS=shape.keys,
        NORM=norms.q is not None, NORM_VALUES=heads.norms_values and heads.stores,
        STORES=heads.stores, num_warps=warps, num_stages=stages, **overlap(),
    )  # fmt: skip
    return out


def _shares(rows: int, most: int) -> int:
    """Return the number of shares: close to `most`, and if possible one that cuts all rows of equal
    length in the same places, or not at all."""
    alike = most // rows * rows if rows <= most else triton.cdiv(rows, triton.cdiv(rows, most))
    return alike if alike >= FEWEST_SHARES * most else most


def shape_for(heads: Heads) -> StreamKShape:
    """Return the launch shape, see benchmarks/h200.

    It depends on the heads alone, since a plan does not know the dtype of the KV cache. The shapes
    are tuned for 16 bits; with 32, fewer programs run at once.
    """
    size = heads.head_dim + heads.value_dim
    if size > 256:
        return StreamKShape(programs=2, keys=32, warps=4, stages=3, row_cost=2)
    if size > 128:
        return StreamKShape(programs=8, keys=32, warps=1, stages=2, row_cost=4)
    return StreamKShape(programs=8, keys=32, warps=1, stages=3, row_cost=2)
