"""Latent heads, in expanded form: tokens of one step attend to each other by keys and values that
are made of their latents for each head.

A pair of tokens costs a head 320 multiply-adds in DeepSeek's shape and 1,088 in absorbed form, but
the keys and values are as much work as bringing queries and results there and back. So it is for
steps in which a row may be long, and for what is in the step alone: keys stored before are seen in
absorbed form (latent.py), and what came of them is where the running softmax begins here.

Rows are ragged and packed, and cut into blocks by prefill's plan. A program takes one head and a
block, or a part of it, and walks the row's tokens from its first one on: how a row is cut, and so
how its sums are rounded, does not depend on where it stands in the step. A row of one token is a
few multiply-adds. The grid follows from the padded sizes alone.

Padding gets zeros, and nothing of it is read. Nor is what was seen before by one that saw nothing.
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

LEAST = 256  # tokens of the longest row that a step could have
MAX_DIM = 128  # of what the tiles hold; larger heads are seen in pages alone


@triton.jit(do_not_specialize=["num_blocks", "parts"])
def _attend_kernel(
    q, query, own, keys, values, blocks, sums, out, num_blocks, parts, q_stride, scale,
    HEADS: tl.constexpr, PLAIN: tl.constexpr, TURNED: tl.constexpr, LATENT: tl.constexpr,
    RESULT: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
    TURN: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a part of a block of tokens one head; blocks that see most come first."""
    may_follow(PDL)
    part, block = tl.program_id(0) % parts, tl.program_id(0) // parts % num_blocks
    head = tl.program_id(0) // (parts * num_blocks)
    lane, other = tl.arange(0, QUERIES), tl.arange(0, KEYS)
    dim, turn, width = tl.arange(0, DIM), tl.arange(0, TURN), tl.arange(0, WIDTH)
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
        _alone(
            q + first64 * q_stride + head * (PLAIN + TURNED),
            query + (first64 * HEADS + head) * (TURNED + LATENT),
            keys + (first64 * HEADS + head) * PLAIN, own + first64 * (TURNED + LATENT),
            values + (first64 * HEADS + head) * RESULT, sums + first64 * HEADS + head,
            out + (first64 * HEADS + head) * RESULT, dim, turn, width, scale,
            PLAIN, TURNED, RESULT,
        )  # fmt: skip
        return
    real = token < last

    plain_inside = real[:, None] & (dim < PLAIN)[None, :]
    q += first64 * q_stride + head * (PLAIN + TURNED)
    q_plain = tl.load(q + lane[:, None] * q_stride + dim[None, :], mask=plain_inside, other=0.0)
    turn_inside = real[:, None] & (turn < TURNED)[None, :]
    query += (first64 * HEADS + head) * (TURNED + LATENT)
    q_turned = query + lane[:, None] * (HEADS * (TURNED + LATENT)) + turn[None, :]
    q_turned = tl.load(q_turned, mask=turn_inside, other=0.0)

    # what the rows before the step came to, as if it were one key
    peak = tl.load(sums + (first64 + lane) * HEADS + head, mask=real, other=float("-inf"))
    total = tl.where(peak > float("-inf"), 1.0, 0.0)
    out += (first64 * HEADS + head) * RESULT + lane[:, None] * (HEADS * RESULT) + width[None, :]
    acc = (total > 0)[:, None] & (width < RESULT)[None, :]
    acc = tl.load(out, mask=acc, other=0.0).to(tl.float32)
    for tile in tl.range(since, last, KEYS):
        key, tile64 = tile + other, tile * one
        stored = (key < end)[:, None]
        at = keys + (tile64 * HEADS + head) * PLAIN + other[:, None] * (HEADS * PLAIN)
        k_plain = tl.load(at + dim[None, :], mask=stored & (dim < PLAIN)[None, :], other=0.0)
        at = own + tile64 * (TURNED + LATENT) + other[:, None] * (TURNED + LATENT)
        k_turned = tl.load(at + turn[None, :], mask=stored & (turn < TURNED)[None, :], other=0.0)
        at = values + (tile64 * HEADS + head) * RESULT + other[:, None] * (HEADS * RESULT)
        value = tl.load(at + width[None, :], mask=stored & (width < RESULT)[None, :], other=0.0)
        score = tl.dot(q_plain, k_plain.T, input_precision=PRECISION)
        score = tl.dot(q_turned, k_turned.T, score, input_precision=PRECISION)
        if tile + KEYS > first:  # not all see all of the tile
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
    inside = (token < end)[:, None] & (width < RESULT)[None, :]
    tl.store(out, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _alone(
    q, query, keys, own, values, sums, out, dim, turn, width, scale,
    PLAIN: tl.constexpr, TURNED: tl.constexpr, RESULT: tl.constexpr,
):  # fmt: skip
    """Of a row with one token: all are given as of its head."""
    score = _products(q + dim, keys + dim, dim < PLAIN)
    score = (score + _products(query + turn, own + turn, turn < TURNED)) * scale
    before = tl.load(sums)
    peak = tl.maximum(before, score)
    seen, weight = tl.exp2(before - peak), tl.exp2(score - peak)
    inside = width < RESULT
    result = tl.load(values + width, mask=inside, other=0.0).to(tl.float32) * weight
    past = tl.load(out + width, mask=inside, other=0.0).to(tl.float32)
    past = tl.where(seen > 0, past * seen, 0.0)  # anything where nothing was seen
    result = (result + past) / (weight + seen)
    tl.store(out + width, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _products(one, other, inside):
    """Added up"""
    one = tl.load(one, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(one * tl.load(other, mask=inside, other=0.0).to(tl.float32), axis=0)


def pays(num_tokens: int, rows: Rows, shape: MlaShape) -> bool:
    """Whether ragged rows of so many tokens, padding included, are seen in this form."""
    if max(shape.nope_dim, shape.v_head_dim) > MAX_DIM:
        return False
    return num_tokens - len(rows.slots) >= LEAST


def attend(
    q: Tensor,  # [T, heads * (plain + turned)], of which what is plain is read
    query: Tensor,  # [T, heads, turned + latent], of which what is turned is read
    own: Tensor,  # [T, turned + latent]: the step's rows
    weights: MlaWeights,
    blocks: Tensor,  # from prefill.cut_rows
    sums: Tensor,  # [T, heads]: of what was seen before, log2 of its softmax's sum; -inf: nothing
    out: Tensor,  # [T, heads, result]: what came of that
    heads: Heads,
) -> None:
    """Into `out`: what comes of it and the step's own rows together."""
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
        HEADS=heads.num_heads, PLAIN=shape.nope_dim, TURNED=shape.rope_dim,
        LATENT=heads.value_dim, RESULT=shape.v_head_dim, QUERIES=tile.rows, KEYS=tile.keys,
        DIM=dims[0], TURN=dims[1], WIDTH=dims[2],
        PRECISION="ieee" if q.dtype is torch.float32 else None,
        num_warps=tile.warps, num_stages=tile.stages, **overlap(),
    )  # fmt: skip


def tile_for(dim: int, value_dim: int, dtype: torch.dtype) -> PrefillTile:
    if dtype.itemsize > 2:  # plain multiply-adds, for exactness; speed is no aim
        chosen = PrefillTile(rows=32, keys=32, warps=4, stages=2)
    else:
        chosen = PrefillTile(rows=128, keys=64, warps=8, stages=3)
    return fitted(chosen, dim, value_dim, dtype, shared_memory())
