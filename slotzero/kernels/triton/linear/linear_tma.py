"""Matrix products whose tiles are copied by the tensor memory accelerator (TMA),
several stages ahead of the matrix units.

A program owns some features for some of the rows. Programs that share features are neighbours, so
that the weights are read from memory once. A tile of a gated product has as many gates as values:
both are in one accumulator, and the thread that has a gate also has its value. (Codes in float8
have two accumulators, because a joint tile of them would pass through registers.) Past the end of
rows, features or depth a copy yields zeros. The dimension of size 64, rows or features, comes
first, as matrix units require.

Codes in float8 with scales per group of input features are multiplied group by group; a sum of one
group is scaled, and added to the others in float32.

The last tiles, which would not fill the card once more, are split along the inner dimension
(split-K), so that all multiprocessors have work. The program that finishes such a tile last adds up
its shares, in order.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from slotzero.kernels.triton.launch import (
    INTERPRETED,
    launch,
    may_follow,
    num_processors,
    overlap,
    prefetch_weights,
    shared_memory,
    wait_for_writer,
)
from slotzero.kernels.triton.linear.epilogue import finish, load_early
from slotzero.kernels.triton.linear.operands import Operands, dot
from slotzero.kernels.triton.linear.tiles import Tile
from slotzero.kernels.types import Activation, Normed

ALIGNED = 16  # bytes
PARTS = 32  # partial sums of squares that are read at a time
MOST_SHARES, LEAST_SHARE = 8, 512  # per tile; values of the inner dimension
MOST_SPLIT = 1024  # split tiles: more than programs run at once on any card
SPARE_BYTES = 2048  # shared memory of a program besides its stages


@triton.jit(do_not_specialize=["rows", "num_parts", "whole"])
def _tma_kernel(
    x_box, weight_box, weight, x_scales, scales, bias, squares, slots, norm, out, weighted,
    squares_out, partial, arrived,
    rows, num_out, num_parts, whole, out_stride, eps,
    INNER: tl.constexpr, GROUP: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr,
    STAGES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr,
    SHARES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one tile or one share of it: the first tiles are whole, the others in SHARES."""
    may_follow(PDL)
    tile, begin, end = tl.program_id(0), 0, INNER
    split = tile - whole
    if SHARES > 1:
        depth: tl.constexpr = (INNER + DEPTH * SHARES - 1) // (DEPTH * SHARES) * DEPTH
        if split >= 0:
            tile = whole + split // SHARES
            begin = split % SHARES * depth
            end = tl.minimum(begin + depth, INNER)
    cuts = tl.cdiv(rows, ROWS)
    part, first_m = tile // cuts, tile % cuts * ROWS
    gated: tl.constexpr = ACTIVATION is not None
    each: tl.constexpr = FEATURES // 2 if gated else FEATURES
    m, n = first_m + tl.arange(0, ROWS), part * each + tl.arange(0, each)
    prefetch_weights(weight, n, num_out, begin, INNER, STAGES * DEPTH, PDL)
    if gated:
        values = weight + tl.cast(num_out, tl.int64) * INNER
        prefetch_weights(values, n, num_out, begin, INNER, STAGES * DEPTH, PDL)
    wait_for_writer(PDL)

    wide: tl.constexpr = ROWS < 64
    split_gate: tl.constexpr = gated and scales is not None
    height: tl.constexpr = each if split_gate else FEATURES
    lead: tl.constexpr = height if wide else ROWS
    follow: tl.constexpr = ROWS if wide else height
    acc = tl.zeros([lead, follow], tl.float32)
    acc2 = acc
    all_m = first_m + tl.arange(0, ROWS)
    if GROUP is not None:  # scales are loaded a step ahead, which the compiler does not do
        scale, scale2, x_scale = group_scales(
            scales, x_scales, n, all_m, begin, end, rows, num_out, INNER, GROUP, split_gate
        )
    for k in tl.range(begin, end, DEPTH, num_stages=STAGES):
        value = x_box.load([first_m, k])
        if gated and not split_gate:
            w = weight_box.load([0, part * each, k]).reshape(FEATURES, DEPTH)
        else:
            w = weight_box.load([part * each, k])
        w2 = w
        if split_gate:
            w2 = weight_box.load([num_out + part * each, k])
        if GROUP is None:
            acc = dot(w, value.T, acc) if wide else dot(value, w.T, acc)
            if split_gate:
                acc2 = dot(w2, value.T, acc2) if wide else dot(value, w2.T, acc2)
        else:
            next_scale, next_scale2, next_x = group_scales(
                scales, x_scales, n, all_m, k + DEPTH, end, rows, num_out, INNER, GROUP, split_gate
            )
            none = tl.zeros([lead, follow], tl.float32)
            sums = dot(w, value.T, none) if wide else dot(value, w.T, none)
            acc += sums * _outer(scale, x_scale, wide)
            if split_gate:
                sums = dot(w2, value.T, none) if wide else dot(value, w2.T, none)
                acc2 += sums * _outer(scale2, x_scale, wide)
            scale, scale2, x_scale = next_scale, next_scale2, next_x

    if SHARES > 1:  # noqa: SIM102  the compiler evaluates both sides of an `and`
        if split >= 0:
            at = partial + tl.arange(0, lead)[:, None] * follow + tl.arange(0, follow)[None, :]
            tl.store(at + split * (ROWS * FEATURES), acc)
            if split_gate:
                tl.store(at + split * (ROWS * FEATURES) + ROWS * each, acc2)
            tl.debug_barrier()  # all writes of the program, then the count that publishes them
            its = split // SHARES
            if tl.atomic_add(arrived + its, 1, sem="acq_rel") < SHARES - 1:
                return
            tl.store(arrived + its, 0)  # for the next product
            tl.debug_barrier()
            acc = tl.zeros([lead, follow], tl.float32)
            acc2 = acc
            for i in tl.static_range(SHARES):
                stored = at + (its * SHARES + i) * (ROWS * FEATURES)
                acc += tl.load(stored)
                if split_gate:
                    acc2 += tl.load(stored + ROWS * each)

    result, second = acc, acc2
    if gated and not split_gate:
        if wide:
            pairs = tl.permute(tl.reshape(acc, [2, each, ROWS]), (2, 1, 0))
        else:
            pairs = tl.permute(tl.reshape(acc, [ROWS, 2, each]), (0, 2, 1))
        result, second = tl.split(pairs)
    elif wide:
        result, second = tl.trans(acc), tl.trans(acc2)
    parts, before = load_early(
        squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
    )
    if GROUP is not None:  # applied
        scales = None
    finish(
        result, second, x_scales, scales, squares, parts, before, bias, slots, norm, out, weighted,
        squares_out, part, m, n, rows, num_out, out_stride, eps, INNER, ACTIVATION,
    )  # fmt: skip


