"""Weights in fragments: their layout, each tile and epilogue, and the PTX that decodes them."""

import itertools
import re

import pytest
import torch
from test_quantized import (
    EPS,
    MXFP4,
    REFERENCE,
    check_add,
    close,
    drawn,
    late,
    ours,
    rows_of,
    surrounded,
    weight_of,
)

from slotzero.kernels.quantized import QuantizedRows, dequantise, stack_rows, values_of
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.linear import fragment_ptx, fragments, linear_fragments
from slotzero.kernels.triton.linear.elementwise import apply_norm
from slotzero.kernels.triton.linear.linear_tma import arrivals
from slotzero.kernels.triton.linear.tiles_fragments import FragmentTile, expert_tile, tile_for
from slotzero.kernels.types import Normed, ResidualNorms
from slotzero.kernels.weights import QuantizedWeight, WeightFormat

FORMATS = {
    "int4 of 128": WeightFormat("uint4", 128, zero=8),
    "int4 of 256": WeightFormat("uint4", 256, zero=8, scale_dtype=torch.bfloat16),
    "int4 of 96, offsets": WeightFormat("uint4", 96, has_offsets=True),
    "int4 of 64, offsets": WeightFormat("uint4", 64, has_offsets=True, scale_dtype=torch.float16),
    "int4 of 32": WeightFormat("uint4", 32, zero=8, scale_dtype=torch.bfloat16),
    "int4 of rows, offsets": WeightFormat("uint4", has_offsets=True),
    "int8 of 32": WeightFormat("uint8", 32, zero=16),
    "int8 of 128, offsets": WeightFormat("uint8", 128, has_offsets=True),
    "int8 of rows": WeightFormat("uint8", zero=128),
    "mxfp4": MXFP4,
}
OTHERS = {
    "scattered": WeightFormat("uint4", 32, 8, is_scattered=True, groups=7),
    "groups of 16": WeightFormat("uint8", 16, zero=128),
    "groups of 24": WeightFormat("uint4", 24, zero=8),
    "float8": WeightFormat("float8", 128),
}
TILES = {
    "a slice per warp": FragmentTile(8, 2, 4, 2, 4),
    "more slices than depths": FragmentTile(16, 1, 8, 1, 8),
    "rows shared by warps": FragmentTile(16, 4, 1, 2, 4),
    "stages": FragmentTile(32, 8, 1, 1, 8, stages=2),
    "shares": FragmentTile(8, 2, 2, 1, 2, shares=3),
}
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
each_tile = pytest.mark.parametrize("tile", TILES.values(), ids=TILES)


@each_format
@pytest.mark.parametrize("shape", [(70, 201), (16, 128), (33, 400)])
def test_packing_is_undone_exactly(device, format, shape):
    """Also for chosen rows, by a kernel that reads no more than the weight."""
    rows = drawn(format, *shape)
    packed = fragments.pack(rows, format)
    for field, (size, dtype) in TritonKernels().quantized_shapes(*shape, format).items():
        assert packed[field].shape == size and packed[field].dtype is dtype
    weight = ours(weight_of(format, *shape, device=device))
    packed = {field: surrounded(tensor, device) for field, tensor in packed.items()}
    weight = weight._replace(**packed)
    wanted = dequantise(rows, format).to(device)
    chosen = torch.tensor([shape[0] - 1, 0, 9], device=device).int()
    for got, numbers in (
        (linear_fragments.unpack(weight, torch.float32), wanted),
        (linear_fragments.unpack(weight, torch.float32, chosen), wanted[chosen.long()]),
    ):
        if format.has_offsets and not INTERPRETED:  # a card rounds code * scale + offset once
            assert torch.allclose(got, numbers, rtol=0, atol=1e-6)
        else:
            assert torch.equal(got, numbers)


@each_format
def test_experts_are_packed_one_by_one(format):
    experts = [drawn(format, 20, 150) for _ in range(3)]
    together = fragments.pack(stack_rows(experts), format)
    for i, rows in enumerate(experts):
        for field, tensor in fragments.pack(rows, format).items():
            assert torch.equal(together[field][i], tensor)


@pytest.mark.parametrize("format", OTHERS.values(), ids=OTHERS)
def test_other_formats_keep_the_plain_layout(format):
    assert not fragments.takes(format)
    assert TritonKernels().quantized_shapes(30, 70, format) == format.shapes(30, 70)


