"""Matrix products over 2 to 256 rows whose tiles are copied by the tensor memory accelerator (TMA),
several stages ahead of the matrix units.

A program owns some features for some of the rows. Programs that share features are neighbours, so
that the weights are read from memory once. A tile of a gated product has as many gates as values:
both are in one accumulator, and the thread that has a gate also has its value. Past the end of
rows, features or depth a copy yields zeros. The dimension of size 64, rows or features, comes
first, as matrix units require.

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
from slotzero.kernels.triton.linear.tiles import Tile
from slotzero.kernels.types import Activation, Normed
from slotzero.kernels.weights import DenseWeight

ALIGNED = 16  # bytes
PARTS = 32  # partial sums of squares that are read at a time
MOST_SHARES, LEAST_SHARE = 8, 512  # per tile; values of the inner dimension
MOST_SPLIT = 1024  # split tiles: more than programs run at once on any card
SPARE_BYTES = 2048  # shared memory of a program besides its stages


@triton.jit(do_not_specialize=["rows", "num_parts", "whole"])
def _tma_kernel(
    x_box, weight_box, weight, bias, squares, slots, norm, out, weighted, squares_out, partial,
    arrived,
    rows, num_out, num_parts, whole, out_stride, eps,
    INNER: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    ROWS: tl.constexpr, PARTS: tl.constexpr, ACTIVATION: tl.constexpr, SHARES: tl.constexpr,
    PDL: tl.constexpr,
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
    groups = tl.cdiv(rows, ROWS)
    part, first_m = tile // groups, tile % groups * ROWS
    gated: tl.constexpr = ACTIVATION is not None
    each: tl.constexpr = FEATURES // 2 if gated else FEATURES
    m, n = first_m + tl.arange(0, ROWS), part * each + tl.arange(0, each)
    prefetch_weights(weight, n, num_out, begin, INNER, STAGES * DEPTH, PDL)
    if gated:
        values = weight + tl.cast(num_out, tl.int64) * INNER
        prefetch_weights(values, n, num_out, begin, INNER, STAGES * DEPTH, PDL)
    wait_for_writer(PDL)

    wide: tl.constexpr = ROWS < 64
    lead: tl.constexpr = FEATURES if wide else ROWS
    follow: tl.constexpr = ROWS if wide else FEATURES
    acc = tl.zeros([lead, follow], tl.float32)
    for k in tl.range(begin, end, DEPTH, num_stages=STAGES):
        value = x_box.load([first_m, k])
        if gated:
            w = weight_box.load([0, part * each, k]).reshape(FEATURES, DEPTH)
        else:
            w = weight_box.load([part * each, k])
        acc = tl.dot(w, value.T, acc) if wide else tl.dot(value, w.T, acc)

    if SHARES > 1:  # noqa: SIM102  the compiler evaluates both sides of an `and`
        if split >= 0:
            at = partial + tl.arange(0, lead)[:, None] * follow + tl.arange(0, follow)[None, :]
            tl.store(at + split * (ROWS * FEATURES), acc)
            tl.debug_barrier()  # all writes of the program, then the count that publishes them
            its = split // SHARES
            if tl.atomic_add(arrived + its, 1, sem="acq_rel") < SHARES - 1:
                return
            tl.store(arrived + its, 0)  # for the next product
            tl.debug_barrier()
            acc = tl.zeros([lead, follow], tl.float32)
            for i in tl.static_range(SHARES):
                acc += tl.load(at + (its * SHARES + i) * (ROWS * FEATURES))

    result, second = acc, acc
    if gated:
        if wide:
            pairs = tl.permute(tl.reshape(acc, [2, each, ROWS]), (2, 1, 0))
        else:
            pairs = tl.permute(tl.reshape(acc, [ROWS, 2, each]), (0, 2, 1))
        result, second = tl.split(pairs)
    elif wide:
        result = tl.trans(acc)
        second = result
    parts, before = load_early(
        squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
    )
    finish(
        result, second, squares, parts, before, bias, slots, norm, out, weighted, squares_out,
        part, m, n, rows, num_out, out_stride, eps, INNER, ACTIVATION,
    )  # fmt: skip


def takes(x: Tensor, weight: Tensor) -> bool:
    """Return whether both tensors, and all of their rows, are aligned for TMA copies."""
    return all(
        t.data_ptr() % ALIGNED == 0 and t.stride(0) * t.itemsize % ALIGNED == 0 for t in (x, weight)
    )


def product(
    x: Normed,
    weight: DenseWeight,
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
    split, shares = _split(tiles, weight.data.shape[1], tile)
    partial = arrived = None
    if shares > 1:
        size = split * shares * tile.rows * tile.features
        partial = torch.empty(size, dtype=torch.float32, device=out.device)
        arrived = arrivals()
    num_parts = 0 if x.squares is None else len(x.squares)
    weighted, squares_out = (None, None) if made is None else made[:2]
    launch(
        _tma_kernel, (tiles - split + split * shares,),
        _rows(x.x, tile), _weights(weight.data, tile, activation is not None),
        weight.data, weight.bias, x.squares, slots, norm, out, weighted, squares_out,
        partial, arrived, rows, num_out, num_parts, tiles - split, out.stride(0), x.eps,
        INNER=weight.data.shape[1], FEATURES=tile.features, DEPTH=tile.depth, STAGES=tile.stages,
        ROWS=tile.rows, PARTS=PARTS, ACTIVATION=activation, SHARES=shares,
        num_warps=tile.num_warps, **overlap(),
    )  # fmt: skip


def _split(tiles: int, inner: int, tile: Tile) -> tuple[int, int]:
    """Return how many of the last tiles are split, and into how many shares."""
    at_once = num_processors() * _resident(tile)
    rest = tiles % at_once
    shares = at_once // rest if rest else 1
    return rest, max(1, min(shares, MOST_SHARES, inner // LEAST_SHARE))


def _resident(tile: Tile) -> int:
    """Return the programs per multiprocessor: two if shared memory and registers hold them."""
    staged = 2 * tile.stages * (tile.rows + tile.features) * tile.depth
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


def _weights(weight: Tensor, tile: Tile, gated: bool) -> TensorDescriptor:
    block = [tile.features, tile.depth]
    if gated:
        weight = weight.unflatten(0, (2, -1))
        block = [2, tile.features // 2, tile.depth]
    return TensorDescriptor(weight, list(weight.shape), list(weight.stride()), block)
