"""Prefill: norm, rotate and store a step's tokens, then paged causal flash attention over them.

Rows are ragged: row r holds `counts[r]` tokens of `slots[r]` from position `starts[r]` on, so
prompts, chunks over stored prefixes and single decode tokens share one step. Three kernels, whose
grids follow from the padded sizes alone:

- `rope_store` writes K and V of every token to its page; tokens of slot 0 store nothing, and layers
  that do not store have queries only.
- `cut_rows` cuts the rows into blocks, of at most `block_tokens(group)` tokens, longest context
  first. The remaining blocks cover the padding tokens. Once per step; all layers share it.
- `attend` gives each (block, KV head) a program. Its matrix tile holds every (token, head of the
  group), so K and V are read once for a group. Blocks of padding write zeros.

A token's keys come in tiles that start at position 0, whatever its block: its result is bitwise
independent of how its prompt was cut, and of its neighbours. With a window a block begins at the
tile that holds the first key of the token with the lowest position; a tile without visible keys
leaves a token's softmax unchanged. No key past the row's last token is read, nor one before the
windows of all tokens of the block. With branches, only keys that a real token of the block sees are
read.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.attention_plans import PrefillPlan
from slotzero.kernels.triton.attention.float8 import (
    as_query,
    as_stored,
    load_kv_scales,
    numbers,
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
from slotzero.kernels.triton.linear.activation import LOG2E, tanh
from slotzero.kernels.types import NO_BRANCHES, Angles, Heads, PagedKv, QkNorms, Rows, Tokens

BLOCK_ROWS = 128  # (token, head of the group) pairs per block of the plan
HEADS_PER_PROGRAM = 16  # of rope_store: at head size 128, each thread of 4 warps moves 16 bytes
PLAN_BLOCKS, PLAN_ROWS = 32, 128  # blocks that one program ranks; rows compared at a time
BLOCK_FIELDS = tl.constexpr(5)


class PrefillTile(NamedTuple):
    rows: int  # (token, head of the group) pairs per program
    keys: int
    warps: int
    stages: int

    def num_bytes(self, dim: int, value_dim: int, dtype: torch.dtype) -> int:
        """Return the most shared memory needed: queries, and keys and values of every stage."""
        ahead = self.keys * self.stages
        return (self.rows * dim + ahead * (dim + value_dim)) * dtype.itemsize


def padded_dim(dim: int) -> int:
    return max(16, int(triton.next_power_of_2(dim)))


def tile(dim: int, value_dim: int, group: int, dtype: torch.dtype, memory: int) -> PrefillTile:
    """Return a tile whose registers and shared memory fit a multiprocessor without spilling.

    Tuned for an H200: 65536 registers and 227 KB. In 16 bits, 128 rows are two warpgroups; a thread
    then holds dim / 2 accumulators, keys / 2 scores and keys / 4 registers of weights. Shared
    memory holds the query tile, and keys and values of every stage. A card with less of it
    (`memory`, in bytes) gets fewer stages, and then fewer keys.
    """
    dim, value_dim = padded_dim(dim), padded_dim(value_dim)
    width = max(dim, value_dim)
    if dtype.itemsize > 2:  # scalar multiply-adds, for exactness rather than speed
        chosen = PrefillTile(rows=32 if width <= 128 else 16, keys=32, warps=4, stages=2)
    elif width <= 64:  # 121 registers, 64 KB: two programs share a multiprocessor
        chosen = PrefillTile(rows=128, keys=64, warps=8, stages=3)
    elif width == 128:  # 250 registers, 224 KB: one program, whose loads run two tiles ahead
        chosen = PrefillTile(rows=128, keys=128, warps=8, stages=3)
    elif width == 256:  # 255 registers, 192 KB
        chosen = PrefillTile(rows=128, keys=64, warps=8, stages=2)
    else:  # 244 registers, 196 KB: the accumulators of 128 rows would fill all registers
        chosen = PrefillTile(rows=64, keys=32, warps=8, stages=2)
    chosen = chosen._replace(rows=max(chosen.rows, triton.next_power_of_2(group)))
    return fitted(chosen, dim, value_dim, dtype, memory)


def fitted(
    chosen: PrefillTile, dim: int, value_dim: int, dtype: torch.dtype, memory: int
) -> PrefillTile:
    while chosen.num_bytes(dim, value_dim, dtype) > memory and chosen.keys > 16:
        if chosen.stages > 2:
            chosen = chosen._replace(stages=2)
        else:
            chosen = chosen._replace(keys=chosen.keys // 2)
    return chosen


def block_tokens(group: int) -> int:
    return max(1, BLOCK_ROWS // group)


@triton.jit(do_not_specialize=["table_stride"])
def _rope_store_kernel(
    qkv, q_norm, k_norm, eps, cos, sin, kv_pages, page_table, kv_scales, slots, positions, q,
    qkv_stride, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, VALUE_DIM: tl.constexpr,
    PAGE: tl.constexpr, NORM: tl.constexpr, NORM_VALUES: tl.constexpr, STORES: tl.constexpr,
    HEAD_BLOCK: tl.constexpr, HALF_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store heads in two halves; an odd size has its middle value in both."""
    may_follow(PDL)
    all_heads: tl.constexpr = HEADS + 2 * KV_HEADS if STORES else HEADS
    dim: tl.constexpr = 2 * HALF
    value_half: tl.constexpr = (VALUE_DIM + 1) // 2
    stored: tl.constexpr = dim + VALUE_DIM
    parts: tl.constexpr = (all_heads + HEAD_BLOCK - 1) // HEAD_BLOCK
    token = (tl.program_id(0) // parts).to(tl.int64)
    head = (tl.program_id(0) % parts * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    pair = tl.arange(0, HALF_BLOCK)[None, :]
    paired = pair < HALF
    is_q = head < HEADS
    is_v = head >= HEADS + KV_HEADS
    wait_for_writer(PDL)

    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    inside = (head < all_heads) & paired
    source = qkv + token * qkv_stride + head * dim + pair
    apart = HALF
    if dim != VALUE_DIM:
        inside = (head < all_heads) & (pair < tl.where(is_v, value_half, HALF))
        source += is_v.to(tl.int64) * (head - HEADS - KV_HEADS) * (VALUE_DIM - dim)
        apart += is_v.to(tl.int64) * (VALUE_DIM - value_half - HALF)
    first_in = tl.load(source, mask=inside, other=0.0)  # [heads, pairs]
    second_in = tl.load(source + apart, mask=inside, other=0.0)
    first, second = first_in.to(tl.float32), second_in.to(tl.float32)
    if NORM or NORM_VALUES:
        square = tl.sum(first * first + second * second, axis=1) / dim
        scale = tl.rsqrt(square + eps)[:, None]
    if NORM_VALUES:
        tl.static_assert(dim == VALUE_DIM)
        first_in = tl.where(is_v, (first * scale).to(first_in.dtype), first_in)
        second_in = tl.where(is_v, (second * scale).to(first_in.dtype), second_in)
    if NORM:
        q_first = tl.load(q_norm + pair, mask=paired, other=0.0).to(tl.float32)
        q_second = tl.load(q_norm + HALF + pair, mask=paired, other=0.0).to(tl.float32)
        k_first, k_second = q_first, q_second
        if STORES:
            k_first = tl.load(k_norm + pair, mask=paired, other=0.0).to(tl.float32)
            k_second = tl.load(k_norm + HALF + pair, mask=paired, other=0.0).to(tl.float32)
        first = (first * scale).to(first_in.dtype) * tl.where(is_q, q_first, k_first)
        second = (second * scale).to(first_in.dtype) * tl.where(is_q, q_second, k_second)
        first = first.to(first_in.dtype).to(tl.float32)
        second = second.to(first_in.dtype).to(tl.float32)
    c = tl.load(cos + token * HALF + pair, mask=paired, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=paired, other=0.0)
    first_out = tl.where(is_v, first_in, (first * c - second * s).to(first_in.dtype))
    second_out = tl.where(is_v, second_in, (second * c + first * s).to(first_in.dtype))

    target = q + token * (HEADS * dim) + head * dim + pair
    tl.store(target, first_out, mask=is_q & paired)
    tl.store(target + HALF, second_out, mask=is_q & paired)
    if STORES and slot > 0:
        page = tl.load(page_table + slot * table_stride + position // PAGE).to(tl.int64)
        at = (page * PAGE + position % PAGE) * (KV_HEADS * stored)
        # Heads count on from keys to values; a product, since a choice would hide the alignment.
        side = is_v.to(tl.int64) * (dim - KV_HEADS * stored)
        place = kv_pages + at + side + (head - HEADS) * stored + pair
        k_scale, v_scale = load_kv_scales(kv_scales)
        by, is_stored = tl.where(is_v, v_scale, k_scale), inside & (head >= HEADS)
        tl.store(place, as_stored(first_out, by, kv_pages), mask=is_stored)
        tl.store(place + apart, as_stored(second_out, by, kv_pages), mask=is_stored)


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_blocks"])
def _plan_kernel(
    slots, counts, ends, starts, blocks, num_rows, num_tokens, num_blocks,
    TOKENS: tl.constexpr, BLOCKS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    wait_for_writer(PDL)

    # First in row order: block b belongs to the row with begin <= b < begin + its blocks.
    row = tl.zeros([BLOCKS], tl.int32)
    begin = tl.zeros([BLOCKS], tl.int32)
    used = 0
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        count = tl.load(counts + r, mask=r < num_rows, other=0)
        parts = (count + TOKENS - 1) // TOKENS
        past = used + tl.cumsum(parts, 0)  # [rows]: the block after each row's last
        before = (past[None, :] <= block[:, None]) & (r < num_rows)[None, :]
        row += tl.sum(before.to(tl.int32), axis=1)
        begin = tl.maximum(begin, tl.max(tl.where(before, past[None, :], 0), axis=1))
        used += tl.sum(parts, 0)
    real = block < used
    count = tl.load(counts + row, mask=real, other=0)
    start = tl.load(starts + row, mask=real, other=0)
    slot = tl.load(slots + row, mask=real, other=0)
    end = tl.load(ends + row, mask=real, other=0)
    offset = (block - begin) * TOKENS
    size = tl.minimum(count - offset, TOKENS)
    reach = start + offset + size  # keys of the block's last token

    # Then by reach, longest first, ties in row order. Row r has one block per reach, in steps of
    # TOKENS from its start, so how many of its blocks reach further is a division.
    rank = tl.zeros([BLOCKS], tl.int32)
    for first in range(0, num_rows, ROWS):
        r = first + tl.arange(0, ROWS)
        r_count = tl.load(counts + r, mask=r < num_rows, other=0)[None, :]
        r_start = tl.load(starts + r, mask=r < num_rows, other=0)[None, :]
        parts = (r_count + TOKENS - 1) // TOKENS
        limit = reach[:, None] - (r[None, :] < row[:, None]).to(tl.int32)  # earlier rows first
        shorter = tl.minimum(tl.maximum(limit - r_start, 0) // TOKENS, parts)
        rank += tl.sum(tl.where(r_start + r_count > limit, parts - shorter, 0), axis=1)

    last = tl.load(ends + num_rows - 1)
    padding = last + (block - used) * TOKENS
    place = tl.where(real, rank, block)
    target = blocks + place * BLOCK_FIELDS
    kept = place < num_blocks
    tl.store(target, tl.where(real, slot, 0), mask=kept)
    tl.store(target + 1, tl.where(real, end - count + offset, padding), mask=kept)
    left = tl.maximum(tl.minimum(num_tokens - padding, TOKENS), 0)
    tl.store(target + 2, tl.where(real, size, left), mask=kept)
    tl.store(target + 3, tl.where(real, start + offset, 0), mask=kept)
    tl.store(target + 4, tl.where(real, start, 0), mask=kept)


@triton.jit(do_not_specialize=["table_stride"])
def _attend_kernel(
    q, sinks, kv_pages, page_table, kv_scales, blocks, slots, bases, seen, query_positions, out,
    scale, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, DIM_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    kv_head = tl.program_id(0) // PARTS
    part = tl.program_id(0) % PARTS * TOKENS  # small tiles take a block in parts
    block = blocks + tl.program_id(1) * BLOCK_FIELDS
    group: tl.constexpr = HEADS // KV_HEADS
    row = tl.arange(0, ROWS)
    dim, value_dim = tl.arange(0, DIM_BLOCK), tl.arange(0, VALUE_BLOCK)
    stored: tl.constexpr = DIM + VALUE_DIM
    offset = row // group  # index of the token in the block
    wait_for_writer(PDL)

    size = tl.minimum(tl.load(block + 2) - part, TOKENS)
    if size <= 0:
        return
    slot = tl.load(block).to(tl.int64)
    token = tl.load(block + 1).to(tl.int64) + part
    start = tl.load(block + 3) + part
    # A row may end in padding: keys past its last token were never stored.
    real = tl.load(slots + token + offset, mask=offset < size, other=0) > 0
    length = tl.max(tl.where(real, start + offset + 1, 0), axis=0)
    if seen is not None:
        base, bits = load_branches(bases, seen, token + offset, start + offset, real)
        # All tokens see all keys before the first tree.
        tree_start = tl.min(tl.where(real, base, length), axis=0)
        last_base, any_bits = union_of(base, bits)
    pages = page_table + slot * table_stride
    begin = 0
    key = tl.arange(0, KEYS)
    known = key < length
    if WINDOW is not None:
        query_position = start + offset
        if seen is not None:
            query_position = tl.load(query_positions + token + offset, mask=real, other=0)
        since = first_seen(query_position, WINDOW, CHUNKED)  # the first key that each token sees
        low = tl.min(tl.where(real, since, length), axis=0)
        all_since = tl.max(tl.where(real, since, 0), axis=0)
        begin = low // KEYS * KEYS
        key += begin
        known = (key >= low) & (key < length)
    page = tl.load(pages + key // PAGE, mask=known, other=0)
    at = ((offset * HEADS + row % group) * DIM)[:, None] + dim[None, :]
    inside = real[:, None] & (dim < DIM)[None, :]
    q += token * (HEADS * DIM) + kv_head * (group * DIM)
    query = as_query(tl.load(q + at, mask=inside, other=0.0), kv_pages)  # [rows, dim]
    k_scale, v_scale = load_kv_scales(kv_scales)
    scale *= k_scale

    k_pages = kv_pages + kv_head * stored
    v_pages = k_pages + DIM
    acc = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    if sinks is not None:
        best = tl.load(sinks + kv_head * group + row % group).to(tl.float32) * LOG2E
        total += 1.0
    for first in tl.range(begin, length, KEYS):
        key = first + tl.arange(0, KEYS)
        within = tl.arange(0, KEYS) % PAGE if KEYS % PAGE == 0 else key % PAGE
        source = page.to(tl.int64) * (PAGE * KV_HEADS * stored) + within * (KV_HEADS * stored)
        known = key < length
        if WINDOW is not None:
            known = known & (key >= low)
        if seen is not None:
            known = known & sees(key, last_base, any_bits)
        present = known[:, None] & (dim < DIM)[None, :]
        keys = tl.load(k_pages + (source[:, None] + dim[None, :]), mask=present, other=0.0)
        keys = numbers(keys, query.dtype)
        present = known[:, None] & (value_dim < VALUE_DIM)[None, :]
        values = v_pages + (source[:, None] + value_dim[None, :])
        values = tl.load(values, mask=present, other=0.0)  # [keys, value_dim]
        values = numbers(values, query.dtype)
        # The pages of the next tile are known one tile ahead, so that its loads can run ahead.
        page = tl.load(pages + (key + KEYS) // PAGE, mask=key + KEYS < length, other=0)
        score = tl.dot(query, tl.trans(keys), input_precision=PRECISION)
        unit = scale
        if SOFTCAP is not None:
            score, unit = tanh(score * scale), SOFTCAP * LOG2E
        if seen is not None:
            if first + KEYS > tree_start:  # the tile reaches into a tree
                mine = sees(key[None, :], base[:, None], bits[:, None])
                score = tl.where(mine, score, float("-inf"))
        elif first + KEYS > start + 1:  # the tile crosses the diagonal
            score = tl.where(key[None, :] <= (start + offset)[:, None], score, float("-inf"))
        if WINDOW is not None:  # noqa: SIM102  decided at compile time
            if first < all_since:  # some token does not see all of the tile
                score = tl.where(key[None, :] < since[:, None], float("-inf"), score)
        new_best = tl.maximum(best, tl.max(score, axis=1) * unit)
        peak = new_best
        if WINDOW is not None or seen is not None:  # a softmax may have no key so far
            peak = tl.where(new_best == float("-inf"), 0.0, new_best)
        weight = tl.exp2(score * unit - peak[:, None])
        shrink = tl.exp2(best - peak)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(values.dtype), values, acc, input_precision=PRECISION)
        best = new_best
    at = ((offset * HEADS + row % group) * VALUE_DIM)[:, None] + value_dim[None, :]
    inside = (offset < size)[:, None] & (value_dim < VALUE_DIM)[None, :]
    out += token * (HEADS * VALUE_DIM) + kv_head * (group * VALUE_DIM)
    result = acc / tl.where(total > 0, total, 1.0)[:, None] * v_scale
    result = tl.where(real[:, None], result, 0.0)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def rope_store(
    qkv: Tensor,  # [T, sum(heads.sizes)]
    norms: QkNorms,
    angles: Angles,
    kv: PagedKv,
    tokens: Tokens,
    heads: Heads,
) -> Tensor:
    """Norm and rotate q -> [T, heads, head_dim], and store k (likewise) and v in their pages, if
    these heads store any."""
    num_tokens, kv_heads, half = len(qkv), heads.num_kv_heads, heads.head_dim // 2
    q = torch.empty(num_tokens, heads.num_heads, heads.head_dim, dtype=qkv.dtype, device=qkv.device)
    num_each = heads.num_heads + 2 * kv_heads * heads.stores
    parts = triton.cdiv(num_each, HEADS_PER_PROGRAM)
    launch(
        _rope_store_kernel, (num_tokens * parts,),
        qkv, *norms, heads.norm_eps, *angles, *kv, *tokens, q,
        qkv.stride(0), kv.page_table.stride(0),
        HEADS=heads.num_heads, KV_HEADS=kv_heads, HALF=half, VALUE_DIM=heads.value_dim,
        PAGE=kv.pages.shape[1], NORM=norms.q is not None,
        NORM_VALUES=heads.norms_values and heads.stores, STORES=heads.stores,
        HEAD_BLOCK=HEADS_PER_PROGRAM,
        HALF_BLOCK=triton.next_power_of_2(max(half, (heads.value_dim + 1) // 2)), **overlap(),
    )  # fmt: skip
    return q


def cut_rows(rows: Rows, num_tokens: int, size: int) -> Tensor:
    """Cut rows into blocks of at most `size` tokens -> [blocks, 5] int32: slot, first token, number
    of tokens and first position of each block, and the first position of its row.

    Rows need at most ceil(T / size) + R blocks, and the remaining ones suffice for the padding.
    """
    num_blocks = triton.cdiv(num_tokens, size) + len(rows.slots)
    blocks = torch.empty(
        num_blocks, BLOCK_FIELDS.value, dtype=torch.int32, device=rows.slots.device
    )
    launch(
        _plan_kernel, (triton.cdiv(num_blocks, PLAN_BLOCKS),),
        rows.slots, rows.counts, rows.ends, rows.starts, blocks,
        len(rows.slots), num_tokens, num_blocks,
        TOKENS=size, BLOCKS=PLAN_BLOCKS, ROWS=PLAN_ROWS, **overlap(),
    )  # fmt: skip
    return blocks


def attend(
    q: Tensor,  # [T, heads, head_dim]
    sinks: Tensor | None,
    kv: PagedKv,
    plan: PrefillPlan,
    heads: Heads,
) -> Tensor:
    """Attend from each token to the positions of its slot up to its own, the last `window` of them,
    or those of its branch -> [T, heads, value_dim]; padding gets zeros."""
    num_heads, kv_heads, dim, value_dim = (
        heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.value_dim
    )  # fmt: skip
    group = num_heads // kv_heads
    chosen = tile(dim, value_dim, group, q.dtype, shared_memory())
    parts = triton.cdiv(block_tokens(group), chosen.rows // group)
    out = torch.empty(len(q), num_heads, value_dim, dtype=q.dtype, device=q.device)
    unit = LOG2E.value if heads.softcap is None else 1 / heads.softcap
    launch(
        _attend_kernel, (kv_heads * parts, len(plan.blocks)),
        q, sinks, *kv, plan.blocks, plan.tokens.slots, *(plan.branches or NO_BRANCHES), out,
        heads.scale * unit, kv.page_table.stride(0),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim, VALUE_DIM=value_dim,
        WINDOW=heads.window, CHUNKED=heads.is_chunked, SOFTCAP=heads.softcap,
        PAGE=kv.pages.shape[1], TOKENS=chosen.rows // group, PARTS=parts, ROWS=chosen.rows,
        DIM_BLOCK=padded_dim(dim), VALUE_BLOCK=padded_dim(value_dim), KEYS=chosen.keys,
        PRECISION="ieee" if q.dtype == torch.float32 else None,
        num_warps=chosen.warps, num_stages=chosen.stages, **overlap(),
    )  # fmt: skip
    return out
