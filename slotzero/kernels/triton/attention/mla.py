"""Paged attention of latent heads, in absorbed form: a token's stored row is the key of all its
heads, and the latent that ends it their value.

Queries are brought to the latents by a product a head, results are brought back by another; between
them all heads of a token read the same rows. So a program takes as many (token, head) pairs of one
row of the step as its tile holds, reads a tile of stored rows once for all of them, and uses it
twice. Rows are those of the step where they are uniform, one token each in a decode step; ragged
ones are cut into blocks by prefill's plan, and a block is a row.

The rows are stored before anyone attends, so a token's own key is like any other. The grid of a
size is fixed, and shared out by decode's plan: keys up to a row's first token are cut into chunks
of one common size, and the last chunk has the keys of the row's other tokens too. Results of rows
in several chunks are merged, in order, by a kernel after it: a chunk's are so large that one
program could not read those of a long row in time, so as many share them as the row has chunks.

Only `mla_attention` knows of the products. In a step whose rows may be long, only keys before a
row's first token are seen like this, and its own in expanded form: see mla_prefill.py.

Padding stores nothing and gets zeros, and nothing of it is read. Nor is a key that was not stored,
or that nobody sees.
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
from slotzero.kernels.triton.attention.mla_plan import MAX_PAIRS
from slotzero.kernels.triton.attention.mla_rows import store
from slotzero.kernels.triton.attention.per_head import per_head
from slotzero.kernels.triton.attention.tree_mask import anyone_of, load_branches, sees
from slotzero.kernels.triton.attention.verify import padded_rows, softmax_level
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.activation import LOG2E
from slotzero.kernels.types import Angles, Heads, MlaShape, MlaWeights, PagedKv, Tokens

MAX_LATENT, MAX_TURNED = 512, 64  # what the tiles hold, of any number of heads
MOST_PAGES = tl.constexpr(8)  # of a tile, whose numbers every thread may have for itself
MERGED_PAIRS, MERGED_TILE, MERGED_CHUNKS = 8, 2, 4  # of a group; at a time; of a batch


class MlaTile(NamedTuple):
    pairs: int
    keys: int
    ahead: int  # tiles that are asked for before one is computed with
    warps: int

    def num_bytes(self, size: int, itemsize: int) -> int:
        """Of shared memory: queries, stored rows, weights."""
        rows = self.pairs + self.ahead * self.keys
        return (rows * size + self.pairs * self.keys) * itemsize + 512


@triton.jit(do_not_specialize=["table_stride", "span", "parts"])
def _attend_kernel(
    query, kv_pages, page_table, out, token_slots, starts, firsts, sizes,
    row_of, slot_of, begin_of, end_of, first_of, count_of, partial, peak_of, total_of,
    bases, bits_seen, sums, table_stride, span, parts, scale,
    HEADS: tl.constexpr, TURNED: tl.constexpr, LATENT: tl.constexpr, PAGE: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, TURN: tl.constexpr, WIDTH: tl.constexpr,
    RUN: tl.constexpr, AHEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a chunk, some pairs of its row. RUN keys at a time are in one page.

    What the plan says, slots and the first pages are read before the wait: the plan is never
    launched to overlap, and comes after all that it is made of."""
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
    pair, turn = part * PAIRS + tl.arange(0, PAIRS), tl.arange(0, TURN)
    low = tl.arange(0, WIDTH // 2)  # of a latent, which is in two halves: see below
    high = WIDTH // 2 + low
    place = pair // HEADS  # of the token in its row
    inside = place < size
    real = tl.load(token_slots + token + place, mask=inside, other=0) > 0
    newest = start + place  # the last key that a pair may see
    if sums is not None:
        newest = start + tl.zeros_like(place)
    length = tl.max(tl.where(real, newest + 1, 0), axis=0)
    end = tl.where(chunk == first + count - 1, length, tl.minimum(end, length))
    if bits_seen is not None:
        base, bits = load_branches(bases, bits_seen, token + place, newest, real)
        plain = tl.min(tl.where(real, base, length), axis=0)  # all pairs see all keys before it
        last_base, any_bits = anyone_of(base, bits)
    table = page_table + slot * table_stride
    few: tl.constexpr = KEYS // RUN <= MOST_PAGES
    if few:
        pages = _load_pages(table, begin, end, KEYS, RUN, PAGE)
        next_pages = _load_pages(table, begin + KEYS, end, KEYS, RUN, PAGE)
    wait_for_writer(PDL)
    if sums is not None:  # noqa: SIM102  the compiler decides this one
        if begin >= end:
            nothing = tl.full([PAIRS], float("-inf"), tl.float32)
            tl.store(sums + token * HEADS + pair, nothing, mask=inside)
            return

    q_at = query + (token * HEADS + pair)[:, None] * (TURNED + LATENT)
    q_turned = _load_rows(q_at, turn, real, TURNED)
    q_low = _load_rows(q_at + TURNED, low, real, LATENT)
    q_high = _load_rows(q_at + TURNED, high, real, LATENT)

    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    totals = tl.zeros([PAIRS, KEYS], tl.float32)  # added up at the end: sums across warps are slow
    acc_low = tl.zeros([PAIRS, WIDTH // 2], tl.float32)
    acc_high = acc_low
    # Rows of AHEAD tiles are asked for before one is computed with, and the pages of each two tiles
    # before its rows. Scores of few pairs are two sums, which matrix units work on by turns: one
    # would be a chain of additions that takes longer than the rows to come. Each is scaled by
    # itself: of a plain sum the compiler makes one chain again.
    for tile in tl.range(begin, end, KEYS, num_stages=AHEAD + 1):
        key = tile + tl.arange(0, KEYS)
        known = key < end
        if bits_seen is not None:
            known = known & sees(key, last_base, any_bits)
        if few:
            page = tl.zeros([KEYS], tl.int32)
            for i in tl.static_range(KEYS // RUN):
                page = tl.where(tl.arange(0, KEYS) // RUN == i, pages[i], page)
            pages = _made(next_pages, KEYS // RUN)
            next_pages = _load_pages(table, tile + 2 * KEYS, end, KEYS, RUN, PAGE)
        else:
            page = tl.load(table + key // PAGE, mask=key < end, other=0)
        at = (page * PAGE + key % PAGE).to(tl.int64)
        stored = kv_pages + (at * (TURNED + LATENT))[:, None]
        k_turned = _load_rows(stored, turn, known, TURNED)
        k_low = _load_rows(stored + TURNED, low, known, LATENT)
        k_high = _load_rows(stored + TURNED, high, known, LATENT)
        score = tl.dot(q_turned, k_turned.T, input_precision="ieee")
        score = tl.dot(q_low, k_low.T, score, input_precision="ieee")
        if PAIRS > 16:
            score = tl.dot(q_high, k_high.T, score, input_precision="ieee") * scale
        else:
            score = score * scale + tl.dot(q_high, k_high.T, input_precision="ieee") * scale
        if bits_seen is None:
            score = tl.where(key[None, :] <= newest[:, None], score, float("-inf"))
        elif tile + KEYS > plain:
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
        acc_low = tl.where(real[:, None], acc_low / total[:, None], 0.0)
        acc_high = tl.where(real[:, None], acc_high / total[:, None], 0.0)
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
    """Of KEYS keys, RUN of which are in one page: numbers, which need no layout"""
    pages = ()
    for i in tl.static_range(0, KEYS, RUN):
        page = tl.load(table + (first + i) // PAGE, mask=first + i < end, other=0)
        pages += (page,)  # type: ignore[assignment]
    return pages


@triton.jit
def _made(pages, NUM: tl.constexpr):
    """The same: of a loop that hands on what it was given, the compiler asks for no tile ahead."""
    made = ()
    for i in tl.static_range(NUM):
        made += (tl.maximum(pages[i], 0),)  # type: ignore[assignment]
    return made


@triton.jit
def _load_rows(at, dim, known, SIZE: tl.constexpr):
    """[rows, dim]: zeros past SIZE, and of rows that are not known"""
    return tl.load(at + dim[None, :], mask=known[:, None] & (dim < SIZE)[None, :], other=0.0)


@triton.jit
def _store_pairs(target, pair, dim, values, wanted, LATENT: tl.constexpr):
    at = target + pair[:, None] * LATENT + dim[None, :]
    inside = wanted[:, None] & (dim < LATENT)[None, :]
    tl.store(at, values.to(target.dtype.element_ty), mask=inside)


@triton.jit
def _partial_of(chunk, first, row):
    """Where a chunk's results are. Chunks beyond one a row are no more than the spare ones: those
    of rows that have any are counted twice, which makes room for all."""
    return (chunk + first - 2 * row).to(tl.int64)


@triton.jit(do_not_specialize=["span", "groups"])
def _merge_kernel(
    out, token_slots, firsts, sizes, row_of, first_of, count_of, partial, peak_of, total_of, sums,
    span, groups,
    HEADS: tl.constexpr, LATENT: tl.constexpr, WIDTH: tl.constexpr,
    PAIRS: tl.constexpr, TILE: tl.constexpr, BATCH: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All chunks of a row, in order, a batch at a time, for a group of its pairs, of which each of
    its chunks' programs takes some tiles. Of padding there is nothing, and zeros remain."""
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
        for start in tl.range(0, count, BATCH, num_stages=3):  # in stages: all loads at once
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
        result = (acc / tl.where(real, total, 1.0)[:, None]).to(out.dtype.element_ty)
        out_at = out + (token * HEADS + pair)[:, None] * LATENT + dim[None, :]
        tl.store(out_at, result, mask=(pair < end)[:, None] & (dim < LATENT)[None, :])
        if sums is not None:
            tl.store(sums + token * HEADS + pair, peak + tl.log2(total), mask=real)
    wait_for_writer(PDL)  # who had no tile


def limits(latent: int, shape: MlaShape) -> tuple[tuple[str, int, int], ...]:
    """-> the name of a size, its value and the most that it may be"""
    return ("latent", latent, MAX_LATENT), ("rope_dim", shape.rope_dim, MAX_TURNED)


def mla_attention(
    q: Tensor,  # [T, heads * (plain + turned)]
    k: Tensor,  # [T, turned + latent]
    weights: MlaWeights,
    angles: Angles,
    kv: PagedKv,
    plan: AttentionPlan,
    heads: Heads,
) -> Tensor:
    assert heads.mla is not None and isinstance(plan, MlaPlan)
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
    query: Tensor,  # [T, heads, turned + latent]
    kv: PagedKv,
    plan: MlaPlan,
    heads: Heads,
) -> tuple[Tensor, Tensor | None]:
    """-> [T, heads, latent]: what each pair gets of the latents that it sees in pages; and where
    that is not all, [T, heads]: log2 of its softmax's sum, -inf of nothing, which is not written"""
    num_heads, latent, page = heads.num_heads, heads.value_dim, kv.pages.shape[1]
    turned = heads.head_dim - latent
    turn, width = padded_rows(turned, 16), padded_rows(latent, 32)
    pairs, num_chunks = plan.peak.shape[1], len(plan.row)
    tile = tile_for(pairs, turn + width, query.dtype.itemsize)
    parts, groups = triton.cdiv(pairs, tile.pairs), triton.cdiv(pairs, MERGED_PAIRS)
    seen, sums = query.new_empty(len(query), num_heads, latent), None
    if plan.own is not None:
        sums = torch.empty(len(query), num_heads, device=query.device)
    launch(
        _attend_kernel, (num_chunks * parts,),
        query, *kv, seen, plan.slots, *plan[2:-1], sums,
        kv.page_table.stride(0), pairs // num_heads, parts, heads.scale * LOG2E.value,
        HEADS=num_heads, TURNED=turned, LATENT=latent, PAGE=page, PAIRS=tile.pairs,
        KEYS=tile.keys, TURN=turn, WIDTH=width, RUN=math.gcd(page, tile.keys), AHEAD=tile.ahead,
        num_warps=tile.warps, **overlap(),
    )  # fmt: skip
    launch(
        _merge_kernel, (num_chunks * groups,),
        seen, plan.slots, plan.firsts, plan.sizes, plan.row, plan.first, plan.num,
        plan.partial, plan.peak, plan.total, sums, pairs // num_heads, groups,
        HEADS=num_heads, LATENT=latent, WIDTH=width, PAIRS=MERGED_PAIRS, TILE=MERGED_TILE,
        BATCH=MERGED_CHUNKS, num_warps=4, **overlap(),
    )  # fmt: skip
    return seen, sums


def tile_for(pairs: int, size: int, itemsize: int) -> MlaTile:
    """Of rows of `pairs`; `size` is of what is stored. Compiled for an H200 with latents of 512:

    16 pairs are 191 registers and 93 KB, 32 are 255 (some are spilled, 128 bytes of each thread)
    and 115 KB, and two such programs share a multiprocessor. With 64, two groups of warps would
    compute all scores twice.
    """
    if itemsize > 2:  # plain multiply-adds, for exactness; speed is no aim
        tile = MlaTile(pairs=16, keys=16, ahead=1, warps=8)
    else:
        few, many = (
            MlaTile(16, keys=32, ahead=2, warps=4),
            MlaTile(MAX_PAIRS, keys=64, ahead=1, warps=4),
        )
        tile = few if pairs <= 16 else many
    while tile.num_bytes(size, itemsize) > shared_memory() and tile.keys > 16:
        tile = tile._replace(keys=tile.keys // 2)
    return tile