@triton.jit
def group_scales(
    scales, x_scales, n, m, first, end, rows, num_out,
    INNER: tl.constexpr, GROUP: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Load the scales that features n, their values if GATED, and rows m have from input feature
    `first` on."""
    groups: tl.constexpr = (INNER + GROUP - 1) // GROUP
    group, is_there = first // GROUP, tl.zeros([1], tl.int32) + first < end
    at = scales + n.to(tl.int64) * groups + group
    inside = (n < num_out) & is_there
    scale = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    scale2 = scale
    if GATED:
        value_offset = tl.cast(num_out, tl.int64) * groups
        scale2 = tl.load(at + value_offset, mask=inside, other=0.0).to(tl.float32)
    x_scale = tl.load(x_scales + group * rows + m, mask=(m < rows) & is_there, other=0.0)
    return scale, scale2, x_scale


@triton.jit
def _outer(scale, x_scale, WIDE: tl.constexpr):
    """Return the scales of a product: [features, rows] if WIDE, else [rows, features]."""
    if WIDE:
        return scale[:, None] * x_scale[None, :]
    else:  # noqa: RET505
        return x_scale[:, None] * scale[None, :]


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether both tensors, and all of their rows, are aligned for TMA copies."""
    return all(
        t.data_ptr() % ALIGNED == 0 and t.stride(0) * t.itemsize % ALIGNED == 0 for t in (x, weight)
    )


def product(
    given: Operands,
    out: Tensor,
    tile: Tile,
    activation: Activation | None,
    slots: Tensor | None,
    norm: Tensor | None,
    made: Normed | None,
) -> None:
    """Launch a TMA tile, with the same arguments as the other kernels of linear.py."""
    rows, num_out = out.shape
    each = tile.features if activation is None else tile.features // 2
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(num_out, each)
    inner, size = given.weight.shape[1], given.weight.itemsize
    split, shares = _split(tiles, inner, tile, size)
    partial = arrived = None
    if shares > 1:
        num_sums = split * shares * tile.rows * tile.features
        partial = torch.empty(num_sums, dtype=torch.float32, device=out.device)
        arrived = arrivals()
    weighted, squares_out = (None, None) if made is None else made[:2]
    launch(
        _tma_kernel, (tiles - split + split * shares,),
        _rows(given.x, tile), _weights(given, tile, activation is not None),
        given.weight, given.x_scales, given.scales, given.bias, given.squares, slots, norm, out,
        weighted, squares_out, partial, arrived,
        rows, num_out, given.num_parts, tiles - split, out.stride(0), given.eps,
        INNER=inner, GROUP=given.group, FEATURES=tile.features, DEPTH=tile.depth,
        STAGES=tile.stages, ROWS=tile.rows, PARTS=PARTS, ACTIVATION=activation, SHARES=shares,
        num_warps=tile.num_warps, **overlap(),
    )  # fmt: skip


def _split(tiles: int, inner: int, tile: Tile, itemsize: int) -> tuple[int, int]:
    """Return how many of the last tiles are split, and into how many shares."""
    at_once = num_processors() * _resident(tile, itemsize)
    rest = tiles % at_once
    shares = at_once // rest if rest else 1
    return rest, max(1, min(shares, MOST_SHARES, inner // LEAST_SHARE))


def _resident(tile: Tile, itemsize: int) -> int:
    """Return the programs per multiprocessor: two if shared memory and registers hold them.

    Few rows with codes in float8 have one: a copy of all tiles takes so little time that the next
    product should find room to begin with its own.
    """
    if itemsize == 1 and tile.rows < 64:
        return 1
    staged = itemsize * tile.stages * (tile.rows + tile.features) * tile.depth
    sums = tile.rows * tile.features // (32 * tile.num_warps)  # registers of a thread
    fits = 2 * (staged + SPARE_BYTES) <= shared_memory() and tile.num_warps * (sums + 64) <= 1024
    return 2 if fits else 1


@functools.cache
def arrivals() -> Tensor:
    """Return the counters of finished shares per split tile; zeros between products."""
    device = "cpu" if INTERPRETED else "cuda"
    return torch.zeros(MOST_SPLIT, dtype=torch.int32, device=device)


def _rows(x: Tensor, tile: Tile) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [tile.rows, tile.depth])


def _weights(given: Operands, tile: Tile, gated: bool) -> TensorDescriptor:
    weight, block = given.weight, [tile.features, tile.depth]
    if gated and given.scales is not None:
        block = [tile.features // 2, tile.depth]
    elif gated:
        weight = weight.unflatten(0, (2, -1))
        block = [2, tile.features // 2, tile.depth]
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)
