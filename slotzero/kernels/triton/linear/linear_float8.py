"""Products of one row with codes in float8, without matrix units.

A program multiplies a few features. It loads their weights whole, before it waits for the row, so
that the memory is busy between kernels; then it rounds the row to float8, by its largest number.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.linear.epilogue import finish, load_early
from slotzero.kernels.triton.linear.float8 import scale_of, to_float8
from slotzero.kernels.triton.linear.operands import Operands, num_parts
from slotzero.kernels.triton.linear.tiles import Tile
from slotzero.kernels.types import Activation, Normed

PARTS = 1024  # partial sums of squares that are read at a time


@triton.jit(do_not_specialize=["num_parts"])
def _one_row_kernel(
    x, weight, scales, input_scale, bias, squares, slots, norm, out, weighted, squares_out,
    num_out, num_parts, eps,
    INNER: tl.constexpr, DEPTH: tl.constexpr, FEATURES: tl.constexpr, EVEN: tl.constexpr,
    PARTS: tl.constexpr, ACTIVATION: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    m, k = tl.arange(0, 1), tl.arange(0, DEPTH)
    at = weight + n[:, None].to(tl.int64) * INNER + k[None, :]
    inside = (n < num_out)[:, None] & (k < INNER)[None, :]
    w = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)
    w2 = w
    if ACTIVATION is not None:
        at += tl.cast(num_out, tl.int64) * INNER
        w2 = tl.load(at) if EVEN else tl.load(at, mask=inside, other=0.0)
    wait_for_writer(PDL)
    value = tl.load(x + k, mask=k < INNER, other=0.0)
    parts, before = load_early(squares, norm, out, m, n, 1, num_out, num_parts, 0, PARTS, 1)
    wide = value.to(tl.float32)
    if squares is not None:
        by = 1.0 / tl.sqrt_rn(tl.sum(tl.reshape(parts, [PARTS]), axis=0) / INNER + eps)
        wide = (wide * by).to(value.dtype).to(tl.float32)
    if input_scale is not None:
        scale = tl.load(input_scale)
    else:
        scale = scale_of(tl.max(tl.abs(wide), axis=0))
    row = to_float8(wide * (1.0 / scale)).to(tl.float32)[None, :]
    result = tl.sum(w.to(tl.float32) * row, axis=1)[None, :] * scale
    second = result
    if ACTIVATION is not None:
        second = tl.sum(w2.to(tl.float32) * row, axis=1)[None, :] * scale
    finish(
        result, second, None, scales, None, parts, before, bias, slots, norm, out, weighted,
        squares_out, None, tl.program_id(0), m, n, 1, num_out, 0, eps, INNER, ACTIVATION,
    )  # fmt: skip


def product(
    given: Operands,
    out: Tensor,
    tile: Tile,
    made: Normed,
    activation: Activation | None,
    slots: Tensor | None,
    norm: Tensor | None,
) -> None:
    """Multiply one row, with the arguments of the other products of linear.py."""
    num_out, inner = out.shape[1], given.x.shape[1]
    launch(
        _one_row_kernel, (triton.cdiv(num_out, tile.features),),
        given.x, given.weight, given.scales, given.input_scale, given.bias, given.squares, slots,
        norm, out, made.x, made.squares, num_out, num_parts(given.squares), given.eps,
        INNER=inner, DEPTH=tile.depth, FEATURES=tile.features,
        EVEN=inner == tile.depth and num_out % tile.features == 0,
        PARTS=PARTS, ACTIVATION=activation, num_warps=tile.num_warps, **overlap(),
    )  # fmt: skip
