"""Grouped products of a mixture of experts whose weights are quantised: as in `experts.py`, over
the same order and blocks."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.triton.linear import fragments
from slotzero.kernels.triton.linear.activation import activate
from slotzero.kernels.triton.linear.codes import multiply
from slotzero.kernels.triton.linear.linear_quantized import constants, inputs
from slotzero.kernels.triton.linear.tiles import SLICED_ROWS
from slotzero.kernels.triton.linear.tiles_quantized import cut, fixed_tile
from slotzero.kernels.triton.moe import experts_fragments
from slotzero.kernels.types import Activation, Normed
from slotzero.kernels.weights import QuantizedWeight


@triton.jit(do_not_specialize=["x_rows"])
def _product_kernel(
    x, x_scales, codes, scales, offsets, group_of, biases, order, blocks, out,
    x_rows, num_out, x_stride, out_stride, bias_stride,
    INNER: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, X_GROUPS: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, PER_BYTE: tl.constexpr, BY_SUMS: tl.constexpr,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    BY_TOKEN: tl.constexpr, SHARED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply a block of rows by its expert's weight. By token, x has one row per token, which
    SHARED choices share, and the result is sorted by expert; otherwise x is sorted by expert and
    the result is in the order of choices. A tile with an activation has as many gates as values."""
    may_follow(PDL)
    block = blocks + tl.program_id(1) * 3
    gated: tl.constexpr = ACTIVATION is not None
    each: tl.constexpr = FEATURES // 2 if gated else FEATURES
    part, lane, m = tl.program_id(0), tl.arange(0, FEATURES), tl.arange(0, ROWS)
    wait_for_writer(PDL)
    expert = tl.load(block).to(tl.int64)
    if expert < 0:
        return
    first, size = tl.load(block + 1), tl.load(block + 2)
    known = m < size
    choice = tl.load(order + first + m, mask=known, other=0).to(tl.int64)
    here = (first + m).to(tl.int64)
    source, target = (choice // SHARED, here) if BY_TOKEN else (here, choice)
    feature = part * each + lane % each
    n, inside = feature + lane // each * num_out, feature < num_out
    num_bytes: tl.constexpr = (INNER + PER_BYTE - 1) // PER_BYTE
    before = expert * num_out * (2 if gated else 1)  # rows of the experts before it
    its_offsets, its_groups = offsets, group_of
    if offsets is not None:
        its_offsets = offsets + before * GROUPS
    if group_of is not None:
        its_groups = group_of + expert * INNER
    acc = multiply(
        x, x_scales, codes + before * num_bytes, scales + before * GROUPS, its_offsets, its_groups,
        source, known, n, inside, 0, INNER, x_stride, x_rows, INNER, GROUP, GROUPS, X_GROUPS,
        CODES, ZERO, PER_BYTE, BY_SUMS, FEATURES, ROWS, DEPTH, STAGES, EVEN, DTYPE, PRECISION,
    )  # fmt: skip
    if biases is not None:
        bias = tl.load(biases + expert * bias_stride + n, mask=inside, other=0.0)
        acc += bias.to(tl.float32)[:, None]
    result = tl.trans(acc)
    if gated:
        pairs = tl.permute(tl.reshape(acc, [2, each, ROWS]), (2, 1, 0))
        gates, values = tl.split(pairs)
        gates, values = activate(gates, values, ACTIVATION)
        result = gates * values
    its = part * each + tl.arange(0, each)
    at = out + target[:, None] * out_stride + its[None, :]
    stored = known[:, None] & (its < num_out)[None, :]
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
    is_fixed: bool,
) -> None:
    """Multiply rows by their experts' weights -> out. With `shared`, x has one row per token, which
    that many choices share; otherwise it is sorted by expert, see `_product_kernel`. A block has
    `most` rows at most."""
    rows, x_scales = inputs(Normed(x), weights)
    if fragments.holds(weights):
        experts_fragments.product(rows.x, weights, order, blocks, most, out, shared, activation)
        return
    num_out, bias = out.shape[1], weights.bias
    block_rows = max(SLICED_ROWS, triton.next_power_of_2(most))
    features = 64 if block_rows == SLICED_ROWS else 128
    tile = cut(block_rows, features, weights.format, weights.in_features, rows.x.dtype)
    if is_fixed:
        tile = fixed_tile(most, weights.format, weights.in_features, rows.x.dtype)
    each = tile.features if activation is None else tile.features // 2
    launch(
        _product_kernel, (triton.cdiv(num_out, each), len(blocks)),
        rows.x, x_scales, weights.codes, weights.scales, weights.offsets, weights.group_of, bias,
        order, blocks, out, len(x), num_out, rows.x.stride(0), out.stride(0),
        0 if bias is None else bias.stride(0),
        ACTIVATION=activation, BY_TOKEN=shared is not None, SHARED=shared or 1,
        **constants(rows.x, x_scales, weights, tile), enable_fp_fusion=not is_fixed, **overlap(),
    )  # fmt: skip
