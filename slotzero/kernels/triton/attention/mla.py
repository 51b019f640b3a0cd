"""Paged multi-head latent attention (MLA) in absorbed form: a token's stored row is the key of all
heads, and the latent at its end is their value.

A per-head product (up_k) maps queries into the latent space, and another (up_v) maps results back;
between them all heads of a token read the same rows. So a program takes as many (token, head) pairs
of one row of the step as its tile holds, loads a tile of stored rows once for all of them, and uses
it both as keys and as values. Uniform rows are taken as they are, with one token each in a decode
step; ragged rows are cut into blocks by prefill's plan, and a block is a row.

The rows are stored before attention, so a token's own key is like any other. The grid of a graph
size is fixed, and decode's plan distributes it: keys up to a row's first token are cut into chunks
of one common size, and the last chunk also has the keys of the row's other tokens. The results of
rows with several chunks are merged, in order, by a second kernel: they are so large that a single
program could not read those of a long row in time, so it uses as many programs as the row has
chunks.

Only `mla_attention` knows the products. In a step whose rows may be long, only keys before a row's
first token are attended to in absorbed form, and the row's own keys in expanded form: see
mla_prefill.py.

Padding stores nothing, gets zeros and is never read. Nor is a key that was not stored, or that no
token sees.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.attention_plans import AttentionPlan, MlaPlan
from slotzero.kernels.triton.attention import mla_prefill
from slotzero.kernels.triton.attention.float8 import (
    as_query,
    load_kv_scales,
    numbers,
    split_pairs,
    values_in,
)
from slotzero.kernels.triton.attention.mla_plan import MAX_PAIRS
from slotzero.kernels.triton.attention.mla_rows import store
from slotzero.kernels.triton.attention.per_head import per_head
from slotzero.kernels.triton.attention.tree_mask import load_branches, sees, union_of
from slotzero.kernels.triton.attention.verify import padded_rows, softmax_level
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.activation import LOG2E
from slotzero.kernels.types import Angles, Heads, IndexInputs, MlaShape, MlaWeights, PagedKv, Tokens

MAX_LATENT, MAX_ROPE_DIM = 512, 64  # what the tiles hold, for any number of heads
MOST_PAGES = tl.constexpr(8)  # of a tile, if every thread is to hold their numbers
MERGED_PAIRS, MERGED_TILE, MERGED_CHUNKS = 8, 2, 4  # per group; at a time; per batch


class MlaTile(NamedTuple):
    pairs: int
    keys: int
    ahead: int  # tiles that are loaded ahead of their use
    warps: int

    def num_bytes(self, size: int, itemsize: int) -> int:
        """Return the shared memory needed: queries, stored rows, softmax weights."""
        rows = self.pairs + self.ahead * self.keys
        return (rows * size + self.pairs * self.keys) * itemsize + 512


@triton.jit(do_not_specialize=["table_stride", "span", "parts"])
def _attend_kernel(
    query, kv_pages, page_table, kv_scales, out, token_slots, starts, firsts, sizes,
    row_of, slot_of, begin_of, end_of, first_of, count_of, partial, peak_of, total_of,
    bases, bits_seen, sums, table_stride, span, parts, scale,
    HEADS: tl.constexpr, ROPE_DIM: tl.constexpr, LATENT: tl.constexpr, PAGE: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, ROPE_BLOCK: tl.constexpr, WIDTH: tl.constexpr,
    RUN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute some pairs of a row over one chunk. RUN consecutive keys are in one page.

    The plan, slots and the first page numbers are read before the wait: the plan's kernel is never
    launched with overlap, and it runs after everything that it is derived from."""
    may_follow(PDL)
    part, chunk = tl.program_id(0) % parts, tl.program_id(0) // parts
    row, slot = tl.load(row_of + chunk), tl.load(slot_of + chunk).to(tl.int64)
    begin, end = tl.load(begin_of + chunk), tl.load(end_of + chunk)
    first, count = tl.load(first_of + chunk), tl.load(count_of + chunk)
    if row < 0:
        wait_for_writer(PDL)
        return
    token, size, start = row.to(tl.int64) * span, span, tl.load(starts + row)
    if firsts is not None:
        token, size = tl.load(firsts + row).to(tl.int64), tl.load(sizes + row)
        if part * PAIRS >= size * HEADS:
            wait_for_writer(PDL)
            return
    pair, rope = part * PAIRS + tl.arange(0, PAIRS), tl.arange(0, ROPE_BLOCK)
    low, high = _halves(kv_pages, WIDTH)  # of the latent, which is taken in two halves: see below
    place = pair // HEADS  # index of the token in its row
    inside = place < size
    real = tl.load(token_slots + token + place, mask=inside, other=0) > 0
    newest = start + place  # the last key that a pair may see
    if sums is not None:
        newest = start + tl.zeros_like(place)
    length = tl.max(tl.where(real, newest + 1, 0), axis=0)
    end = tl.where(chunk == first + count - 1, length, tl.minimum(end, length))
    if bits_seen is not None:
        base, bits = load_branches(bases, bits_seen, token + place, newest, real)
        tree_start = tl.min(tl.where(real, base, length), axis=0)  # all pairs see all keys before
        last_base, any_bits = union_of(base, bits)
    table = page_table + slot * table_stride
    holds_pages: tl.constexpr = KEYS // RUN <= MOST_PAGES
    if holds_pages:
        pages = _load_pages(table, begin, end, KEYS, RUN, PAGE)
        next_pages = _load_pages(table, begin + KEYS, end, KEYS, RUN, PAGE)
    wait_for_writer(PDL)
    if sums is not None:  # noqa: SIM102  decided at compile time
        if begin >= end:
            nothing = tl.full([PAIRS], float("-inf"), tl.float32)
            tl.store(sums + token * HEADS + pair, nothing, mask=inside)
            return

    q_at = query + (token * HEADS + pair)[:, None] * (ROPE_DIM + LATENT)
    q_rope = as_query(_load_rows(q_at, rope, real, ROPE_DIM), kv_pages)
    q_low = as_query(_load_rows(q_at + ROPE_DIM, low, real, LATENT), kv_pages)
    q_high = as_query(_load_rows(q_at + ROPE_DIM, high, real, LATENT), kv_pages)
    k_scale, v_scale = load_kv_scales(kv_scales, MLA=True)
    scale *= k_scale

    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    totals = tl.zeros([PAIRS, KEYS], tl.float32)  # summed at the end: sums across warps are slow
    acc_low = tl.zeros([PAIRS, WIDTH // 2], tl.float32)
    acc_high = acc_low
    # The rows of AHEAD tiles are loaded ahead of their use, and the page numbers of each tile two
    # tiles before its rows. With few pairs the scores are two sums, between which matrix units
    # alternate: one sum would be a chain of additions that takes longer than loading the rows. Each
    # is scaled separately, because the compiler would make one chain of a plain sum again.
    for tile in tl.range(begin, end, KEYS, num_stages=AHEAD + 1):
        key = tile + tl.arange(0, KEYS)
        known = key < end
        if bits_seen is not None:
            known = known & sees(key, last_base, any_bits)
        if holds_pages:
            page = tl.zeros([KEYS], tl.int32)
            for i in tl.static_range(KEYS // RUN):
                page = tl.where(tl.arange(0, KEYS) // RUN == i, pages[i], page)
            pages = _copied(next_pages, KEYS // RUN)
            next_pages = _load_pages(table, tile + 2 * KEYS, end, KEYS, RUN, PAGE)
        else:
            page = tl.load(table + key // PAGE, mask=key < end, other=0)
        at = (page * PAGE + key % PAGE).to(tl.int64)
        stored = kv_pages + (at * (ROPE_DIM + LATENT))[:, None]
        k_rope = numbers(_load_rows(stored, rope, known, ROPE_DIM), q_rope.dtype)
        k_low, k_high = _load_latents(kv_pages, at, known, q_low.dtype, ROPE_DIM, LATENT, WIDTH)
        score = tl.dot(q_rope, k_rope.T, input_precision="ieee")
        score = tl.dot(q_low, k_low.T, score, input_precision="ieee")
        if PAIRS > 16:
            score = tl.dot(q_high, k_high.T, score, input_precision="ieee") * scale
        else:
            score = score * scale + tl.dot(q_high, k_high.T, input_precision="ieee") * scale
        if bits_seen is None:
            score = tl.where(key[None, :] <= newest[:, None], score, float("-inf"))
        elif tile + KEYS > tree_start:
            mine = sees(key[None, :], base[:, None], bits[:, None])
            score = tl.where(mine, score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1))
        level = new_peak
        if bits_seen is not None:
            level = softmax_level(new_peak)
        weight = tl.exp2(score - level[:, None])
        shrink = tl.exp2(peak - level)
        totals = totals * shrink[:, None] + weight
        weight = weight.to(k_low.dtype)
        acc_low = tl.dot(weight, k_low, acc_low * shrink[:, None], input_precision="ieee")
        acc_high = tl.dot(weight, k_high, acc_high * shrink[:, None], input_precision="ieee")
        peak = new_peak

    total = tl.sum(totals, axis=1)
    if count == 1:
        flat = token * HEADS + pair
        acc_low = tl.where(real[:, None], acc_low / total[:, None] * v_scale, 0.0)
        acc_high = tl.where(real[:, None], acc_high / total[:, None] * v_scale, 0.0)
        _store_pairs(out, flat, low, acc_low, inside, LATENT)
        _store_pairs(out, flat, high, acc_high, inside, LATENT)
        if sums is not None:
            tl.store(sums + token * HEADS + pair, peak + tl.log2(total), mask=real)
        return
    flat = _partial_of(chunk, first, row) * (span * HEADS) + pair
    _store_pairs(partial, flat, low, acc_low, real, LATENT)
    _store_pairs(partial, flat, high, acc_high, real, LATENT)
    tl.store(peak_of + flat, peak, mask=real)
    tl.store(total_of + flat, total, mask=real)


@triton.jit
def _load_pages(table, first, end, KEYS: tl.constexpr, RUN: tl.constexpr, PAGE: tl.constexpr):
    """Return the page numbers of KEYS keys, RUN of which share a page: scalars without layout."""
    pages = ()
    for i in tl.static_range(0, KEYS, RUN):
        page = tl.load(table + (first + i) // PAGE, mask=first + i < end, other=0)
        pages += (page,)  # type: ignore[assignment]
    return pages


@triton.jit
def _copied(pages, NUM: tl.constexpr):
    """Copy the values: the compiler does not pipeline a loop that passes on its own arguments."""
    made = ()
    for i in tl.static_range(NUM):
        made += (tl.maximum(pages[i], 0),)  # type: ignore[assignment]
    return made


@triton.jit
def _load_rows(at, dim, known, SIZE: tl.constexpr):
    """Load [rows, dim]: zeros past SIZE, and for rows that are not known."""
    return tl.load(at + dim[None, :], mask=known[:, None] & (dim < SIZE)[None, :], other=0)


@triton.jit
def _halves(kv_pages, WIDTH: tl.constexpr):
    """Return the dimensions in each half of a latent: of codes, which are read in pairs, the even
    and the odd ones."""
    half = tl.arange(0, WIDTH // 2)
    if kv_pages.dtype.element_ty == tl.uint8:
        return 2 * half, 2 * half + 1
    else:  # noqa: RET505
        return half, WIDTH // 2 + half


@triton.jit
def _load_latents(
    kv_pages, row, known, DTYPE: tl.constexpr, ROPE_DIM: tl.constexpr, LATENT: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """Load the latents of stored rows in two halves; zeros if not known."""
    half = tl.arange(0, WIDTH // 2)
    if kv_pages.dtype.element_ty == tl.uint8:
        pairs = values_in(kv_pages, ROPE_DIM) + (row * ((ROPE_DIM + LATENT) // 2))[:, None]
        return split_pairs(_load_rows(pairs, half, known, LATENT // 2), DTYPE)
    else:  # noqa: RET505
        at = kv_pages + ROPE_DIM + (row * (ROPE_DIM + LATENT))[:, None]
        low = _load_rows(at, half, known, LATENT)
        return low, _load_rows(at, WIDTH // 2 + half, known, LATENT)


@triton.jit
def _store_pairs(target, pair, dim, values, wanted, LATENT: tl.constexpr):
    at = target + pair[:, None] * LATENT + dim[None, :]
    inside = wanted[:, None] & (dim < LATENT)[None, :]
    tl.store(at, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _partial_of(chunk, first, row):
    """Return where a chunk's results are stored. At most `spare` chunks are beyond one per row, so
    rows with several chunks have at most 2 * spare of them in all."""
    return (chunk + first - 2 * row).to(tl.int64)


@triton.jit(do_not_specialize=["span", "groups"])
def _merge_kernel(
    out, kv_scales, token_slots, firsts, sizes, row_of, first_of, count_of, partial, peak_of,
    total_of, sums, span, groups,
    HEADS: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge all chunks of a row, in order, a batch at a time, for a group of its pairs. The
    programs of the row's chunks share the tiles of the group. Padding gets zeros."""
    may_follow(PDL)
    group, chunk = tl.program_id(0) % groups, tl.program_id(0) // groups
    row, first = tl.load(row_of + chunk), tl.load(first_of + chunk)
    count = tl.load(count_of + chunk)
    if (row < 0) | (count == 1):
        wait_for_writer(PDL)
        return
    token, size = row.to(tl.int64) * span, span
    if firsts is not None:
        token, size = tl.load(firsts + row).to(tl.int64), tl.load(sizes + row)
    lane, dim = tl.arange(0, BATCH), tl.arange(0, WIDTH)
    _, v_scale = load_kv_scales(kv_scales, MLA=True)
    its = _partial_of(first, first, row) * (span * HEADS)
    partial, peak_of, total_of = partial + its * LATENT, peak_of + its, total_of + its
    begin, end = group * PAIRS, tl.minimum((group + 1) * PAIRS, size * HEADS)
    for some in range(begin + (chunk - first) * TILE, end, count * TILE):
        pair = some + tl.arange(0, TILE)
        place = pair // HEADS
        real = tl.load(token_slots + token + place, mask=pair < end, other=0) > 0
        wait_for_writer(PDL)
        peak = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, WIDTH], tl.float32)
        for start in tl.range(
            0, count, BATCH, num_stages=3
        ):  # stages: all loads are issued at once
            known = real[:, None] & (start + lane < count)[None, :]
            at = pair[:, None] + (start + lane)[None, :] * (span * HEADS)
            its_peak = tl.load(peak_of + at, mask=known, other=float("-inf"))
            its_total = tl.load(total_of + at, mask=known, other=0.0)
            its_at = partial + at[:, :, None].to(tl.int64) * LATENT + dim[None, None, :]
            held = known[:, :, None] & (dim < LATENT)[None, None, :]
            its_acc = tl.load(its_at, mask=held, other=0.0)
            new_peak = tl.maximum(peak, tl.max(its_peak, axis=1))
            level = softmax_level(new_peak)
            old, new = tl.exp2(peak - level), tl.exp2(its_peak - level[:, None])
            total = total * old + tl.sum(its_total * new, axis=1)
            acc = acc * old[:, None] + tl.sum(its_acc * new[:, :, None], axis=1)
            peak = new_peak
        result = (acc / tl.where(real, total, 1.0)[:, None] * v_scale).to(out.dtype.element_ty)
        out_at = out + (token * HEADS + pair)[:, None] * LATENT + dim[None, :]
        tl.store(out_at, result, mask=(pair < end)[:, None] & (dim < LATENT)[None, :])
        if sums is not None:
            tl.store(sums + token * HEADS + pair, peak + tl.log2(total), mask=real)
    wait_for_writer(PDL)  # programs without a tile


def limits(latent: int, shape: MlaShape) -> tuple[tuple[str, int, int], ...]:
    """Return the name of each limited size, its value and its maximum."""
    return ("latent", latent, MAX_LATENT), ("rope_dim", shape.rope_dim, MAX_ROPE_DIM)


def mla_attention(
    q: Tensor,  # [T, heads * (nope_dim + rope_dim)]
    k: Tensor,  # [T, rope_dim + latent]
    weights: MlaWeights,
    angles: Angles,
    kv: PagedKv,
    plan: AttentionPlan,
    heads: Heads,
    index: IndexInputs | None = None,
) -> Tensor:
    assert heads.mla is not None and isinstance(plan, MlaPlan) and index is None
    num, num_heads = len(q), heads.num_heads
    query = q.new_empty(num, num_heads, heads.head_dim)
    own = None if plan.own is None else k.new_empty(num, heads.head_dim)
    store(q, k, weights, angles, kv, Tokens(plan.slots, plan.positions), query, own, heads)
    seen, sums = attend(query, kv, plan, heads)
    out = q.new_empty(num, num_heads, heads.mla.v_head_dim)
    per_head(seen, weights.up_v.transpose(1, 2), out)
    if own is not None and sums is not None and plan.own is not None:
        mla_prefill.attend(q, query, own, weights, plan.own, sums, out, heads)
    return out.flatten(1)


def attend(
    query: Tensor,  # [T, heads, rope_dim + latent]
    kv: PagedKv,
    plan: MlaPlan,
    heads: Heads,
) -> tuple[Tensor, Tensor | None]:
    """Attend to the stored rows -> [T, heads, latent].

    If the step's own rows are attended to separately, also return log2 of each pair's softmax sum,
    [T, heads]: -inf for a pair without stored keys, whose result is not written.
    """
    num_heads, latent, page = heads.num_heads, heads.value_dim, kv.pages.shape[1]
    rope_dim = heads.head_dim - latent
    rope, width = padded_rows(rope_dim, 16), padded_rows(latent, 32)
    pairs, num_chunks = plan.peak.shape[1], len(plan.row)
    tile = tile_for(pairs, rope + width, query.dtype.itemsize)
    parts, groups = triton.cdiv(pairs, tile.pairs), triton.cdiv(pairs, MERGED_PAIRS)
    seen, sums = query.new_empty(len(query), num_heads, latent), None
    if plan.own is not None:
        sums = torch.empty(len(query), num_heads, device=query.device)
    launch(
        _attend_kernel, (num_chunks * parts,),
        query, *kv, seen, plan.slots, *plan[2:-1], sums,
        kv.page_table.stride(0), pairs // num_heads, parts, heads.scale * LOG2E.value,
        HEADS=num_heads, ROPE_DIM=rope_dim, LATENT=latent, PAGE=page, PAIRS=tile.pairs,
        KEYS=tile.keys, ROPE_BLOCK=rope, WIDTH=width, RUN=math.gcd(page, tile.keys),
        AHEAD=tile.ahead, num_warps=tile.warps, **overlap(),
    )  # fmt: skip
    launch(
        _merge_kernel, (num_chunks * groups,),
        seen, kv.scales, plan.slots, plan.firsts, plan.sizes, plan.row, plan.first, plan.num,
        plan.partial, plan.peak, plan.total, sums, pairs // num_heads, groups,
        HEADS=num_heads, LATENT=latent, WIDTH=width, PAIRS=MERGED_PAIRS, TILE=MERGED_TILE,
        BATCH=MERGED_CHUNKS, num_warps=4, **overlap(),
    )  # fmt: skip
    return seen, sums


def tile_for(pairs: int, size: int, itemsize: int) -> MlaTile:
    """Return the tile for rows of `pairs` pairs; `size` is the padded size of a stored row.

    Compiled for an H200 with latents of 512, 16 pairs take 191 registers and 93 KB, 32 take 255
    registers (128 bytes per thread are spilled) and 115 KB, and two such programs share a
    multiprocessor. With 64 pairs, two warpgroups would both compute all scores.
    """
    if itemsize > 2:  # scalar multiply-adds, for exactness rather than speed
        tile = MlaTile(pairs=16, keys=16, ahead=1, warps=8)
    else:
        small, large = (
            MlaTile(16, keys=32, ahead=2, warps=4),
            MlaTile(MAX_PAIRS, keys=64, ahead=1, warps=4),
        )
        tile = small if pairs <= 16 else large
    while tile.num_bytes(size, itemsize) > shared_memory() and tile.keys > 16:
        tile = tile._replace(keys=tile.keys // 2)
    return tile