@each_tile
@each_format
def test_each_tile(device, half, format, tile):
    """Row tiles that are not full, features that no tile divides, and depths that no step does.

    The interpreter runs each tile with both shapes in both dtypes, and each format with both shapes
    and both dtypes; a GPU runs every combination.
    """
    dtypes, shapes = (torch.float32, half), ((1, 70, 201), (tile.rows + 3, 40, 650))
    cases = itertools.product(dtypes, shapes)
    if INTERPRETED:
        is_odd = list(FORMATS.values()).index(format) % 2
        cases = zip(dtypes, shapes[::-1] if is_odd else shapes, strict=True)
    for dtype, (rows, features, inner) in cases:
        weight = weight_of(format, features, inner, device=device, dtype=dtype, bias=False)
        x = Normed(rows_of(rows, inner, dtype, device))
        out = torch.full((rows, features), torch.nan, device=device).to(dtype)
        linear_fragments.product(x, ours(weight), out, tile)
        assert close(out, REFERENCE.linear(x, weight)), (dtype, rows)


@each_tile
@pytest.mark.parametrize("name", ["int4 of 128", "int8 of 128, offsets", "mxfp4"])
def test_epilogues(device, half, name, tile):
    rows, features, inner = 5, 96, 700
    weight = weight_of(FORMATS[name], features, inner, device=device, dtype=half)
    fast, x = ours(weight), late(rows_of(rows, inner, half, device))
    wanted = REFERENCE.linear(Normed(apply_norm(x)), weight)
    slots = torch.arange(rows, device=device).int() % 3
    out = torch.full((rows, features), torch.nan, device=device).to(half)
    linear_fragments.product(x, fast, out, tile, slots=slots)
    assert (out[slots == 0] == 0).all() and close(out, wanted * (slots > 0)[:, None])
    if tile.blocks > 1:
        out = torch.full((rows, features // 2), torch.nan, device=device).to(half)
        linear_fragments.product(x, fast, out, tile, activation="silu")
        gated = REFERENCE.linear_gated(Normed(apply_norm(x)), weight, "silu")
        assert close(out, gated.x)
    plain = rows_of(rows, inner, half, device)
    before = torch.randn(rows, features, device=device).to(half)
    norms = ResidualNorms(None, torch.randn(features, device=device).to(half), EPS)
    wanted, normed = REFERENCE.linear_add_norm(Normed(plain), weight, before, norms)
    made = linear_fragments.product(Normed(plain), fast, before, tile, norms=norms)
    assert close(before, wanted) and close(apply_norm(made), normed.x)
    assert not arrivals().any()


@pytest.mark.parametrize("features", [48, 96])
def test_gates_and_values_in_one_block(device, features):
    """A block of 48 features has gates and values, and cannot be gated by its program."""
    weight = weight_of(FORMATS["int4 of 32"], features, 160, device=device)
    x = Normed(rows_of(3, 160, torch.float32, device))
    got = TritonKernels().linear_gated(x, ours(weight), "silu")
    assert close(got.x, REFERENCE.linear_gated(x, weight, "silu").x)


@pytest.mark.parametrize("rows", [1, 20, 64])
def test_residual_rows(device, half, rows):
    check_add(
        rows_of(rows, 300, half, device), weight_of(MXFP4, 50, 300, device=device, dtype=half)
    )


def test_a_short_weight_does_not_read_scales_of_groups_that_it_lacks(device):
    """One group, though the kernel has several slices."""
    weight = weight_of(FORMATS["int8 of 128, offsets"], 50, 72, device=device)
    x = Normed(rows_of(3, 72, torch.float32, device))
    out = torch.empty(3, 50, device=device)
    linear_fragments.product(x, ours(weight), out, FragmentTile(8, 1, 8, 2, 8))
    assert close(out, REFERENCE.linear(x, weight))


def test_default_tiles_cover_a_weight():
    for rows, features, inner, is_gated in itertools.product(
        (1, 8, 9, 16, 17, 64, 65, 256),
        (16, 48, 6144, 28672),
        (32, 2880, 4096, 28672),
        (False, True),
    ):
        tile = tile_for(rows, features, inner, is_gated)
        depths = -(-inner // fragments.DEPTH)
        share = -(-depths // tile.shares)
        assert (tile.shares - 1) * share < depths  # none of them is empty
        assert tile.blocks % 2 == 0 or not is_gated  # as many gates as values
        assert tile.num_warps == tile.slices or tile.slices == 1
        assert min(rows, 64) <= expert_tile(min(rows, 64), inner).rows <= 2 * max(8, min(rows, 64))


@pytest.mark.skipif(not INTERPRETED, reason="on a card, products run it")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "format",
    [WeightFormat("uint4", 32, zero) for zero in (0, 3, 8)]
    + [WeightFormat("uint8", 32, zero) for zero in (0, 16, 128)]
    + [MXFP4],
    ids=lambda format: f"{format.codes} {format.zero}",
)
def test_ptx_decodes_every_code_exactly(monkeypatch, format, dtype):
    """The test runs the instructions on integers, in which it writes what the manual says of them:
    the interpreter has none of them."""
    monkeypatch.setattr(fragment_ptx, "INTERPRETED", False)
    fragment_ptx.decoder.cache_clear()
    text = fragment_ptx.decoder(format, dtype)
    fragment_ptx.decoder.cache_clear()
    assert text is not None
    codes = torch.arange(16 * 128).view(16, 128) * 7 % (1 << format.bits)
    rows = QuantizedRows(codes.to(torch.uint8), torch.ones(16, 4).to(format.scale_dtype))
    packed = fragments.pack(rows, format)["codes"]
    count = 16 // format.bits
    # by part, u, row and lane of a row, v, half of the rows: an output for each code of a half word
    outs = run_ptx(text, packed.flatten().long() & 0xFFFFFFFF, dtype)
    made = torch.stack([out.view(-1, 2, 8, 4, 2, 2) for out in outs], dim=-1)
    made = made.unflatten(-1, (count, 2))  # [part, u, row, t, v, half, code, d]
    made = made.permute(5, 2, 0, 6, 3, 1, 4, 7).reshape(16, 128)
    assert torch.equal(made.float(), values_of(rows.codes, format))


def run_ptx(text: str, words: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the outputs for an input of 32-bit words, as numbers."""
    num = text.count("{$") * 2
    held: dict[str, torch.Tensor] = {f"${num}": words}

    def read(name: str) -> torch.Tensor:
        return held[name] if name in held else torch.full_like(words, int(name, 16))

    def halves(bits: torch.Tensor) -> torch.Tensor:
        parts = torch.stack((bits & 0xFFFF, bits >> 16), dim=-1)
        return parts.to(torch.int32).to(torch.int16).view(dtype).double()

    for line in re.findall(r"(\w[^;{]*(?:\{[^}]*\})?[^;{]*);", text.strip("{}\n ")):
        name, _, rest = line.strip().partition(" ")
        if name == "reg" or name.startswith("b32"):
            continue
        outputs = re.match(r"\{(\$\d+), (\$\d+)\}, (\w+)", rest)
        if outputs is not None:
            low, high, source = outputs.groups()
            held[low], held[high] = halves(held[source]).unbind(-1)
            continue
        target, *operands = rest.split(", ")
        match name:
            case "mov.b32":
                held[target] = read(operands[0])
            case "shr.u32":
                held[target] = read(operands[0]) >> int(operands[1])
            case "shl.b32":
                held[target] = read(operands[0]) << int(operands[1]) & 0xFFFFFFFF
            case "and.b32":
                held[target] = read(operands[0]) & read(operands[1])
            case "lop3.b32":
                a, b, c = (read(operand) for operand in operands[:3])
                held[target] = {"0xEA": (a & b) | c, "0x6A": (a & b) ^ c}[operands[3]]
            case "fma.rn.bf16x2" | "fma.rn.f16x2":
                a, b, c = (halves(read(operand)) for operand in operands)
                bits = (a * b + c).to(dtype).view(torch.int16).long() & 0xFFFF
                held[target] = bits[..., 0] | bits[..., 1] << 16
            case _:
                raise AssertionError(f"unknown instruction: {line}")
    return [held[f"${i}"] for i in range(num)]


def test_weights_of_the_kernel_set_are_fragments(device):
    weight = weight_of(FORMATS["int4 of 128"], 32, 256, device=device)
    assert isinstance(weight, QuantizedWeight)
    assert ours(weight).codes.dtype is torch.int32
