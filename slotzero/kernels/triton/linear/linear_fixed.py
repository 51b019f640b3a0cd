"""Matrix products with one order of summation per weight, whatever the number of rows.

The inner dimension is cut into the shares of the given tile, which follow from the shape of the
weight alone (`shares_of`). A share is one chain of matrix instructions from its first feature to
its last, and shares are added in ascending order. In every tile the weight is the first operand and
the rows are the second, in instructions of one kind, so a tile's height, width, stages and warps
change no sum. With few rows, programs compute shares side by side, and the last to finish a tile
adds them up; with many rows one program computes them in turn.

Epilogues are those of the other products (`epilogue.py`), but sums of squares, which a norm defers,
are exact sums of 64 features each. Kernels are compiled without contraction of products and sums,
which the compiler could choose differently from tile to tile.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slotzero.kernels.triton.exact_sums import exact_sum
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    prefetch_weights,
    wait_for_writer,
)
from slotzero.kernels.triton.linear import linear_tma
from slotzero.kernels.triton.linear.epilogue import result_of
from slotzero.kernels.triton.linear.linear_tma import group_scales
from slotzero.kernels.triton.linear.operands import Operands, dot
from slotzero.kernels.triton.linear.tiles_fixed import (
    LEAST,
    SQUARED,
    FixedTile,
    is_apart,
    share_depth,
)
from slotzero.kernels.types import Activation, Normed

BAND = tl.constexpr(16)  # tiles of rows that share features while these are in the L2 cache
SUMMED, LEAST_FEATURES = tl.constexpr(SQUARED), tl.constexpr(LEAST)
PARTS = tl.constexpr(32)  # partial sums of squares that are read at a time


@triton.jit(do_not_specialize=["rows", "num_parts"])
def _fixed_kernel(
    x_box, weight_box, x, weight, x_scales, scales, bias, squares, slots, norm, out, weighted,
    squares_out, partial, arrived,
    rows, num_out, num_parts, x_stride, out_stride, eps,
    INNER: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, ACTIVATION: tl.constexpr, ADDS: tl.constexpr,
    SHARE: tl.constexpr, SHARES: tl.constexpr, APART: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one tile or, if shares are computed APART, one share of it. If it ADDS, out is the
    residual. Without boxes, tiles are loaded by address."""
    may_follow(PDL)
    gated: tl.constexpr = ACTIVATION is not None
    each: tl.constexpr = FEATURES // 2 if gated else FEATURES
    tile = tl.program_id(0)
    part, cut = _place(tile, tl.cdiv(rows, ROWS), tl.cdiv(num_out, each))
    first_m, begin = cut * ROWS, tl.program_id(1) * SHARE
    m, n = first_m + tl.arange(0, ROWS), part * each + tl.arange(0, each)
    prefetch_weights(weight, n, num_out, begin, INNER, STAGES * DEPTH, PDL)
    if gated:
        values = weight + tl.cast(num_out, tl.int64) * INNER
        prefetch_weights(values, n, num_out, begin, INNER, STAGES * DEPTH, PDL)
    wait_for_writer(PDL)

    if APART:
        acc, _ = _share(
            x_box, weight_box, x, weight, x_scales, scales, part, first_m, m, begin,
            tl.minimum(begin + SHARE, INNER), rows, num_out, x_stride,
            INNER, GROUP, FEATURES, DEPTH, STAGES, ROWS, gated,
        )  # fmt: skip
        at = partial + tl.arange(0, FEATURES)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
        at += tile * SHARES * (FEATURES * ROWS)
        tl.store(at + tl.program_id(1) * (FEATURES * ROWS), acc)
        tl.debug_barrier()  # all writes of the program, then the count that publishes them
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") < SHARES - 1:
            return
        tl.store(arrived + tile, 0)  # for the next product
        tl.debug_barrier()
        acc = tl.load(at)
        for i in tl.static_range(1, SHARES):
            acc += tl.load(at + i * (FEATURES * ROWS))
        second = acc
    else:
        acc, second = _share(
            x_box, weight_box, x, weight, x_scales, scales, part, first_m, m, 0,
            min(SHARE, INNER), rows, num_out, x_stride,
            INNER, GROUP, FEATURES, DEPTH, STAGES, ROWS, gated,
        )  # fmt: skip
        for first in tl.range(SHARE, INNER, SHARE, num_stages=1):
            added, _ = _share(
                x_box, weight_box, x, weight, x_scales, scales, part, first_m, m, first,
                tl.minimum(first + SHARE, INNER), rows, num_out, x_stride,
                INNER, GROUP, FEATURES, DEPTH, STAGES, ROWS, gated,
            )  # fmt: skip
            acc += added

    if gated and each < LEAST_FEATURES:
        result, second = tl.split(tl.permute(tl.reshape(acc, [2, each, ROWS]), (2, 1, 0)))
    else:
        result, second = tl.trans(acc), tl.trans(second)
    by_norm = None
    if squares is not None:
        by_norm = _scale_of_norm(squares, m, rows, num_parts, eps, INNER, ROWS)
    row, feature = m[:, None], n[None, :]
    inside = (row < rows) & (feature < num_out)
    at = row.to(tl.int64) * out_stride + feature
    before = None
    if ADDS:
        before = tl.load(out + at, mask=inside, other=0.0).to(tl.float32)
    if GROUP is not None:  # applied
        scales = None
    result = result_of(
        result, second, x_scales, scales, by_norm, bias, slots, before, row, feature, rows,
        num_out, ACTIVATION,
    )  # fmt: skip
    rounded = result.to(out.dtype.element_ty)
    tl.store(out + at, rounded, mask=inside)
    if norm is not None:
        wide = tl.where(inside, rounded.to(tl.float32), 0.0)
        by = tl.load(norm + feature, mask=feature < num_out, other=0.0).to(tl.float32)
        tl.store(weighted + at, (wide * by).to(out.dtype.element_ty), mask=inside)
        sums: tl.constexpr = each // SUMMED
        total = exact_sum(tl.reshape(wide * wide, [ROWS, sums, SUMMED]), 2)
        its = part * sums + tl.arange(0, sums)[None, :]
        is_there = (row < rows) & (its * SUMMED < num_out)
        tl.store(squares_out + its * rows + row, total, mask=is_there)


