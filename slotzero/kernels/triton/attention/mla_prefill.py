"""MLA prefill in expanded form: tokens of one step attend to each other with per-head keys and
values computed from their latents.

In DeepSeek's shape, a pair of tokens costs a head 320 multiply-adds in expanded form and 1,088 in
absorbed form, but computing the keys and values costs as much as transforming queries and results
in absorbed form. So this kernel is for steps in which a row may be long, and for the step's own
tokens only: keys stored before the step are attended to in absorbed form (mla.py), and that result
is the initial state of the running softmax here.

Rows are ragged and packed, and cut into blocks by prefill's plan. A program takes one head and a
block, or a part of it, and walks the row's tokens from the first one on: how a row is cut, and so
how its sums are rounded, does not depend on its place in the step. A row of one token is only a few
multiply-adds. The grid follows from the padded sizes alone.

Padding gets zeros and is never read. Nor is the absorbed result of a token without earlier keys.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.attention import prefill
from slotzero.kernels.triton.attention.prefill import BLOCK_FIELDS, PrefillTile, fitted, padded_dim
from slotzero.kernels.triton.attention.verify import softmax_level
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.activation import LOG2E
from slotzero.kernels.types import Heads, MlaShape, MlaWeights, Rows

LEAST = 256  # tokens that the longest row of the step could have, at least
MAX_DIM = 128  # largest head that the tiles hold; larger ones use absorbed form only


@triton.jit(do_not_specialize=["num_blocks", "parts"])
def _attend_kernel(
    q, query, own, keys, values, blocks, sums, out, num_blocks, parts, q_stride, scale,
    HEADS: tl.constexpr, NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, LATENT: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    ROPE_BLOCK: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute one head of a part of a block of tokens; the longest contexts come first."""
    may_follow(PDL)
    part, block = tl.program_id(0) % parts, tl.program_id(0) // parts % num_blocks
    head = tl.program_id(0) // (parts * num_blocks)
    lane, other = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    dim, rope, width = tl.arange(0, DIM), tl.arange(0, ROPE_BLOCK), tl.arange(0, WIDTH)
    wait_for_writer(PDL)

    block = blocks + block * BLOCK_FIELDS
    slot, begin, size = tl.load(block), tl.load(block + 1), tl.load(block + 2)
    since = begin - (tl.load(block + 3) - tl.load(block + 4))  # the row's first token
    first, end = begin + part * QUERIES, tl.minimum(begin + (part + 1) * QUERIES, begin + size)
    if first >= end:
        return
    token, first64, one = first + lane, first.to(tl.int64), tl.full([], 1, tl.int64)
    last = tl.where(slot > 0, end, 0)
    if last == since + 1:
        _attend_single(
            q + first64 * q_stride + head * (NOPE_DIM + ROPE_DIM),
            query + (first64 * HEADS + head) * (ROPE_DIM + LATENT),
            keys + (first64 * HEADS + head) * NOPE_DIM, own + first64 * (ROPE_DIM + LATENT),
            values + (first64 * HEADS + head) * V_HEAD_DIM, sums + first64 * HEADS + head,
            out + (first64 * HEADS + head) * V_HEAD_DIM, dim, rope, width, scale,
            NOPE_DIM, ROPE_DIM, V_HEAD_DIM,
        )  # fmt: skip
        return
    real = token < last

    nope_inside = real[:, None] & (dim < NOPE_DIM)[None, :]
    q += first64 * q_stride + head * (NOPE_DIM + ROPE_DIM)
    q_nope = tl.load(q + lane[:, None] * q_stride + dim[None, :], mask=nope_inside, other=0.0)
    rope_inside = real[:, None] & (rope < ROPE_DIM)[None, :]
    query += (first64 * HEADS + head) * (ROPE_DIM + LATENT)
    q_rope = query + lane[:, None] * (HEADS * (ROPE_DIM + LATENT)) + rope[None, :]
    q_rope = tl.load(q_rope, mask=rope_inside, other=0.0)

    # The result over the rows stored before the step enters like one key.
    peak = tl.load(sums + (first64 + lane) * HEADS + head, mask=real, other=float("-inf"))
    total = tl.where(peak > float("-inf"), 1.0, 0.0)
    out += (
        (first64 * HEADS + head) * V_HEAD_DIM
        + lane[:, None] * (HEADS * V_HEAD_DIM)
        + width[None, :]
    )
    acc = (total > 0)[:, None] & (width < V_HEAD_DIM)[None, :]
    acc = tl.load(out, mask=acc, other=0.0).to(tl.float32)
    for tile in tl.range(since, last, KEYS):
        key, tile64 = tile + other, tile * one
        stored = (key < end)[:, None]
        at = keys + (tile64 * HEADS + head) * NOPE_DIM + other[:, None] * (HEADS * NOPE_DIM)
        k_nope = tl.load(at + dim[None, :], mask=stored & (dim < NOPE_DIM)[None, :], other=0.0)
        at = own + tile64 * (ROPE_DIM + LATENT) + other[:, None] * (ROPE_DIM + LATENT)
        k_rope = tl.load(at + rope[None, :], mask=stored & (rope < ROPE_DIM)[None, :], other=0.0)
        at = values + (tile64 * HEADS + head) * V_HEAD_DIM + other[:, None] * (HEADS * V_HEAD_DIM)
        value = tl.load(at + width[None, :], mask=stored & (width < V_HEAD_DIM)[None, :], other=0.0)
        score = tl.dot(q_nope, k_nope.T, input_precision=PRECISION)
        score = tl.dot(q_rope, k_rope.T, score, input_precision=PRECISION)
        if tile + KEYS > first:  # the tile crosses the diagonal
            score = tl.where(key[None, :] <= token[:, None], score, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(score, axis=1) * scale)
        level = softmax_level(new_peak)
        weight = tl.exp2(score * scale - level[:, None])
        shrink = tl.exp2(peak - level)
        total = total * shrink + tl.sum(weight, axis=1)
        acc = acc * shrink[:, None]
        acc = tl.dot(weight.to(value.dtype), value, acc, input_precision=PRECISION)
        peak = new_peak
    result = tl.where(real[:, None], acc / tl.where(real, total, 1.0)[:, None], 0.0)
    inside = (token < end)[:, None] & (width < V_HEAD_DIM)[None, :]
    tl.store(out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _attend_single(
    q, query, keys, own, values, sums, out, dim, rope, width, scale,
    NOPE_DIM: tl.constexpr, ROPE_DIM: tl.constexpr, V_HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Compute one head of a row with a single token; all pointers are those of that head."""
    score = _dot(q + dim, keys + dim, dim < NOPE_DIM)
    score = (score + _dot(query + rope, own + rope, rope < ROPE_DIM)) * scale
    before = tl.load(sums)
    peak = tl.maximum(before, score)
    seen, weight = tl.exp2(before - peak), tl.exp2(score - peak)
    inside = width < V_HEAD_DIM
    result = tl.load(values + width, mask=inside, other=0.0).to(tl.float32) * weight
    past = tl.load(out + width, mask=inside, other=0.0).to(tl.float32)
    past = tl.where(seen > 0, past * seen, 0.0)  # unwritten memory if there were no earlier keys
    result = (result + past) / (weight + seen)
    tl.store(out + width, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _dot(one, other, inside):
    """Return the dot product of two vectors."""
    one = tl.load(one, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(one * tl.load(other, mask=inside, other=0.0).to(tl.float32), axis=0)


def pays(num_tokens: int, rows: Rows, shape: MlaShape) -> bool:
    """Return whether ragged rows with `num_tokens` tokens, padding included, use this form."""
    if max(shape.nope_dim, shape.v_head_dim) > MAX_DIM:
        return False
    return num_tokens - len(rows.slots) >= LEAST


def attend(
    q: Tensor,  # [T, heads * (nope_dim + rope_dim)]; the nope part is read
    query: Tensor,  # [T, heads, rope_dim + latent]; the rope part is read
    own: Tensor,  # [T, rope_dim + latent]: the step's rows
    weights: MlaWeights,
    blocks: Tensor,  # from prefill.cut_rows
    sums: Tensor,  # [T, heads]: log2 of the softmax sum over earlier keys; -inf: there are none
    out: Tensor,  # [T, heads, v_head_dim]: the result over earlier keys
    heads: Heads,
) -> None:
    """Merge attention over the step's own rows into `out`."""
    assert heads.mla is not None
    shape, latents = heads.mla, own[:, heads.mla.rope_dim :]
    keys, values = (torch.mm(latents, up.flatten(0, 1).t()) for up in weights[1:])
    dims = padded_dim(shape.nope_dim), padded_dim(shape.rope_dim), padded_dim(shape.v_head_dim)
    tile = tile_for(dims[0] + dims[1], dims[2], q.dtype)
    parts = triton.cdiv(prefill.block_tokens(1), tile.rows)
    launch(
        _attend_kernel, (len(blocks) * parts * heads.num_heads,),
        q, query, own, keys, values, blocks, sums, out,
        len(blocks), parts, q.stride(0), heads.scale * LOG2E.value,
        HEADS=heads.num_heads, NOPE_DIM=shape.nope_dim, ROPE_DIM=shape.rope_dim,
        LATENT=heads.value_dim, V_HEAD_DIM=shape.v_head_dim, QUERIES=tile.rows, KEYS=tile.keys,
        DIM=dims[0], ROPE_BLOCK=dims[1], WIDTH=dims[2],
        PRECISION="ieee" if q.dtype is torch.float32 else None,
        num_warps=tile.warps, num_stages=tile.stages, **overlap(),
    )  # fmt: skip


def tile_for(dim: int, value_dim: int, dtype: torch.dtype) -> PrefillTile:
    if dtype.itemsize > 2:  # scalar multiply-adds, for exactness rather than speed
        chosen = PrefillTile(rows=32, keys=32, warps=4, stages=2)
    else:
        chosen = PrefillTile(rows=128, keys=64, warps=8, stages=3)
    return fitted(chosen, dim, value_dim, dtype, shared_memory())
