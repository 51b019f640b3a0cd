"""Matrix products over few rows (1 to 256), which are bound by the time to read the weight.

Each program owns a few output features; their weights are read once, the rows come from cache.
Norm, bias, activation and residual are fused (`epilogue.py`). The first weights are loaded before
the wait for the rows: into registers if they fit, else into the L2 cache. From 2 rows on a tile may
be copied by the tensor memory accelerator (`linear_tma.py`).

Weights are 16-bit numbers, or codes in float8 with one scale per feature, which the epilogue
applies. Sums run in one fixed order per tile: results do not depend on neighbours or on the run.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    prefetch_weights,
    wait_for_writer,
)
from slotzero.kernels.triton.linear import linear_tma
from slotzero.kernels.triton.linear.elementwise import add_norm
from slotzero.kernels.triton.linear.epilogue import finish, load_early
from slotzero.kernels.triton.linear.operands import Operands, dot
from slotzero.kernels.triton.linear.tiles import PLAIN_ROWS, Tile, padded_rows
from slotzero.kernels.types import Activation, Normed, ResidualNorms

VARYING = ["rows", "num_parts"]  # arguments that kernels are not specialized for


@triton.jit
def _load_weight(at, k, n, num_out, INNER: tl.constexpr, EVEN: tl.constexpr):
    if EVEN:
        return tl.load(at)
    return tl.load(at, mask=(k < INNER) & (n < num_out), other=0.0)


@triton.jit(do_not_specialize=VARYING)
def _one_row_kernel(
    x, weight, x_scales, scales, bias, squares, slots, norm, out, weighted, squares_out,
    rows, num_out, num_parts, x_stride, out_stride, eps,
    INNER: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one row, without matrix units."""
    may_follow(PDL)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    m, k = tl.arange(0, 1), tl.arange(0, DEPTH)
    at = weight + n[:, None].to(tl.int64) * INNER + k[None, :]
    value_offset = tl.cast(num_out, tl.int64) * INNER  # from a gate's weights to its value's
    w = _load_weight(at, k[None, :], n[:, None], num_out, INNER, EVEN)
    w2 = w
    if ACTIVATION is not None:
        w2 = _load_weight(at + value_offset, k[None, :], n[:, None], num_out, INNER, EVEN)
    wait_for_writer(PDL)
    value = tl.load(x + k, mask=k < INNER, other=0.0)
    parts, before = load_early(
        squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, 1
    )

    acc = tl.zeros([FEATURES, DEPTH], tl.float32)
    acc2 = acc
    for first in range(0, INNER, DEPTH):
        after = first + DEPTH + k
        next_value = tl.load(x + after, mask=after < INNER, other=0.0)
        ahead = (after[None, :] < INNER) & (n[:, None] < num_out)
        next_w = tl.load(at + first + DEPTH, mask=ahead, other=0.0)
        next_w2 = next_w
        if ACTIVATION is not None:
            next_w2 = tl.load(at + value_offset + first + DEPTH, mask=ahead, other=0.0)
        wide = value.to(tl.float32)[None, :]
        acc += w.to(tl.float32) * wide
        if ACTIVATION is not None:
            acc2 += w2.to(tl.float32) * wide
        w, w2, value = next_w, next_w2, next_value
    result = tl.sum(acc, axis=1)[None, :]
    second = result
    if ACTIVATION is not None:
        second = tl.sum(acc2, axis=1)[None, :]
    finish(
        result, second, x_scales, scales, squares, parts, before, bias, slots, norm, out, weighted,
        squares_out, tl.program_id(0), m, n, rows, num_out, out_stride, eps, INNER, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _load_tiles(
    at, k, n, num_out,
    INNER: tl.constexpr, EVEN: tl.constexpr, DEPTH: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Load DEPTH in tiles of STEP, all issued before the first is used."""
    tiles = ()
    for i in tl.static_range(0, DEPTH, STEP):
        tile = _load_weight(at + i, k + i, n, num_out, INNER, EVEN)
        tiles += (tile,)  # type: ignore[assignment]
    return tiles


@triton.jit(do_not_specialize=VARYING)
def _scalar_kernel(
    x, weight, x_scales, scales, bias, squares, slots, norm, out, weighted, squares_out,
    rows, num_out, num_parts, x_stride, out_stride, eps,
    INNER: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
    SIDE: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply a few rows, without matrix units. At least SIDE warps lie side by side, each with
    FEATURES / SIDE features; each of LANES holds four neighbouring values of a tile, for every row.
    The lanes are the first dimension, because the compiler assigns threads in that order: weight
    and rows then have the same layout, no values are exchanged, and the number of rows does not
    change the order of a sum."""
    may_follow(PDL)
    each: tl.constexpr = FEATURES // SIDE
    step: tl.constexpr = 4 * LANES
    n, m = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES), tl.arange(0, ROWS)
    k = 4 * tl.arange(0, LANES)[:, None, None, None, None] + tl.arange(0, 4)
    side = tl.arange(0, SIDE)[None, :, None, None, None]
    wn = tl.program_id(0) * FEATURES + side * each + tl.arange(0, each)[None, None, :, None, None]
    at = weight + wn.to(tl.int64) * INNER + k  # [lanes, side, each, 1, 4]
    value_offset = tl.cast(num_out, tl.int64) * INNER
    w = _load_tiles(at, k, wn, num_out, INNER, EVEN, DEPTH, step)
    w2 = w
    if ACTIVATION is not None:
        w2 = _load_tiles(at + value_offset, k, wn, num_out, INNER, EVEN, DEPTH, step)
    xm = m[None, None, None, :, None]
    x_at = x + xm.to(tl.int64) * x_stride + (k + 0 * side)  # [lanes, side, 1, rows, 4]
    wait_for_writer(PDL)
    value = _load_tiles(x_at, k, xm, rows, INNER, False, DEPTH, step)
    parts, before = load_early(
        squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
    )

    acc = tl.zeros([LANES, SIDE, each, ROWS, 4], tl.float32)
    acc2 = acc
    for first in range(0, INNER, DEPTH):
        after = first + DEPTH
        next_w = _load_tiles(at + after, after + k, wn, num_out, INNER, False, DEPTH, step)
        next_w2 = next_w
        if ACTIVATION is not None:
            at2 = at + value_offset + after
            next_w2 = _load_tiles(at2, after + k, wn, num_out, INNER, False, DEPTH, step)
        for i in tl.static_range(DEPTH // step):
            wide = value[i].to(tl.float32)
            acc += w[i].to(tl.float32) * wide
            if ACTIVATION is not None:
                acc2 += w2[i].to(tl.float32) * wide
        value = _load_tiles(x_at + after, after + k, xm, rows, INNER, False, DEPTH, step)
        w, w2 = next_w, next_w2
    result = _sum_lanes(acc, FEATURES, ROWS)
    second = result
    if ACTIVATION is not None:
        second = _sum_lanes(acc2, FEATURES, ROWS)
    finish(
        result, second, x_scales, scales, squares, parts, before, bias, slots, norm, out, weighted,
        squares_out, tl.program_id(0), m, n, rows, num_out, out_stride, eps, INNER, ACTIVATION,
    )  # fmt: skip


@triton.jit
def _sum_lanes(acc, FEATURES: tl.constexpr, ROWS: tl.constexpr):
    """Sum over lanes: [lanes, side, each, rows, 4] -> [rows, features]."""
    return tl.trans(tl.reshape(tl.sum(tl.sum(acc, axis=4), axis=0), [FEATURES, ROWS]))


@triton.jit
def _dot_slices(w, value, acc, WIDE: tl.constexpr):
    """Add the product of w [slices, features, depth] and value [slices, depth, rows] to acc, which
    is transposed if not WIDE."""
    if WIDE:
        return dot(w, value, acc)
    else:  # noqa: RET505  the compiler does not see that the rest is unreachable
        return dot(tl.permute(value, (0, 2, 1)), tl.permute(w, (0, 2, 1)), acc)


@triton.jit
def _sum_slices(acc, WIDE: tl.constexpr):
    """Sum over slices -> [rows, features]."""
    if WIDE:
        return tl.trans(tl.sum(acc, axis=0))
    else:  # noqa: RET505
        return tl.sum(acc, axis=0)


@triton.jit(do_not_specialize=VARYING)
def _sliced_kernel(
    x, weight, x_scales, scales, bias, squares, slots, norm, out, weighted, squares_out,
    rows, num_out, num_parts, x_stride, out_stride, eps,
    INNER: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr, SLICES: tl.constexpr,
    AHEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Multiply with matrix units, with slices of the inner dimension side by side, each for its own
    warps. The dimension of size 16, features or rows, comes first, as matrix units require."""
    may_follow(PDL)
    step: tl.constexpr = SLICES * DEPTH
    block: tl.constexpr = AHEAD * step
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, SLICES)[:, None] * DEPTH + tl.arange(0, DEPTH)[None, :]  # [slices, depth]
    wk, wn = k[:, None, :], n[None, :, None]
    at = weight + wn.to(tl.int64) * INNER + wk  # [slices, features, depth]
    value_offset = tl.cast(num_out, tl.int64) * INNER
    w = _load_tiles(at, wk, wn, num_out, INNER, EVEN, block, step)
    w2 = w
    if ACTIVATION is not None:
        w2 = _load_tiles(at + value_offset, wk, wn, num_out, INNER, EVEN, block, step)
    xk, xm = k[:, :, None], m[None, None, :]
    x_at = x + xm.to(tl.int64) * x_stride + xk  # [slices, depth, rows]
    wait_for_writer(PDL)
    value = _load_tiles(x_at, xk, xm, rows, INNER, False, block, step)
    parts, before = load_early(
        squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
    )

    wide: tl.constexpr = FEATURES >= 16
    acc = tl.zeros([SLICES, FEATURES if wide else ROWS, ROWS if wide else FEATURES], tl.float32)
    acc2 = acc
    for first in range(0, INNER, block):
        after = first + block
        next_value = _load_tiles(x_at + after, after + xk, xm, rows, INNER, False, block, step)
        next_w = _load_tiles(at + after, after + wk, wn, num_out, INNER, False, block, step)
        next_w2 = next_w
        if ACTIVATION is not None:
            at2 = at + value_offset + after
            next_w2 = _load_tiles(at2, after + wk, wn, num_out, INNER, False, block, step)
        for i in tl.static_range(AHEAD):
            acc = _dot_slices(w[i], value[i], acc, wide)
            if ACTIVATION is not None:
                acc2 = _dot_slices(w2[i], value[i], acc2, wide)
        w, w2, value = next_w, next_w2, next_value
    result = _sum_slices(acc, wide)
    second = result
    if ACTIVATION is not None:
        second = _sum_slices(acc2, wide)
    finish(
        result, second, x_scales, scales, squares, parts, before, bias, slots, norm, out, weighted,
        squares_out, tl.program_id(0), m, n, rows, num_out, out_stride, eps, INNER, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _staged_kernel(
    x, weight, x_scales, scales, bias, squares, slots, norm, out, weighted, squares_out,
    rows, num_out, num_parts, x_stride, out_stride, eps,
    INNER: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr,
    PDL: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    at = weight + n[None, :].to(tl.int64) * INNER + k[:, None]  # [depth, features]
    value_offset = tl.cast(num_out, tl.int64) * INNER
    acc = tl.zeros([ROWS, FEATURES], tl.float32)
    acc2 = acc
    prefetch_weights(weight, n, num_out, 0, INNER, STAGES * DEPTH, PDL)
    if ACTIVATION is not None:
        prefetch_weights(weight + value_offset, n, num_out, 0, INNER, STAGES * DEPTH, PDL)
    wait_for_writer(PDL)

    for first in tl.range(0, INNER, DEPTH, num_stages=STAGES):
        known = (m < rows)[:, None]
        if not EVEN:
            known = known & (first + k < INNER)[None, :]
        value = tl.load(x_at + first, mask=known, other=0.0)
        w = _load_weight(at + first, first + k[:, None], n[None, :], num_out, INNER, EVEN)
        acc = dot(value, w, acc)
        if ACTIVATION is not None:
            w2_at = at + value_offset + first
            w2 = _load_weight(w2_at, first + k[:, None], n[None, :], num_out, INNER, EVEN)
            acc2 = dot(value, w2, acc2)
    parts, before = load_early(
        squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
    )
    finish(
        acc, acc2, x_scales, scales, squares, parts, before, bias, slots, norm, out, weighted,
        squares_out, tl.program_id(0), m, n, rows, num_out, out_stride, eps, INNER, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=VARYING[:1])
def _split_k_kernel(
    x, weight, x_scales, scales, bias, out, rows, num_out, x_stride,
    INNER: tl.constexpr, FEATURES: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr,
    SHARE: tl.constexpr, PDL: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the product over one share of the inner dimension, in float32, to out [shares, rows,
    features] (split-K)."""
    may_follow(PDL)
    share = tl.program_id(1)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    m = tl.arange(0, ROWS)
    k = tl.arange(0, DEPTH)
    x_at = x + m[:, None].to(tl.int64) * x_stride + k[None, :]
    at = weight + n[None, :].to(tl.int64) * INNER + k[:, None]  # [depth, features]
    acc = tl.zeros([ROWS, FEATURES], tl.float32)
    prefetch_weights(weight, n, num_out, share * SHARE, INNER, STAGES * DEPTH, PDL)
    wait_for_writer(PDL)

    end = tl.minimum((share + 1) * SHARE, INNER)
    for first in tl.range(share * SHARE, end, DEPTH, num_stages=STAGES):
        known = (m < rows)[:, None]
        if not EVEN:
            known = known & (first + k < INNER)[None, :]
        value = tl.load(x_at + first, mask=known, other=0.0)
        w = _load_weight(at + first, first + k[:, None], n[None, :], num_out, INNER, EVEN)
        acc = dot(value, w, acc)
    row, feature = m[:, None], n[None, :]
    if scales is not None:
        scale = tl.load(scales + feature, mask=feature < num_out, other=0.0).to(tl.float32)
        acc *= tl.load(x_scales + row, mask=row < rows, other=0.0) * scale
    if bias is not None:
        added = tl.load(bias + feature, mask=feature < num_out, other=0.0).to(tl.float32)
        acc += tl.where(share == 0, added, 0.0)
    out_at = out + (share * rows + row).to(tl.int64) * num_out + feature
    tl.store(out_at, acc, mask=(row < rows) & (feature < num_out))


def linear(
    given: Operands,
    out: Tensor,
    tile: Tile,
    *,
    activation: Activation | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """Multiply rows, with a deferred norm scale or without, by weight [features, inner] -> out.

    With an activation the weight has gates and then values; with slots, rows of slot 0 get zeros.
    """
    _launch(given, out, tile, activation=activation, slots=slots)
    return out


def linear_add(given: Operands, residual: Tensor, norms: ResidualNorms, tile: Tile) -> Normed:
    """Add the product to the residual, in place, and norm the sum with a deferred scale."""
    if tile.shares > 1:
        return add_norm(residual, _in_shares(given, tile), norms, late=True)
    parts = triton.cdiv(len(given.weight), tile.features)
    squares = torch.empty(parts, len(residual), dtype=torch.float32, device=residual.device)
    made = Normed(torch.empty_like(residual), squares, norms.eps)
    _launch(given, residual, tile, norm=norms.next, made=made)
    return made


def _in_shares(given: Operands, tile: Tile) -> Tensor:
    """Return [shares, rows, features] in float32, to be added up."""
    rows, inner = given.x.shape
    num_out = len(given.weight)
    out = torch.empty(tile.shares, rows, num_out, dtype=torch.float32, device=given.x.device)
    tiles = triton.cdiv(inner, tile.depth)
    launch(
        _split_k_kernel, (triton.cdiv(num_out, tile.features), tile.shares),
        given.x, given.weight, given.x_scales, given.scales, given.bias, out, rows, num_out,
        given.x.stride(0),
        INNER=inner, FEATURES=tile.features, DEPTH=tile.depth,
        EVEN=inner % tile.depth == 0 and num_out % tile.features == 0,
        SHARE=triton.cdiv(tiles, tile.shares) * tile.depth,
        STAGES=tile.stages, ROWS=max(16, padded_rows(rows)), num_warps=tile.num_warps, **overlap(),
    )  # fmt: skip
    return out


def _launch(
    given: Operands,
    out: Tensor,
    tile: Tile,
    *,
    activation: Activation | None = None,
    slots: Tensor | None = None,
    norm: Tensor | None = None,
    made: Normed | None = None,
) -> None:
    """Multiply. With a norm, out is the residual, and what is made is the normed sum."""
    if tile.rows:
        linear_tma.product(given, out, tile, activation, slots, norm, made)
        return
    rows, inner = given.x.shape
    num_out = out.shape[1]
    kernel, block, parts, sizes = _one_row_kernel, tile.depth, 1024, {}
    if tile.stages:
        kernel, parts = _staged_kernel, 64
        sizes = {"ROWS": max(16, padded_rows(rows)), "STAGES": tile.stages}
    elif tile.slices > 1:
        least = 8 if tile.features >= 16 else 16
        kernel, parts = _sliced_kernel, 128
        sizes = {"ROWS": max(least, padded_rows(rows)), "SLICES": tile.slices, "AHEAD": tile.ahead}
        block *= tile.slices * tile.ahead
    elif rows > 1:
        side, size = min(tile.features, tile.num_warps), 4 if rows <= 4 else PLAIN_ROWS
        kernel, parts = _scalar_kernel, 2048 // size
        sizes = {"ROWS": size, "SIDE": side, "LANES": 32 * tile.num_warps // side}
    weighted, squares_out = (None, None) if made is None else made[:2]
    launch(
        kernel, (triton.cdiv(num_out, tile.features),),
        given.x, given.weight, given.x_scales, given.scales, given.bias, given.squares, slots,
        norm, out, weighted, squares_out,
        rows, num_out, given.num_parts, given.x.stride(0), out.stride(0), given.eps,
        INNER=inner, FEATURES=tile.features, DEPTH=tile.depth,
        EVEN=inner % block == 0 and num_out % tile.features == 0,
        PARTS=parts, ACTIVATION=activation,
        num_warps=tile.num_warps, **sizes, **overlap(),
    )  # fmt: skip
