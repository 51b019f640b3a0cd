"""Grouped products of a mixture of experts whose weights are in fragments: as in `experts.py`, over
the same order and blocks."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.linear import fragments
from slotzero.kernels.triton.linear.activation import activate
from slotzero.kernels.triton.linear.fragment_codes import load_ahead, multiply, row_of
from slotzero.kernels.triton.linear.linear_fragments import constants, tensors
from slotzero.kernels.triton.linear.tiles_fragments import FragmentTile, expert_tile
from slotzero.kernels.types import Activation
from slotzero.kernels.weights import QuantizedWeight


@triton.jit
def _product_kernel(
    x, codes, scales, offsets, biases, order, blocks, out,
    num_out, x_stride, out_stride, bias_stride,
    INNER: tl.constexpr, GROUPS: tl.constexpr, CUT: tl.constexpr, PER: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, DECODER: tl.constexpr, SCALES: tl.constexpr,
    BLOCKS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    BY_TOKEN: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by its expert's weight. By token, x has one row per token, which
    SHARED choices share, and the result is sorted by expert; otherwise x is sorted by expert and
    the result is in the order of choices. A tile with an activation has as many gates as values."""
    may_follow(PDL)
    its = blocks + tl.program_id(1) * 3
    gated: tl.constexpr = ACTIVATION is not None
    halves: tl.constexpr = 2 if gated else 1
    each: tl.constexpr = BLOCKS // halves
    depths: tl.constexpr = (INNER + 127) // 128
    parts: tl.constexpr = 2 if CODES == "uint8" else 1
    part, m = tl.program_id(0), tl.arange(0, ROWS)
    row = row_of(ROWS, SLICES)
    wait_for_writer(PDL)
    expert = tl.load(its).to(tl.int64)
    if expert < 0:
        return
    first, size = tl.load(its + 1), tl.load(its + 2)
    source = (first + row).to(tl.int64)
    if BY_TOKEN:
        source = tl.load(order + source, mask=row < size, other=0).to(tl.int64) // SHARED
    apart = tl.cdiv(num_out, 16)
    before = expert * apart * halves  # blocks of the experts before it
    its_offsets = offsets
    if offsets is not None:
        its_offsets = offsets + before * (GROUPS * CUT * 8)
    its_codes = codes + before * (depths * parts * 256)
    its_scales = scales + before * (GROUPS * CUT * 8)
    ahead = load_ahead(
        its_codes, its_scales, its_offsets, part * each, apart, apart, 0, depths,
        INNER, GROUPS, CUT, PER, CODES, BLOCKS, halves, SLICES, AHEAD,
    )  # fmt: skip
    acc = multiply(
        ahead, x, its_codes, its_scales, its_offsets, source, row < size, part * each, apart,
        apart, 0, depths, x_stride, INNER, GROUPS, CUT, PER, CODES, ZERO, DECODER, SCALES,
        BLOCKS, halves, SLICES, ROWS, AHEAD, STAGES, DTYPE, PRECISION,
    )  # fmt: skip
    n = part * (each * 16) + tl.arange(0, each * 16)
    result = tl.trans(acc)
    second = result
    if gated:
        pairs = tl.permute(tl.reshape(acc, [2, each * 16, ROWS]), (2, 1, 0))
        result, second = tl.split(pairs)
    if biases is not None:
        bias = biases + expert * bias_stride + n[None, :]
        result += tl.load(bias, mask=(n < num_out)[None, :], other=0.0).to(tl.float32)
        if gated:
            bias += num_out
            second += tl.load(bias, mask=(n < num_out)[None, :], other=0.0).to(tl.float32)
    if gated:
        result, second = activate(result, second, ACTIVATION)
        result = result * second
    target = (first + m).to(tl.int64)
    if not BY_TOKEN:
        target = tl.load(order + target, mask=m < size, other=0).to(tl.int64)
    at = out + target[:, None] * out_stride + n[None, :]
    stored = (m < size)[:, None] & (n < num_out)[None, :]
    tl.store(at, result.to(out.dtype.element_ty), mask=stored)


def product(
    x: Tensor,
    weights: QuantizedWeight,
    order: Tensor,
    blocks: Tensor,
    most: int,
    out: Tensor,
    shared: int | None,
    activation: Activation | None,
    tile: FragmentTile | None = None,
) -> None:
    """Multiply rows by their experts' weights -> out. With `shared`, x has one row per token, which
    that many choices share; otherwise it is sorted by expert, see `_product_kernel`."""
    num_out, bias = out.shape[1], weights.bias
    tile = tile or expert_tile(most, weights.in_features)
    features = tile.blocks * fragments.FEATURES // (1 if activation is None else 2)
    launch(
        _product_kernel, (triton.cdiv(num_out, features), len(blocks)),
        x, *tensors(weights), bias, order, blocks, out, num_out, x.stride(0), out.stride(0),
        0 if bias is None else bias.stride(0),
        ACTIVATION=activation, BY_TOKEN=shared is not None, SHARED=shared or 1,
        **constants(x, weights, tile), **overlap(),
    )  # fmt: skip
