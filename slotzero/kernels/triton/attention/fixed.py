"""Paged attention with one order of summation: the kernels of deterministic mode for every step.

A text is cut into chunks at positions that follow from nothing else (fixed_plan.py). The softmax of
a token over one chunk is computed tile by tile from the chunk's begin on, by instructions that are
the same for one token and for many; then chunks are merged in ascending order. Sums of softmax
weights are sums of integers, which have no order. So a token's result is the same bits whether it
is decoded, verified among drafts or computed in a prompt, however that is cut, and whatever is
beside it.

How work is distributed is free. Every step is `rope_store` and then `attend`, whose programs have a
block of tokens, one KV head and some value dimensions. With many blocks a program takes all chunks
and merges as it goes. With few, `plan` gives programs runs of a block's chunks; each stores its
chunks, and the program that finishes a block last merges them.

Kernels are compiled without contraction of products and sums, which the compiler could choose
differently from tile to tile.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.attention_plans import FixedPlan, KeyRuns
from slotzero.kernels.triton.attention.fixed_plan import (
    FEW_PAIRS,
    MANY_PAIRS,
    VALUE_DIMS,
    chunk_begin,
    chunk_of,
    most_pairs,
    pair_parts_of,
    value_parts,
)
from slotzero.kernels.triton.attention.float8 import as_query, load_kv_scales, numbers
from slotzero.kernels.triton.attention.prefill import BLOCK_FIELDS, padded_dim
from slotzero.kernels.triton.attention.tree_mask import load_branches, sees, union_of
from slotzero.kernels.triton.attention.window import first_seen
from slotzero.kernels.triton.exact_sums import as_integers
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.activation import LOG2E, tanh
from slotzero.kernels.types import NO_BRANCHES, Heads, PagedKv

FIRST_OPERAND, SECOND_OPERAND = 64, 8  # the fewest rows and columns that `wgmma` computes
FEWEST_PAIRS = 32  # up to here, pairs are the second operand; a tile of 64 would be mostly empty
UNIT = tl.constexpr(2.0**22)  # of softmax weights that are added as integers
WIDE_UNIT = tl.constexpr(2.0**40)  # in float32


class FixedShape(NamedTuple):
    """Launch shape of the attention kernel. Only `keys` must be the same in all steps."""

    pairs: int
    keys: int
    warps: int
    stages: int
    keys_first: bool = False


@triton.jit
def _by_pair(x, KEYS_FIRST: tl.constexpr):
    """Expand values of pairs to a tile, whose rows are pairs, or its columns with KEYS_FIRST."""
    return x[None, :] if KEYS_FIRST else x[:, None]


@triton.jit
def _across_pairs(x, KEYS_FIRST: tl.constexpr):
    """Expand values of keys, or of value dimensions, to a tile."""
    return x[:, None] if KEYS_FIRST else x[None, :]


@triton.jit
def _scores(query, keys, before, KEYS_FIRST: tl.constexpr):
    """Add the products of queries [pairs, dim] and keys [keys, dim] to `before`, if it is given."""
    first, second = (keys, query) if KEYS_FIRST else (query, keys)
    return tl.dot(first, tl.trans(second), before, input_precision="ieee")


@triton.jit
def _sums_of_values(weight, values, acc, KEYS_FIRST: tl.constexpr):
    """Add values [keys, value_dim] times softmax weights to `acc`."""
    first, second = (tl.trans(values), weight) if KEYS_FIRST else (weight, values)
    return tl.dot(first, second, acc, input_precision="ieee")


@triton.jit
def _no_values(PAIRS: tl.constexpr, VALUES: tl.constexpr, KEYS_FIRST: tl.constexpr):
    return tl.zeros([VALUES, PAIRS] if KEYS_FIRST else [PAIRS, VALUES], tl.float32)


@triton.jit
def _sum_of_weights(weight, AXIS: tl.constexpr, EXACT: tl.constexpr):
    """Sum softmax weights, at most 1, over the keys of a tile, in no order."""
    if EXACT:
        whole = (weight.to(tl.float64) * WIDE_UNIT).to(tl.int64)
        return (tl.sum(whole, axis=AXIS).to(tl.float64) / WIDE_UNIT).to(tl.float32)
    else:  # noqa: RET505
        return tl.sum(as_integers(weight * UNIT), axis=AXIS).to(tl.float32) * (1.0 / UNIT)


@triton.jit
def _store_in_halves(
    at, acc, real, first, VALUE_DIM: tl.constexpr, PAIRS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store sums [PAIRS, WIDTH] of value dimensions from `first` on. Converting half of them to a
    layout for stores takes half the shared memory."""
    half: tl.constexpr = WIDTH // 2
    dim = first + tl.arange(0, half)
    lower, upper = tl.split(tl.permute(tl.reshape(acc, [PAIRS, 2, half]), (0, 2, 1)))
    inside = real[:, None] & (dim < VALUE_DIM)[None, :]
    tl.store(at[:, None] + dim[None, :], lower, mask=inside)
    inside = real[:, None] & (half + dim < VALUE_DIM)[None, :]
    tl.store(at[:, None] + half + dim[None, :], upper, mask=inside)


