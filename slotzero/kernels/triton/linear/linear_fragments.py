"""Products with 4-bit and 8-bit weights in fragments, over 1 to 256 rows.

Each program owns some blocks of features; their words are read once, and those of the first steps
before the wait for the rows. Norm, bias, activation and residual are fused (`epilogue.py`). Sums
run in one fixed order per tile.
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
    wait_for_writer,
)
from slotzero.kernels.triton.linear import fragments
from slotzero.kernels.triton.linear.epilogue import finish, load_early
from slotzero.kernels.triton.linear.fragment_codes import (
    as_float,
    load_ahead,
    multiply,
    plain,
    row_of,
)
from slotzero.kernels.triton.linear.fragment_ptx import decoder
from slotzero.kernels.triton.linear.linear_tma import arrivals
from slotzero.kernels.triton.linear.tiles_fragments import FragmentTile, tile_for
from slotzero.kernels.types import Activation, Normed, ResidualNorms
from slotzero.kernels.weights import QuantizedWeight

VARYING = ["rows", "num_parts"]
MOST_LOADED = 2048  # partial sums of squares that a program reads at a time
UNPACKED_ROWS = 16
DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.float32 if INTERPRETED else tl.bfloat16,  # which it cannot multiply
}
SCALES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.uint8: tl.uint8,
}
PAIRS = {1: torch.int16, 2: torch.int32, 4: torch.int64}  # by bytes of a scale


@triton.jit(do_not_specialize=VARYING)
def _product_kernel(
    x, codes, scales, offsets, bias, squares, slots, norm, out, weighted, squares_out, partial,
    arrived, rows, num_out, num_parts, x_stride, out_stride, eps,
    INNER: tl.constexpr, GROUPS: tl.constexpr, CUT: tl.constexpr, PER: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, DECODER: tl.constexpr, SCALES: tl.constexpr,
    BLOCKS: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, AHEAD: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, PRECISION: tl.constexpr, ACTIVATION: tl.constexpr,
    SHARE: tl.constexpr, SHARES: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply one tile, or one share of it. A tile with an activation has as many gates as
    values."""
    may_follow(PDL)
    cuts = tl.cdiv(rows, ROWS)
    part, first_m, share = (
        tl.program_id(0) // cuts,
        tl.program_id(0) % cuts * ROWS,
        tl.program_id(1),
    )
    gated: tl.constexpr = ACTIVATION is not None
    halves: tl.constexpr = 2 if gated else 1
    each: tl.constexpr = BLOCKS // halves
    depths: tl.constexpr = (INNER + 127) // 128
    features: tl.constexpr = BLOCKS * 16
    source = first_m + row_of(ROWS, SLICES)
    blocks = tl.cdiv(num_out, 16)
    begin, end = share * SHARE, tl.minimum((share + 1) * SHARE, depths)
    ahead = load_ahead(
        codes, scales, offsets, part * each, blocks, blocks, begin, end,
        INNER, GROUPS, CUT, PER, CODES, BLOCKS, halves, SLICES, AHEAD,
    )  # fmt: skip
    m, n = first_m + tl.arange(0, ROWS), part * (each * 16) + tl.arange(0, each * 16)
    early: tl.constexpr = ROWS <= 8  # of more rows, they would take registers from the loop
    wait_for_writer(PDL)
    if early:
        squared, before = load_early(
            squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
        )
    acc = multiply(
        ahead, x, codes, scales, offsets, source, source < rows, part * each, blocks, blocks,
        begin, end, x_stride, INNER, GROUPS, CUT, PER, CODES, ZERO, DECODER, SCALES,
        BLOCKS, halves, SLICES, ROWS, AHEAD, STAGES, DTYPE, PRECISION,
    )  # fmt: skip
    if SHARES > 1:
        lane, row = tl.arange(0, features)[:, None], tl.arange(0, ROWS)[None, :]
        its = tl.program_id(0)
        at = partial + its.to(tl.int64) * (SHARES * features * ROWS) + lane * ROWS + row
        tl.store(at + share * (features * ROWS), acc)
        tl.debug_barrier()  # all writes of the program, then the count that publishes them
        if tl.atomic_add(arrived + its, 1, sem="acq_rel") < SHARES - 1:
            return
        tl.store(arrived + its, 0)  # for the next product
        tl.debug_barrier()
        acc = tl.zeros([features, ROWS], tl.float32)
        for i in tl.static_range(SHARES):
            acc += tl.load(at + i * (features * ROWS))
    result = tl.trans(acc)
    second = result
    if gated:
        pairs = tl.permute(tl.reshape(acc, [2, each * 16, ROWS]), (2, 1, 0))
        result, second = tl.split(pairs)
    if not early:
        squared, before = load_early(
            squares, norm, out, m, n, rows, num_out, num_parts, out_stride, PARTS, ROWS
        )
    finish(
        result, second, None, None, squares, squared, before, bias, slots, norm, out, weighted,
        squares_out, part, m, n, rows, num_out, out_stride, eps, INNER, ACTIVATION,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _unpack_kernel(
    codes, scales, offsets, chosen, out, rows,
    INNER: tl.constexpr, GROUPS: tl.constexpr, CUT: tl.constexpr, PER: tl.constexpr,
    CODES: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write numbers of a weight, of all rows or of those chosen: ROWS by one block's depth."""
    may_follow(PDL)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    depth = tl.program_id(1)
    eight = tl.arange(0, 16)[None, :, None]  # neighbours along the inner dimension: chunk and lane
    place = tl.arange(0, 8)[None, None, :]
    inside = row < rows
    wait_for_writer(PDL)
    n = row
    if chosen is not None:
        n = tl.load(chosen + row, mask=inside, other=0)
    n = n.to(tl.int64)
    block, high, low = n // 16, n % 16 // 8, n % 8
    chunk, t, u, v, d = eight // 4, eight % 4, place // 4, place // 2 % 2, place % 2
    depths: tl.constexpr = (INNER + 127) // 128
    parts: tl.constexpr = 2 if CODES == "uint8" else 1
    codes_each: tl.constexpr = 4 // parts
    its = (block * depths + depth) * parts + chunk // codes_each
    word = tl.load(
        codes + its * 256 + u * 128 + (low * 4 + t) * 4 + v * 2 + high, mask=inside, other=0
    )
    half = word >> 16 * d & 0xFFFF
    numbers = plain(half, 0, CODES, ZERO, tl.float32)
    for i in tl.static_range(1, codes_each):
        numbers = tl.where(
            chunk % codes_each == i, plain(half, i, CODES, ZERO, tl.float32), numbers
        )
    group = depth // PER
    if GROUPS == 1:
        group = 0
    at = ((block * GROUPS + group) * 8 + low) * CUT + chunk * CUT // 4
    bits: tl.constexpr = SCALES.primitive_bitwidth
    scale = tl.load(scales + at, mask=inside, other=0) >> high * bits
    if SCALES == tl.uint8:  # noqa: SIM300
        numbers = tl.where(scale & 255 == 0, numbers * 2.0**-127, numbers * as_float(scale, SCALES))
    else:
        numbers *= as_float(scale, SCALES)
    if offsets is not None:
        shift = tl.load(offsets + at, mask=inside, other=0) >> high * 32
        numbers += as_float(shift, tl.float32)
    k = depth * 128 + eight * 8 + place
    at = out + row.to(tl.int64) * INNER + k
    tl.store(at, numbers.to(out.dtype.element_ty), mask=inside & (k < INNER))


def product(
    x: Normed,
    weight: QuantizedWeight,
    out: Tensor,
    tile: FragmentTile | None = None,
    *,
    activation: Activation | None = None,
    slots: Tensor | None = None,
    norms: ResidualNorms | None = None,
) -> Normed:
    """Multiply, and apply an epilogue. With norms, out is the residual; return it under the next
    norm, with a deferred scale."""
    (rows, num_out), inner = out.shape, weight.in_features
    tile = tile or tile_for(rows, weight.out_features, inner, activation is not None)
    features = tile.blocks * fragments.FEATURES // (1 if activation is None else 2)
    programs = triton.cdiv(num_out, features) * triton.cdiv(rows, tile.rows)
    norm, made = None, Normed(out)
    if norms is not None:
        squares = torch.empty(triton.cdiv(num_out, features), rows, device=out.device)
        norm, made = norms.next, Normed(torch.empty_like(out), squares, norms.eps)
    partial = arrived = None
    if tile.shares > 1:
        size = programs * tile.shares * tile.blocks * fragments.FEATURES * tile.rows
        partial, arrived = torch.empty(size, device=out.device), arrivals()
    num_parts = 0 if x.squares is None else len(x.squares)
    share = triton.cdiv(triton.cdiv(inner, fragments.DEPTH), tile.shares)
    launch(
        _product_kernel, (programs, tile.shares),
        x.x, *tensors(weight), weight.bias, x.squares, slots, norm, out,
        None if norms is None else made.x, made.squares, partial, arrived,
        rows, num_out, num_parts, x.x.stride(0), out.stride(0), x.eps,
        **constants(x.x, weight, tile), ACTIVATION=activation, SHARE=share, SHARES=tile.shares,
        PARTS=_parts(num_parts, tile.rows), **overlap(),
    )  # fmt: skip
    return made


def _parts(num_parts: int, rows: int) -> int:
    """Return how many partial sums of squares of each row are read at a time."""
    padded: int = triton.next_power_of_2(max(1, num_parts))
    return min(padded, MOST_LOADED // rows)


def unpack(weight: QuantizedWeight, dtype: torch.dtype, chosen: Tensor | None = None) -> Tensor:
    """Return the numbers of a weight, or of its chosen rows: [rows, in_features]."""
    rows = weight.out_features if chosen is None else len(chosen)
    inner = weight.in_features
    out = torch.empty(rows, inner, dtype=dtype, device=weight.codes.device)
    launch(
        _unpack_kernel, (triton.cdiv(rows, UNPACKED_ROWS), triton.cdiv(inner, fragments.DEPTH)),
        *tensors(weight), chosen, out, rows, **_sizes(weight), ROWS=UNPACKED_ROWS, **overlap(),
    )  # fmt: skip
    return out


def tensors(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the tensors of a weight as kernels take them, with scales in pairs."""
    pairs = weight.scales.view(PAIRS[weight.scales.itemsize])
    return weight.codes, pairs, None if weight.offsets is None else weight.offsets.view(torch.int64)


def constants(x: Tensor, weight: QuantizedWeight, tile: FragmentTile) -> dict[str, Any]:
    """Return the keyword arguments that every kernel with `multiply` in it has."""
    return {
        **_sizes(weight), "DECODER": decoder(weight.format, x.dtype), "BLOCKS": tile.blocks,
        "SLICES": tile.slices, "ROWS": tile.rows, "AHEAD": tile.ahead, "STAGES": tile.stages,
        "DTYPE": DTYPES[x.dtype],
        "PRECISION": "ieee" if x.dtype is torch.float32 else None, "num_warps": tile.num_warps,
    }  # fmt: skip


def _sizes(weight: QuantizedWeight) -> dict[str, Any]:
    format = weight.format
    groups, cut = fragments.scale_groups(format, weight.in_features)
    group = format.group or fragments.DEPTH
    return {
        "INNER": weight.in_features, "GROUPS": groups, "CUT": cut,
        "PER": max(1, group // fragments.DEPTH) if cut == 1 else 1,
        "CODES": format.codes, "ZERO": format.zero, "SCALES": SCALES[weight.scales.dtype],
    }  # fmt: skip
