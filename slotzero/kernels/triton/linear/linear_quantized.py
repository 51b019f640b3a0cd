"""Products with quantised weights, which are read as codes.

Norm, bias, activation and residual are fused as in `linear.py`. Rows may be codes too: float8
products, of rows that `round_float8.py` has rounded. For many rows a weight is unpacked once, and
cuBLAS multiplies.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import (
    INTERPRETED,
    launch,
    may_follow,
    overlap,
    prefetch_weights,
    wait_for_writer,
)
from slotzero.kernels.triton.linear import fragments, library, linear_fragments
from slotzero.kernels.triton.linear.codes import decode, multiply, scaled
from slotzero.kernels.triton.linear.elementwise import apply_norm, gate
from slotzero.kernels.triton.linear.epilogue import finish, load_early
from slotzero.kernels.triton.linear.operands import Operands
from slotzero.kernels.triton.linear.round_float8 import round_input, rounded
from slotzero.kernels.triton.linear.tiles import MAX_ROWS
from slotzero.kernels.triton.linear.tiles_quantized import (
    CodesTile,
    fixed_tile,
    multiplies_float8,
    tile_for,
)
from slotzero.kernels.types import Activation, Normed, ResidualNorms
from slotzero.kernels.weights import LinearWeight, QuantizedWeight

VARYING = ["rows", "num_parts"]
PARTS = 32  # partial sums of squares that are read at a time
ADDED_ROWS, ADDED_FEATURES = 8, 128  # of a program that adds shares up
UNPACKED_ROWS, UNPACKED_COLUMNS = 16, 128
DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,  # which it cannot multiply
    torch.uint8: tl.float8e4nv,
}


@triton.jit(do_not_specialize=VARYING)
def _product_kernel(
    x, x_scales, codes, scales, offsets, group_of, bias, squares, slots, norm, out, weighted,
    squares_out, partial, rows, num_out, num_parts, x_stride, out_stride, eps,
    INNER: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, X_GROUPS: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, PER_BYTE: tl.constexpr, BY_SUMS: tl.constexpr,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    SHARE: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one tile, or one share of it. A tile with an activation has as many gates as
    values."""
    may_follow(PDL)
    cuts = tl.cdiv(rows, ROWS)
    part, first_m = tl.program_id(0) // cuts, tl.program_id(0) % cuts * ROWS
    share = tl.program_id(1)
    gated: tl.constexpr = ACTIVATION is not None
    each: tl.constexpr = FEATURES // 2 if gated else FEATURES
    lane, m = tl.arange(0, FEATURES), first_m + tl.arange(0, ROWS)
    feature = part * each + lane % each
    n, inside = feature + lane // each * num_out, feature < num_out
    begin, end = share * SHARE, tl.minimum((share + 1) * SHARE, INNER)
    num_weights = num_out * 2 if gated else num_out
    num_bytes: tl.constexpr = (INNER + PER_BYTE - 1) // PER_BYTE
    ahead: tl.constexpr = STAGES * DEPTH // PER_BYTE
    prefetch_weights(codes, n, num_weights, begin // PER_BYTE, num_bytes, ahead, PDL)
    wait_for_writer(PDL)
    acc = multiply(
        x, x_scales, codes, scales, offsets, group_of, m, m < rows, n, inside, begin, end,
        x_stride, rows, INNER, GROUP, GROUPS, X_GROUPS, CODES, ZERO, PER_BYTE, BY_SUMS,
        FEATURES, ROWS, DEPTH, STAGES, EVEN, DTYPE, PRECISION,
    )  # fmt: skip
    if SHARES > 1:
        at = (share * rows + m)[:, None].to(tl.int64) * num_weights + n[None, :]
        tl.store(partial + at, tl.trans(acc), mask=(m < rows)[:, None] & inside[None, :])
    else:
        result = tl.trans(acc)
        second = result
        if gated:
            pairs = tl.permute(tl.reshape(acc, [2, each, ROWS]), (2, 1, 0))
            result, second = tl.split(pairs)
        its = part * each + tl.arange(0, each)
        parts, before = load_early(
            squares, norm, out, m, its, rows, num_out, num_parts, out_stride, PARTS, ROWS
        )
        finish(
            result, second, None, None, squares, parts, before, bias, slots, norm, out, weighted,
            squares_out, part, m, its, rows, num_out, out_stride, eps, INNER, ACTIVATION,
        )  # fmt: skip


@triton.jit(do_not_specialize=VARYING)
def _add_shares_kernel(
    partial, bias, squares, slots, norm, out, weighted, squares_out,
    rows, num_out, num_parts, out_stride, eps,
    INNER: tl.constexpr, SHARES: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    ACTIVATION: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add up partial [SHARES, rows, features] in order, and apply the epilogue of a product."""
    may_follow(PDL)
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    inside = (m < rows)[:, None] & (n < num_out)[None, :]
    width = num_out if ACTIVATION is None else num_out * 2
    result = tl.zeros([ROWS, FEATURES], tl.float32)
    second = result
    wait_for_writer(PDL)
    for share in tl.static_range(SHARES):
        at = partial + (share * rows + m)[:, None].to(tl.int64) * width + n[None, :]
        result += tl.load(at, mask=inside, other=0.0)
        if ACTIVATION is not None:
            second += tl.load(at + num_out, mask=inside, other=0.0)
    parts, before = load_early(
        squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
    )
    finish(
        result, second, None, None, squares, parts, before, bias, slots, norm, out, weighted,
        squares_out, tl.program_id(0), m, n, rows, num_out, out_stride, eps, INNER,
        ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _unpack_kernel(
    codes, scales, offsets, group_of, chosen, out, rows,
    INNER: tl.constexpr, GROUP: tl.constexpr, GROUPS: tl.constexpr, CODES: tl.constexpr,
    ZERO: tl.constexpr, PER_BYTE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write numbers of a weight: of all rows, or of those chosen."""
    may_follow(PDL)
    row, first = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1) * COLUMNS
    num_bytes: tl.constexpr = (INNER + PER_BYTE - 1) // PER_BYTE
    byte = first // PER_BYTE + tl.arange(0, COLUMNS // PER_BYTE)
    inside = (row < rows)[:, None]
    wait_for_writer(PDL)
    n = row.to(tl.int64)
    if chosen is not None:
        n = tl.load(chosen + row, mask=row < rows, other=0).to(tl.int64)
    at = codes + n[:, None] * num_bytes + byte[None, :]
    packed = tl.load(at, mask=inside & (byte < num_bytes)[None, :], other=0)
    numbers = decode(packed, ZERO, CODES, tl.float32, ROWS, COLUMNS)
    numbers = scaled(
        numbers, scales, offsets, group_of, n, inside, first,
        INNER, GROUP, GROUPS, ROWS, COLUMNS, False,
    )  # fmt: skip
    column = first + tl.arange(0, COLUMNS)
    out_at = out + row[:, None].to(tl.int64) * INNER + column[None, :]
    tl.store(out_at, numbers.to(out.dtype.element_ty), mask=inside & (column < INNER)[None, :])


def product(x: Normed, weight: QuantizedWeight, out: Tensor, slots: Tensor | None = None) -> Tensor:
    """Multiply rows by the weight -> out; with slots, rows of slot 0 get zeros."""
    if not _is_unpacked(x.x, weight):
        _launch(x, weight, out, slots=slots)
        return out
    if slots is not None:
        x = Normed(apply_norm(x).masked_fill((slots == 0)[:, None], 0))
    given, _ = inputs(x, weight)
    unpacked = unpack(weight, x.x.dtype)
    return library.product(Operands(apply_norm(given), unpacked, weight.bias), out)


def product_fixed(
    x: Tensor, weight: QuantizedWeight, out: Tensor, slots: Tensor | None = None
) -> None:
    """As `product`, in one order of summation for any number of rows."""
    tile = fixed_tile(len(x), weight.format, weight.in_features, x.dtype)
    _launch(Normed(x), weight, out, slots=slots, fixed=tile)


def product_gated(x: Normed, weight: QuantizedWeight, activation: Activation) -> Tensor:
    """Multiply by gates and values, and gate -> [rows, features / 2]."""
    if not is_gated_at_once(weight) or _is_unpacked(x.x, weight):
        joined = product(x, weight, x.x.new_empty(len(x.x), weight.out_features))
        gates, values = joined.chunk(2, -1)
        return gate(gates, values, activation)
    out = x.x.new_empty(len(x.x), weight.out_features // 2)
    _launch(x, weight, out, activation=activation)
    return out


def product_add(
    x: Normed, weight: QuantizedWeight, residual: Tensor, norms: ResidualNorms
) -> Normed:
    """Add x times weight to the residual, in place, and norm the sum with a deferred scale."""
    return _launch(x, weight, residual, norms=norms)


def is_gated_at_once(weight: LinearWeight) -> bool:
    """Return whether a program can multiply by gates and values: unless they share a fragment."""
    is_fragments = isinstance(weight, QuantizedWeight) and fragments.holds(weight)
    return not is_fragments or weight.out_features % (2 * fragments.FEATURES) == 0


def inputs(x: Normed, weight: QuantizedWeight) -> tuple[Normed, Tensor | None]:
    """Return the rows of a product: unchanged, rounded, or codes in float8 and their scales."""
    if weight.format.activations == "plain":
        return x, None
    if multiplies_float8(weight.format, weight.in_features):
        codes, scales = round_input(x, weight)
        return Normed(codes), scales
    return Normed(rounded(x, weight)), None


def unpack(weight: QuantizedWeight, dtype: torch.dtype, chosen: Tensor | None = None) -> Tensor:
    """Return the numbers of a weight, or of its chosen rows: [rows, in_features]."""
    if fragments.holds(weight):
        return linear_fragments.unpack(weight, dtype, chosen)
    rows, inner = weight.out_features if chosen is None else len(chosen), weight.in_features
    out = torch.empty(rows, inner, dtype=dtype, device=weight.codes.device)
    launch(
        _unpack_kernel,
        (triton.cdiv(rows, UNPACKED_ROWS), triton.cdiv(inner, UNPACKED_COLUMNS)),
        weight.codes, weight.scales, weight.offsets, weight.group_of, chosen, out, rows,
        **_sizes(weight), ROWS=UNPACKED_ROWS, COLUMNS=UNPACKED_COLUMNS, **overlap(),
    )  # fmt: skip
    return out


def constants(
    x: Tensor, x_scales: Tensor | None, weight: QuantizedWeight, tile: CodesTile
) -> dict[str, Any]:
    """Return the keyword arguments that every kernel with `multiply` in it has."""
    return {
        **_sizes(weight), "X_GROUPS": 0 if x_scales is None else len(x_scales),
        "BY_SUMS": tile.by_sums, "FEATURES": tile.features, "ROWS": tile.rows,
        "DEPTH": tile.depth, "STAGES": tile.stages, "EVEN": weight.in_features % tile.depth == 0,
        "DTYPE": DTYPES[x.dtype], "PRECISION": "ieee" if x.dtype is torch.float32 else None,
        "num_warps": tile.num_warps,
    }  # fmt: skip


def _sizes(weight: QuantizedWeight) -> dict[str, Any]:
    format = weight.format
    return {
        "INNER": weight.in_features, "GROUP": format.group or weight.in_features,
        "GROUPS": weight.scales.shape[-1], "CODES": format.codes, "ZERO": format.zero,
        "PER_BYTE": 8 // format.bits,
    }  # fmt: skip


def _is_unpacked(x: Tensor, weight: QuantizedWeight) -> bool:
    """Return whether cuBLAS multiplies these rows by the unpacked weight."""
    return len(x) > MAX_ROWS and not multiplies_float8(weight.format, weight.in_features)


def _launch(
    x: Normed,
    weight: QuantizedWeight,
    out: Tensor,
    *,
    activation: Activation | None = None,
    slots: Tensor | None = None,
    norms: ResidualNorms | None = None,
    fixed: CodesTile | None = None,
) -> Normed:
    """Multiply, and apply an epilogue. With norms, out is the residual; return it under the next
    norm, with a deferred scale."""
    (rows, num_out), inner = out.shape, weight.in_features
    operand, x_scales = inputs(x, weight)
    if fragments.holds(weight):
        return linear_fragments.product(
            operand, weight, out, activation=activation, slots=slots, norms=norms
        )
    num_parts = 0 if operand.squares is None else len(operand.squares)
    tile = fixed or tile_for(rows, weight.out_features, weight.format, inner, operand.x.dtype)
    each = tile.features if activation is None else tile.features // 2
    added = tile.shares > 1
    norm = partial = None
    made = Normed(out)
    if norms is not None:
        parts = triton.cdiv(num_out, ADDED_FEATURES if added else each)
        squares = torch.empty(parts, rows, device=out.device)
        norm, made = norms.next, Normed(torch.empty_like(out), squares, norms.eps)
    if added:
        partial = torch.empty(tile.shares, rows, weight.out_features, device=out.device)
    weighted = None if norms is None else made.x
    epilogue = weight.bias, operand.squares, slots, norm, out, weighted, made.squares
    launch(
        _product_kernel,
        (triton.cdiv(num_out, each) * triton.cdiv(rows, tile.rows), tile.shares),
        operand.x, x_scales, weight.codes, weight.scales, weight.offsets, weight.group_of,
        *epilogue, partial, rows, num_out, num_parts, operand.x.stride(0), out.stride(0), x.eps,
        ACTIVATION=activation, SHARE=tile.share, SHARES=tile.shares, PARTS=PARTS,
        **constants(operand.x, x_scales, weight, tile), enable_fp_fusion=fixed is None,
        **overlap(),
    )  # fmt: skip
    if added:
        launch(
            _add_shares_kernel,
            (triton.cdiv(num_out, ADDED_FEATURES), triton.cdiv(rows, ADDED_ROWS)),
            partial, *epilogue, rows, num_out, num_parts, out.stride(0), x.eps,
            INNER=inner, SHARES=tile.shares, ROWS=ADDED_ROWS, FEATURES=ADDED_FEATURES,
            ACTIVATION=activation, PARTS=PARTS, **overlap(),
        )  # fmt: skip
    return made