@triton.jit
def _empty_softmax(sinks, head, inside, PAIRS: tl.constexpr):
    """Return peak and total of a softmax without keys: that of the sink, if there is one."""
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    if sinks is not None:
        peak = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * LOG2E
        total += 1.0
    return peak, total


@triton.jit
def _merge(peak, total, acc, its_peak, its_total, its_acc, KEYS_FIRST: tl.constexpr):
    """Add a chunk to the softmax over the chunks before it. One without visible keys leaves it
    unchanged to the bit."""
    is_seen = its_peak > float("-inf")
    new_peak = tl.maximum(peak, its_peak)
    level = tl.where(is_seen, new_peak, 0.0)
    old, new = tl.exp2(peak - level), tl.exp2(its_peak - level)
    total = tl.where(is_seen, total * old + its_total * new, total)
    added = its_acc * _by_pair(new, KEYS_FIRST)
    merged = tl.fma(acc, _by_pair(old, KEYS_FIRST), added)
    acc = tl.where(_by_pair(is_seen, KEYS_FIRST), merged, acc)
    return tl.where(is_seen, new_peak, peak), total, acc


@triton.jit(do_not_specialize=["table_stride"])
def _attend_kernel(
    q, sinks, kv_pages, page_table, kv_scales, blocks, slots, bases, seen, query_positions, out,
    block_of, first_of, last_of, count_of, store_of, done, partial, peaks, totals, scale,
    table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, REST: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUES_AT: tl.constexpr, ROW: tl.constexpr,
    WINDOW: tl.constexpr, CHUNKED: tl.constexpr, SOFTCAP: tl.constexpr, PAGE: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, PAIR_PARTS: tl.constexpr, PAIRS: tl.constexpr,
    STORED_PAIRS: tl.constexpr, DIM_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr, KEYS: tl.constexpr,
    KEYS_FIRST: tl.constexpr,
    RUNS: tl.constexpr, EXACT: tl.constexpr, MLA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend from the tokens of a block to all of its keys or, with RUNS, to a run of chunks.

    PARTS: programs that share a block's value dimensions; PAIR_PARTS: its pairs. A key has DIM
    numbers and REST more, which are multiplied after them. A stored row has ROW numbers for each KV
    head; its key begins it, and its value begins at VALUES_AT. With KEYS_FIRST, keys and value
    dimensions are the first operands of products, and pairs the second."""
    may_follow(PDL)
    part, kv_head = tl.program_id(0) % PARTS, tl.program_id(0) // (PARTS * PAIR_PARTS)
    first_pair = tl.program_id(0) // PARTS % PAIR_PARTS * PAIRS
    its_block = tl.program_id(1)
    first_chunk, last_chunk, count, store = 0, 0, 1, 0
    if RUNS:
        run = tl.program_id(1)
        its_block = tl.load(block_of + run)
        if its_block < 0:
            wait_for_writer(PDL)
            return
        first_chunk, last_chunk = tl.load(first_of + run), tl.load(last_of + run)
        count, store = tl.load(count_of + run), tl.load(store_of + run)
    group: tl.constexpr = HEADS // KV_HEADS
    keys_axis: tl.constexpr = 0 if KEYS_FIRST else 1
    pair, dim = first_pair + tl.arange(0, PAIRS), tl.arange(0, DIM_BLOCK)
    rest = DIM + tl.arange(0, REST_BLOCK)
    value_dim = part * VALUE_BLOCK + tl.arange(0, VALUE_BLOCK)
    offset, head = pair // group, kv_head * group + pair % group
    block = blocks + its_block * BLOCK_FIELDS
    wait_for_writer(PDL)

    size = tl.load(block + 2)
    if size <= 0:
        return
    slot, token = tl.load(block).to(tl.int64), tl.load(block + 1).to(tl.int64)
    start = tl.load(block + 3)
    # A row may end in padding: keys past its last token were never stored.
    is_mine = (offset < size) & (offset < TOKENS)
    real = tl.load(slots + token + offset, mask=is_mine, other=0) > 0
    length = tl.max(tl.where(real, start + offset + 1, 0), axis=0)
    query_position = start + offset
    if seen is not None:
        base, bits = load_branches(bases, seen, token + offset, start + offset, real)
        tree_start = tl.min(tl.where(real, base, length), axis=0)  # all see all keys before
        last_base, any_bits = union_of(base, bits)
        query_position = tl.load(query_positions + token + offset, mask=real, other=0)
    low, begin = start * 0, start * 0
    if WINDOW is not None:
        since = first_seen(query_position, WINDOW, CHUNKED)  # the first key that each token sees
        low = tl.min(tl.where(real, since, length), axis=0)
        begin = low // KEYS * KEYS
    all_begin, last_of_all = begin, chunk_of(tl.maximum(length - 1, 0)) + 1
    last_of_all = tl.where(length > 0, last_of_all, 0)
    if RUNS:
        begin = tl.maximum(begin, chunk_begin(first_chunk))
        length = tl.minimum(length, chunk_begin(last_chunk))
    pages = page_table + slot * table_stride
    key = begin + tl.arange(0, KEYS)
    page = tl.load(pages + key // PAGE, mask=key < length, other=0)
    q_at = q + ((token + offset) * HEADS + head)[:, None] * (DIM + REST)
    query = tl.load(q_at + dim[None, :], mask=real[:, None] & (dim < DIM)[None, :], other=0.0)
    query = as_query(query, kv_pages)  # [pairs, dim]
    rest_query = query
    if REST > 0:
        it_is = real[:, None] & (rest < DIM + REST)[None, :]
        rest_query = as_query(tl.load(q_at + rest[None, :], mask=it_is, other=0.0), kv_pages)
    k_scale, v_scale = load_kv_scales(kv_scales, MLA)
    scale *= k_scale

    k_pages = kv_pages + kv_head * ROW
    v_pages = k_pages + VALUES_AT
    all_peak, all_total = _empty_softmax(sinks, head, offset < TOKENS, PAIRS)
    all_acc = _no_values(PAIRS, VALUE_BLOCK, KEYS_FIRST)
    peak = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    acc = all_acc
    chunk = chunk_of(begin)
    end = chunk_begin(chunk + 1)
    # Where the results of a chunk are stored, if several programs share the block's chunks.
    stored = (kv_head * STORED_PAIRS + pair).to(tl.int64)
    beside = (kv_head * (PARTS - 1) + part) * STORED_PAIRS  # every part has its own peaks
    is_stored = real & (pair < STORED_PAIRS)
    is_value = _across_pairs(value_dim < VALUE_DIM, KEYS_FIRST)
    its_dim = _across_pairs(value_dim, KEYS_FIRST)
    within = _by_pair(is_stored, KEYS_FIRST) & is_value
    for first in tl.range(begin, length, KEYS):
        key = first + tl.arange(0, KEYS)
        in_page = tl.arange(0, KEYS) % PAGE if KEYS % PAGE == 0 else key % PAGE
        source = page.to(tl.int64) * (PAGE * KV_HEADS * ROW) + in_page * (KV_HEADS * ROW)
        known = (key < length) & (key >= low)
        if seen is not None:
            known = known & sees(key, last_base, any_bits)
        present = known[:, None] & (dim < DIM)[None, :]
        keys = tl.load(k_pages + (source[:, None] + dim[None, :]), mask=present, other=0.0)
        keys = numbers(keys, query.dtype)
        present = known[:, None] & (value_dim < VALUE_DIM)[None, :]
        values = v_pages + (source[:, None] + value_dim[None, :])
        values = numbers(tl.load(values, mask=present, other=0.0), query.dtype)
        # The pages of the next tile are known one tile ahead, so that its loads can run ahead.
        page = tl.load(pages + (key + KEYS) // PAGE, mask=key + KEYS < length, other=0)
        score = _scores(query, keys, None, KEYS_FIRST)
        if REST > 0:
            inner = known[:, None] & (rest < DIM + REST)[None, :]
            others = tl.load(k_pages + (source[:, None] + rest[None, :]), mask=inner, other=0.0)
            others = numbers(others, query.dtype)
            score = _scores(rest_query, others, score, KEYS_FIRST)
        unit = scale
        if SOFTCAP is not None:
            score, unit = tanh(score * scale), SOFTCAP * LOG2E
        if seen is not None:
            if first + KEYS > tree_start:  # the tile reaches into a tree
                its_base, its_bits = _by_pair(base, KEYS_FIRST), _by_pair(bits, KEYS_FIRST)
                mine = sees(_across_pairs(key, KEYS_FIRST), its_base, its_bits)
                mine = mine & _across_pairs(known, KEYS_FIRST)
                score = tl.where(mine, score, float("-inf"))
        elif first + KEYS > start + 1:  # the tile crosses the diagonal
            last_seen = _by_pair(start + offset, KEYS_FIRST)
            score = tl.where(_across_pairs(key, KEYS_FIRST) <= last_seen, score, float("-inf"))
        if WINDOW is not None:
            is_before = _across_pairs(key, KEYS_FIRST) < _by_pair(since, KEYS_FIRST)
            score = tl.where(is_before, float("-inf"), score)
        new_peak = tl.maximum(peak, tl.max(score, axis=keys_axis) * unit)
        level = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(tl.fma(score, unit, -_by_pair(level, KEYS_FIRST)))
        shrink = tl.exp2(peak - level)
        total = total * shrink + _sum_of_weights(weight, keys_axis, EXACT)
        acc = acc * _by_pair(shrink, KEYS_FIRST)
        acc = _sums_of_values(weight.to(values.dtype), values, acc, KEYS_FIRST)
        peak = new_peak
        if (first + KEYS >= end) | (first + KEYS >= length):
            if RUNS:  # noqa: SIM102  decided at compile time
                if count > 1:
                    at = (store + chunk) * (KV_HEADS * STORED_PAIRS) + stored
                    if KEYS_FIRST:
                        to_at = partial + _by_pair(at * VALUE_DIM, KEYS_FIRST) + its_dim
                        tl.store(to_at, acc, mask=within)
                    else:
                        _store_in_halves(
                            partial + at * VALUE_DIM, acc, is_stored, part * VALUE_BLOCK, VALUE_DIM,
                            PAIRS, VALUE_BLOCK,
                        )  # fmt: skip
                    at += (store + chunk) * (KV_HEADS * STORED_PAIRS) * (PARTS - 1) + beside
                    tl.store(peaks + at, peak, mask=is_stored)
                    tl.store(totals + at, total, mask=is_stored)
            all_peak, all_total, all_acc = _merge(
                all_peak, all_total, all_acc, peak, total, acc, KEYS_FIRST
            )
            chunk += 1
            end = chunk_begin(chunk + 1)
            peak = tl.full([PAIRS], float("-inf"), tl.float32)
            total = tl.zeros([PAIRS], tl.float32)
            acc = _no_values(PAIRS, VALUE_BLOCK, KEYS_FIRST)
    if RUNS:  # noqa: SIM102  decided at compile time
        if count > 1:
            tl.debug_barrier()  # all writes of the program, then the count that publishes them
            done += its_block * (KV_HEADS * PARTS * PAIR_PARTS) + tl.program_id(0)
            if tl.atomic_add(done, 1, sem="acq_rel") != count - 1:
                return
            tl.store(done, 0)  # for the next layer
            tl.debug_barrier()
            all_peak, all_total = _empty_softmax(sinks, head, offset < TOKENS, PAIRS)
            all_acc = _no_values(PAIRS, VALUE_BLOCK, KEYS_FIRST)
            # The loads of the next chunks run ahead.
            for each in tl.range(chunk_of(all_begin), last_of_all, num_stages=3):
                at = (store + each) * (KV_HEADS * STORED_PAIRS) + stored
                from_at = partial + _by_pair(at * VALUE_DIM, KEYS_FIRST) + its_dim
                its_acc = tl.load(from_at, mask=within, other=0.0)
                at += (store + each) * (KV_HEADS * STORED_PAIRS) * (PARTS - 1) + beside
                its_peak = tl.load(peaks + at, mask=is_stored, other=float("-inf"))
                its_total = tl.load(totals + at, mask=is_stored, other=0.0)
                all_peak, all_total, all_acc = _merge(
                    all_peak, all_total, all_acc, its_peak, its_total, its_acc, KEYS_FIRST
                )
    out_at = out + _by_pair(((token + offset) * HEADS + head) * VALUE_DIM, KEYS_FIRST) + its_dim
    inside = _by_pair(is_mine, KEYS_FIRST) & is_value
    result = all_acc / _by_pair(tl.where(all_total > 0, all_total, 1.0), KEYS_FIRST) * v_scale
    result = tl.where(_by_pair(real, KEYS_FIRST), result, 0.0)
    tl.store(out_at, result.to(out.dtype.element_ty), mask=inside)


def attend(
    q: Tensor,  # [T, heads, head_dim]
    sinks: Tensor | None,
    kv: PagedKv,
    plan: FixedPlan,
    heads: Heads,
) -> Tensor:
    """Attend from each token to the positions of its slot up to its own, the last `window` of them,
    or those of its branch -> [T, heads, value_dim]; padding gets zeros."""
    num_heads, kv_heads, dim, value_dim = (
        heads.num_heads, heads.num_kv_heads, heads.head_dim, heads.value_dim
    )  # fmt: skip
    runs, pairs = plan.runs, plan.size * (num_heads // kv_heads)
    parts, pair_parts = value_parts(heads), pair_parts_of(pairs, heads)
    shape, rest = shape_for(min(pairs, most_pairs(heads)), dim, q.dtype), 0
    values_at, row = dim, dim + value_dim
    if heads.mla is not None:  # keys are [rope_dim, latent], and the latent is the value
        rest, row, values_at = value_dim, dim, dim - value_dim
    out = torch.empty(len(q), num_heads, value_dim, dtype=q.dtype, device=q.device)
    unit = LOG2E.value if heads.softcap is None else 1 / heads.softcap
    launch(
        _attend_kernel,
        (kv_heads * pair_parts * parts, len(plan.blocks) if runs is None else len(runs.block)),
        q, sinks, *kv, plan.blocks, plan.tokens.slots, *(plan.branches or NO_BRANCHES), out,
        *(runs or (None,) * len(KeyRuns._fields)), heads.scale * unit, kv.page_table.stride(0),
        HEADS=num_heads, KV_HEADS=kv_heads, DIM=dim - rest, REST=rest, VALUE_DIM=value_dim,
        VALUES_AT=values_at, ROW=row,
        WINDOW=heads.window, CHUNKED=heads.is_chunked, SOFTCAP=heads.softcap,
        PAGE=kv.pages.shape[1], TOKENS=plan.size, PARTS=parts, PAIR_PARTS=pair_parts,
        PAIRS=shape.pairs, STORED_PAIRS=pairs, DIM_BLOCK=padded_dim(dim - rest),
        REST_BLOCK=padded_dim(rest), VALUE_BLOCK=value_block(value_dim, shape),
        KEYS=shape.keys, KEYS_FIRST=shape.keys_first,
        RUNS=runs is not None, EXACT=q.dtype is torch.float32, MLA=heads.mla is not None,
        num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
    return out


def shape_for(pairs: int, dim: int, dtype: torch.dtype) -> FixedShape:
    """Return the launch shape; keys follow from the model alone."""
    dim = padded_dim(dim)
    if dtype.itemsize > 2:  # scalar multiply-adds, for exactness rather than speed
        return FixedShape(triton.next_power_of_2(max(16, pairs)), 16, 4, 2)
    keys = 64 if dim <= 256 else 32
    if pairs <= FEWEST_PAIRS and keys == FIRST_OPERAND:
        pairs = triton.next_power_of_2(max(SECOND_OPERAND, pairs))
        return FixedShape(pairs, keys, 4, 3 if dim <= 128 else 2, keys_first=True)
    if pairs <= FEW_PAIRS:  # two programs share a multiprocessor
        return FixedShape(FEW_PAIRS, keys, 4, 2)
    return FixedShape(MANY_PAIRS, keys, 8, 3 if dim <= 128 and shared_memory() >= 160 << 10 else 2)


def value_block(value_dim: int, shape: FixedShape) -> int:
    """Return the value dimensions of a program, as many as `wgmma` takes of its first operand."""
    fewest = FIRST_OPERAND if shape.keys_first else 1
    return min(VALUE_DIMS, max(fewest, padded_dim(value_dim)))
