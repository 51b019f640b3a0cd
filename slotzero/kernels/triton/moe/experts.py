"""Grouped products of a mixture of experts (MoE): every row is multiplied by its expert's weight.

Rows are sorted by expert, and those of one expert are cut into blocks, so that a block reads one
weight. The grid has as many blocks as any routing could need; the device computes the expert and
the rows of each block, and an unused block returns at once. Rows without an expert come last and
belong to no block: they are neither computed nor read.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.activation import activate
from slotzero.kernels.triton.linear.elementwise import gate
from slotzero.kernels.triton.linear.linear_quantized import is_gated_at_once
from slotzero.kernels.triton.moe import experts_quantized
from slotzero.kernels.types import Activation
from slotzero.kernels.weights import JoinedWeight, LinearWeight, QuantizedWeight

SORTED_BLOCK, LEAST_SORTED = 2048, 512  # choices examined at a time: at most, at least
PLAN_BLOCKS = 32  # blocks per program of `sort`
FEW_EACH, FEW_ROWS = 4, 8  # up to FEW_EACH rows per expert on average, a block has FEW_ROWS
ADDED_BLOCK = 1024


class ExpertTile(NamedTuple):
    rows: int  # per block
    features: int
    depth: int
    stages: int
    num_warps: int


class Order(NamedTuple):
    """Choices, that is (token, expert) pairs, sorted by expert, and how they are multiplied."""

    order: Tensor  # [choices] int32: the choice, token * top_k + i, at each sorted place
    blocks: Tensor  # [blocks, 3] int32: expert or -1, first row, number of rows
    tile: ExpertTile
    most: int  # rows in a block
    is_fixed: bool  # in one order of summation for any number of rows


@triton.jit
def _sort_kernel(experts, order, starts, num, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Sort choices: one program per expert, and one for choices of no expert. It counts the choices
    of lower experts, then writes its own in order."""
    may_follow(PDL)
    expert, lane = tl.program_id(0), tl.arange(0, BLOCK)
    wait_for_writer(PDL)
    before = tl.zeros([BLOCK], tl.int32)
    for first in range(0, num, BLOCK):
        its = tl.load(experts + first + lane, mask=first + lane < num, other=expert)
        before += (its < expert).to(tl.int32)
    place = tl.sum(before, axis=0)
    tl.store(starts + expert, place)
    for first in range(0, num, BLOCK):
        its = tl.load(experts + first + lane, mask=first + lane < num, other=-1)
        mine = (its == expert).to(tl.int32)
        at = place + tl.cumsum(mine, axis=0) - 1
        tl.store(order + at, first + lane, mask=mine > 0)
        place += tl.sum(mine, axis=0)