@triton.jit
def _place(tile, cuts, parts):
    """Return the index of a tile's features and of its rows. Tiles of BAND tiles of rows are
    neighbours, first those that share features."""
    band = tile // (BAND * parts)
    first = band * BAND
    size = tl.minimum(cuts - first, BAND)
    within = tile - first * parts
    return within // size, first + within % size


@triton.jit
def _share(
    x_box, weight_box, x, weight, x_scales, scales, part, first_m, m, begin, end, rows, num_out,
    x_stride,
    INNER: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Multiply input features [begin, end) -> [FEATURES, ROWS]; if GATED, two results for gates and
    values, or one for both if a matrix instruction has more features than each."""
    each: tl.constexpr = FEATURES // 2 if GATED else FEATURES
    joint: tl.constexpr = GATED and each < LEAST_FEATURES
    height: tl.constexpr = FEATURES if joint else each
    lane = tl.arange(0, height)
    n = part * each + (lane % each if joint else lane)
    of = n.to(tl.int64)  # row of the weight
    if joint:
        of += (lane // each) * tl.cast(num_out, tl.int64)
    acc = tl.zeros([height, ROWS], tl.float32)
    acc2 = acc
    scale, x_scale = acc, acc
    if GROUP is not None:  # scales are loaded a step ahead, which the compiler does not do
        scale, _, x_scale = group_scales(
            scales, x_scales, n, m, begin, end, rows, num_out, INNER, GROUP, False
        )
    for k in tl.range(begin, end, DEPTH, num_stages=STAGES):
        if x_box is None:
            inner = k + tl.arange(0, DEPTH)
            known = (inner < end)[:, None] & (m < rows)[None, :]
            x_at = x + m.to(tl.int64)[None, :] * x_stride + inner[:, None]
            value = tl.load(x_at, mask=known, other=0.0)
            known = (n < num_out)[:, None] & (inner < end)[None, :]
            at = weight + of[:, None] * INNER + inner[None, :]
            w = tl.load(at, mask=known, other=0.0)
            w2 = w
            if GATED and not joint:
                w2 = tl.load(at + tl.cast(num_out, tl.int64) * INNER, mask=known, other=0.0)
        else:
            value = x_box.load([first_m, k]).T
            if joint:
                w = weight_box.load([0, part * each, k]).reshape(FEATURES, DEPTH)
            else:
                w = weight_box.load([part * each, k])
            w2 = w
            if GATED and not joint:
                w2 = weight_box.load([num_out + part * each, k])
        if GROUP is None:
            acc = dot(w, value, acc)
            if GATED and not joint:
                acc2 = dot(w2, value, acc2)
        else:
            next_scale, _, next_x = group_scales(
                scales, x_scales, n, m, k + DEPTH, end, rows, num_out, INNER, GROUP, False
            )
            sums = dot(w, value, tl.zeros([height, ROWS], tl.float32))
            acc += sums * (scale[:, None] * x_scale[None, :])
            scale, x_scale = next_scale, next_x
    return acc, acc2


@triton.jit
def _scale_of_norm(squares, m, rows, num_parts, eps, INNER: tl.constexpr, ROWS: tl.constexpr):
    """Return the deferred scale of each row. Parts PARTS apart are added in order, and their sums
    exactly."""
    total = tl.zeros([PARTS, ROWS], tl.float32)
    for first in range(0, num_parts, PARTS):
        part = first + tl.arange(0, PARTS)[:, None]
        known = (part < num_parts) & (m[None, :] < rows)
        total += tl.load(squares + part * rows + m[None, :], mask=known, other=0.0)
    return 1.0 / tl.sqrt_rn(exact_sum(total, 0) / INNER + eps)


def product(
    given: Operands,
    out: Tensor,
    tile: FixedTile,
    *,
    activation: Activation | None = None,
    slots: Tensor | None = None,
    adds: bool = False,
    norm: Tensor | None = None,
    made: Normed | None = None,
) -> None:
    """Multiply rows by a weight [features, inner] -> out. If it adds, out is the residual; with a
    norm, what is made is the normed sum. With slots, rows of slot 0 get zeros."""
    rows, num_out = out.shape
    inner = given.weight.shape[1]
    each = tile.features if activation is None else tile.features // 2
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(num_out, each)
    shares = tile.shares
    partial = arrived = x_box = weight_box = None
    apart = shares > 1 and is_apart(tiles)
    if apart:
        num_sums = tiles * shares * tile.rows * tile.features
        partial = torch.empty(num_sums, dtype=torch.float32, device=out.device)
        arrived = linear_tma.arrivals()
    if linear_tma.takes(given.x, given.weight):
        x_box = TensorDescriptor.from_tensor(given.x, [tile.rows, tile.depth])
        weight_box = _weights(given.weight, tile, activation is not None)
    weighted, squares_out = (None, None) if made is None else made[:2]
    launch(
        _fixed_kernel, (tiles, shares if apart else 1),
        x_box, weight_box, given.x, given.weight, given.x_scales, given.scales, given.bias,
        given.squares, slots, norm, out, weighted, squares_out, partial, arrived,
        rows, num_out, given.num_parts, given.x.stride(0), out.stride(0), given.eps,
        INNER=inner, GROUP=given.group, FEATURES=tile.features, DEPTH=tile.depth,
        STAGES=tile.stages, ROWS=tile.rows, ACTIVATION=activation, ADDS=adds,
        SHARE=share_depth(inner, shares), SHARES=shares, APART=apart,
        num_warps=tile.num_warps, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip


def _weights(weight: Tensor, tile: FixedTile, gated: bool) -> TensorDescriptor:
    each = tile.features // 2 if gated else tile.features
    if each >= LEAST:
        return TensorDescriptor.from_tensor(weight, [each, tile.depth])
    halves = weight.unflatten(0, (2, -1))
    return TensorDescriptor.from_tensor(halves, [2, each, tile.depth])