@triton.jit(do_not_specialize=["num_blocks"])
def _blocks_kernel(
    starts, blocks, num_blocks,
    EXPERTS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute the blocks. starts [experts + 1]: expert e has rows [starts[e], starts[e + 1])."""
    may_follow(PDL)
    block, expert = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS), tl.arange(0, LANES)
    wait_for_writer(PDL)
    start = tl.load(starts + expert, mask=expert < EXPERTS, other=0)
    end = tl.load(starts + expert + 1, mask=expert < EXPERTS, other=0)
    past = tl.cumsum((end - start + ROWS - 1) // ROWS, 0)  # the block after each expert's last
    before = (past[None, :] <= block[:, None]) & (expert < EXPERTS)[None, :]
    mine = tl.sum(before.to(tl.int32), axis=1)
    begin = tl.max(tl.where(before, past[None, :], 0), axis=1)
    is_real = mine < EXPERTS
    first = tl.load(starts + mine, mask=is_real, other=0) + (block - begin) * ROWS
    size = tl.minimum(tl.load(starts + mine + 1, mask=is_real, other=0) - first, ROWS)
    kept = block < num_blocks
    tl.store(blocks + block * 3, tl.where(is_real, mine, -1), mask=kept)
    tl.store(blocks + block * 3 + 1, first, mask=kept)
    tl.store(blocks + block * 3 + 2, size, mask=kept)


@triton.jit
def _product_kernel(
    x, weights, biases, order, blocks, out, num_out, x_stride, out_stride, bias_stride,
    INNER: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    EVEN: tl.constexpr, BY_TOKEN: tl.constexpr, SHARED: tl.constexpr, ACTIVATION: tl.constexpr,
    FIXED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by its expert's weight. By token, x has one row per token, which
    SHARED choices share, and the result is sorted by expert; otherwise x is sorted by expert and
    the result is in the order of choices. FIXED: the weight is the first operand, so that any
    number of rows takes the same matrix instructions."""
    may_follow(PDL)
    block = blocks + tl.program_id(1) * 3
    n, m = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES), tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    wait_for_writer(PDL)
    expert = tl.load(block).to(tl.int64)
    if expert < 0:
        return
    first, size = tl.load(block + 1), tl.load(block + 2)
    choice = tl.load(order + first + m, mask=m < size, other=0).to(tl.int64)
    here = (first + m).to(tl.int64)
    gated: tl.constexpr = ACTIVATION is not None
    source, target = (choice // SHARED, here) if BY_TOKEN else (here, choice)
    parts: tl.constexpr = 2 if gated else 1
    weight = weights + expert * num_out * parts * INNER
    at = weight + n[None, :].to(tl.int64) * INNER + k[:, None]  # [depth, features]
    value_offset = num_out.to(tl.int64) * INNER  # from a gate's weights to its value's
    x_at = x + source[:, None] * x_stride + k[None, :]
    acc = tl.zeros([FEATURES, ROWS] if FIXED else [ROWS, FEATURES], tl.float32)
    acc2 = acc
    for depth in tl.range(0, INNER, DEPTH, num_stages=STAGES):
        known, inside = (m < size)[:, None], (n < num_out)[None, :]
        if not EVEN:
            known = known & (depth + k < INNER)[None, :]
            inside = inside & (depth + k < INNER)[:, None]
        value = tl.load(x_at + depth, mask=known, other=0.0)
        w = tl.load(at + depth, mask=inside, other=0.0)
        acc = _multiply(value, w, acc, FIXED, PRECISION)
        if gated:
            w2 = tl.load(at + value_offset + depth, mask=inside, other=0.0)
            acc2 = _multiply(value, w2, acc2, FIXED, PRECISION)
    if FIXED:
        acc, acc2 = tl.trans(acc), tl.trans(acc2)
    feature = n[None, :]
    if biases is not None:
        bias = biases + expert * bias_stride + feature
        acc += tl.load(bias, mask=feature < num_out, other=0.0).to(tl.float32)
        if gated:
            acc2 += tl.load(bias + num_out, mask=feature < num_out, other=0.0).to(tl.float32)
    if gated:
        acc, acc2 = activate(acc, acc2, ACTIVATION)
        acc = acc * acc2
    out_at = out + target[:, None] * out_stride + feature
    inside = (m < size)[:, None] & (feature < num_out)
    tl.store(out_at, acc.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _multiply(value, w, acc, FIXED: tl.constexpr, PRECISION: tl.constexpr):
    """Add value [rows, depth] times w [depth, features] to acc, which is transposed if FIXED."""
    if FIXED:
        return tl.dot(tl.trans(w), tl.trans(value), acc, input_precision=PRECISION)
    else:  # noqa: RET505  the compiler does not see that the rest is unreachable
        return tl.dot(value, w, acc, input_precision=PRECISION)


@triton.jit
def _add_up_kernel(
    results, routing_weights, experts, out, size, none,
    TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_writer(PDL)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        choice = token * TOP_K + i
        if tl.load(experts + choice) < none:
            result = tl.load(results + choice * size + column, mask=inside, other=0.0)
            total += result.to(tl.float32) * tl.load(routing_weights + choice).to(tl.float32)
    tl.store(out + token * size + column, total.to(out.dtype.element_ty), mask=inside)


def sort(chosen: Tensor, starts: Tensor, dtype: torch.dtype, is_fixed: bool = False) -> Order:
    """Sort chosen [T, top_k], the expert of each choice or num_experts for none, and write starts
    [experts + 1]. `dtype` is that of the rows to be multiplied."""
    num_experts, num = len(starts) - 1, chosen.numel()
    tile = tile_for(num / num_experts, dtype, shared_memory(), is_fixed)
    block_rows = FEW_ROWS if num <= FEW_EACH * num_experts else tile.rows
    order = starts.new_empty(num)
    block = min(SORTED_BLOCK, max(LEAST_SORTED, triton.next_power_of_2(num)))
    launch(
        _sort_kernel, (num_experts + 1,), chosen, order, starts, num, BLOCK=block,
        num_warps=max(1, block // 512), **overlap(),
    )  # fmt: skip
    num_blocks = min(num, triton.cdiv(num, block_rows) + num_experts)
    blocks = starts.new_empty(num_blocks, 3)
    launch(
        _blocks_kernel, (triton.cdiv(num_blocks, PLAN_BLOCKS),), starts, blocks, num_blocks,
        EXPERTS=num_experts, LANES=triton.next_power_of_2(num_experts), ROWS=block_rows,
        BLOCKS=PLAN_BLOCKS, **overlap(),
    )  # fmt: skip
    return Order(order, blocks, tile, min(len(chosen), block_rows), is_fixed)


def gated(
    x: Tensor,  # [T, hidden]
    weights: LinearWeight,  # [experts, 2 * inner, hidden]: gates and then values
    chosen: Order,
    activation: Activation,
) -> Tensor:
    """Multiply by the weights of gates and values, and gate -> [choices, inner], by expert."""
    num, shared = len(chosen.order), len(chosen.order) // len(x)
    if isinstance(weights, JoinedWeight) or not is_gated_at_once(weights):
        joined = x.new_empty(num, weights.out_features)
        _product(x, weights, chosen, joined, shared, None)
        gates, values = joined.chunk(2, -1)
        return gate(gates, values, activation)
    out = x.new_empty(num, weights.out_features // 2)
    _product(x, weights, chosen, out, shared, activation)
    return out


def product(x: Tensor, weights: LinearWeight, chosen: Order) -> Tensor:
    """Multiply x, sorted by expert -> [choices, features], in the order of tokens."""
    out = x.new_empty(len(x), weights.out_features)
    _product(x, weights, chosen, out, None, None)
    return out


def add_up(results: Tensor, routing_weights: Tensor, experts: Tensor, none: int) -> Tensor:
    """Return [T, size]: the sum of results [choices, size], weighted by routing_weights [T, top_k].

    A choice of expert `none` adds nothing.
    """
    (tokens, top_k), size = routing_weights.shape, results.shape[1]
    out = results.new_empty(tokens, size)
    launch(
        _add_up_kernel, (tokens, triton.cdiv(size, ADDED_BLOCK)),
        results, routing_weights, experts, out, size, none,
        TOP_K=top_k, BLOCK=ADDED_BLOCK, **overlap(),
    )  # fmt: skip
    return out


def tile_for(
    rows_each: float, dtype: torch.dtype, memory: int, is_fixed: bool = False
) -> ExpertTile:
    """Return the tile for an average of `rows_each` rows per expert.

    `memory` is the shared memory of a program in bytes. The tiles are not tuned.
    """
    if dtype.itemsize > 2:  # scalar multiply-adds, for exactness rather than speed
        return ExpertTile(16, 32, 32, 2, 4)
    few, many = ExpertTile(16, 64, 128, 3, 4), ExpertTile(64, 128, 64, 3, 8)
    if is_fixed:  # a warpgroup has 64 features
        many = ExpertTile(64, 64, 64, 4, 4)
    chosen = few if rows_each <= 16 else many
    each = (chosen.rows + 2 * chosen.features) * chosen.depth * dtype.itemsize
    return chosen if each * chosen.stages <= memory else chosen._replace(stages=2)


def _product(
    x: Tensor,
    weights: LinearWeight,
    chosen: Order,
    out: Tensor,
    shared: int | None,
    activation: Activation | None,
) -> None:
    """Multiply rows by their experts' weights -> out. With `shared`, x has one row per token, which
    that many choices share; otherwise it is sorted by expert, see `_product_kernel`."""
    order, blocks, tile, most, is_fixed = chosen
    if isinstance(weights, JoinedWeight):
        first = 0
        for part in weights.parts:
            its = out[:, first : first + part.out_features]
            _product(x, part, chosen, its, shared, activation)
            first += part.out_features
        return
    if isinstance(weights, QuantizedWeight):
        experts_quantized.product(
            x, weights, order, blocks, most, out, shared, activation, is_fixed
        )
        return
    inner, num_out, bias = weights.data.shape[2], out.shape[1], weights.bias
    launch(
        _product_kernel, (triton.cdiv(num_out, tile.features), len(blocks)),
        x, weights.data, bias, order, blocks, out, num_out, x.stride(0), out.stride(0),
        0 if bias is None else bias.stride(0),
        INNER=inner, ROWS=tile.rows, FEATURES=tile.features, DEPTH=tile.depth,
        EVEN=inner % tile.depth == 0, BY_TOKEN=shared is not None, SHARED=shared or 1,
        ACTIVATION=activation, FIXED=is_fixed,
        PRECISION="ieee" if x.dtype is torch.float32 else None,
        STAGES=tile.stages, num_warps=tile.num_warps, enable_fp_fusion=not is_fixed, **overlap(),
    )  # fmt: skip
