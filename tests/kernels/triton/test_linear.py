"""Tests of products over few rows against plain torch: all tiles, norm, gate, bias and residual."""

import itertools

import pytest
import torch
from distinct_tiles import distinct
from torch.nn import functional as F

from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.linear import library, linear_tma
from slotzero.kernels.triton.linear.elementwise import add_norm, apply_norm, cap, gate
from slotzero.kernels.triton.linear.linear import linear, linear_add
from slotzero.kernels.triton.linear.operands import operands
from slotzero.kernels.triton.linear.products_tuned import TunedProducts, ways_of
from slotzero.kernels.triton.linear.tiles import (
    BULK_ROWS,
    PLAIN_ROWS,
    Tile,
    padded_rows,
    tiles_for,
    ways_for,
)
from slotzero.kernels.types import Normed, ResidualNorms
from slotzero.kernels.weights import DenseWeight

SHAPES = [(32, 256), (26, 72), (16, 1104)]  # features, inner; the last two have ragged tiles
ROWS = [1, 3, 5, 11, 64, 70, 250]
EPS = 1e-3
PLAIN = [tile for tile in tiles_for(PLAIN_ROWS, 576, "linear") if tile.slices == 1]
REFERENCE = ReferenceKernels()
KINDS = ["linear", "gated", "add", "logits"]
ACTIVATIONS = ["silu", "gelu_tanh", "clamped_silu"]


def tiles_to_try(rows, inner, kind):
    """Return the tiles to test. Three rows differ from five in plain tiles only: any other tile
    pads them to 8."""
    tiles = distinct(tiles_for(rows, inner, kind))
    if INTERPRETED and rows == 3:
        tiles = [tile for tile in tiles if tile.slices == 1]
    assert tiles
    return tiles


def made(rows, out, inner, device, half):
    torch.manual_seed(rows)
    shapes = {"x": (rows, inner), "weight": (out, inner), "bias": (out,), "norm": (inner,)}
    return [torch.randn(shape, device=device).to(half) for shape in shapes.values()]


def linear_weight(weight: torch.Tensor, bias: torch.Tensor | None = None) -> DenseWeight:
    return DenseWeight(weight, bias, len(weight))


def late(x: torch.Tensor, norm: torch.Tensor, parts: int) -> Normed:
    """Return x with a late norm, as left by a product that splits its features into parts."""
    cuts = x.float().square().tensor_split(parts, dim=-1)
    return Normed(x * norm, torch.stack([cut.sum(-1) for cut in cuts]), EPS)


def normed(x: torch.Tensor, norm: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * norm


def close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    error = (got.float() - expected).norm() / expected.norm()
    return bool(error < 1e-2)  # 16-bit inputs and result


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear_after_a_late_norm(device, half, rows, shape):
    x, weight, bias, norm = made(rows, *shape, device, half)
    expected = F.linear(normed(x.float(), norm.float()), weight.float(), bias.float())
    for tile in tiles_to_try(rows, shape[1], "linear"):
        out = torch.full((rows, shape[0]), torch.nan, device=device).to(half)
        linear(operands(late(x, norm, 5), linear_weight(weight, bias)), out, tile)
        assert close(out, expected), tile


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated(device, half, rows, shape):
    check_gated(device, half, rows, shape, "silu", tiles_to_try(rows, shape[1], "gated"))


@pytest.mark.parametrize("activation", ACTIVATIONS[1:])
@pytest.mark.parametrize("rows", [1, 11, 64])
def test_other_activations(device, half, rows, activation):
    tiles = tiles_for(rows, SHAPES[1][1], "gated")
    check_gated(device, half, rows, SHAPES[1], activation, {tiles[0], tiles[-1]})


def check_gated(device, half, rows, shape, activation, tiles) -> None:
    """Check gated products; gates and values are large enough to be clamped."""
    x, weight, bias, norm = made(rows, *shape, device, half)
    size = shape[0] // 2
    joined = F.linear(normed(x.float(), norm.float()), weight.float(), bias.float())
    expected = REFERENCE.gate(*joined.chunk(2, -1), activation)
    for tile in tiles:
        out = torch.full((rows, size), torch.nan, device=device).to(half)
        given = operands(late(x, norm, 1), linear_weight(weight, bias))
        linear(given, out, tile, activation=activation)
        assert close(out, expected), tile


@pytest.mark.parametrize("rows", ROWS[:-2])  # with more rows, cuBLAS adds
@pytest.mark.parametrize("shape", SHAPES)
def test_add_leaves_what_the_next_norm_needs(device, half, rows, shape):
    x, weight, bias, _ = made(rows, *shape, device, half)
    before, norm = (torch.randn(n, shape[0], device=device).to(half) for n in (rows, 1))
    expected = before.float() + F.linear(x.float(), weight.float(), bias.float())
    for tile in tiles_to_try(rows, shape[1], "add"):
        residual = before.clone()
        after = linear_add(
            operands(Normed(x), linear_weight(weight, bias)),
            residual,
            ResidualNorms(None, norm[0], EPS),
            tile,
        )
        assert close(residual, expected), tile
        assert close(apply_norm(after), normed(residual.float(), norm.float())), tile


@pytest.mark.skipif(INTERPRETED, reason="cuBLAS splits products only on a GPU")
@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("rows", [5, 64, 65, 100, 130, 256])
def test_add_by_cublas_or_by_our_kernel(device, half, rows, has_bias):
    x, weight, bias, _ = made(rows, 96, 256, device, half)
    before, norm = (torch.randn(n, 96, device=device).to(half) for n in (rows, 1))
    bias = bias if has_bias else None
    expected = before.float() + F.linear(x, weight, bias).float()
    products, ways = TunedProducts(), ways_for(rows, 256, "add")
    assert len(ways) > 1
    given = operands(Normed(x), linear_weight(weight, bias))
    assert set(ways_of("add", given, before).values()) == set(ways)
    for way in ways:
        products.choices.choose({products.key("add", 96, 256, rows): str(way)})
        residual = before.clone()
        after = products.add(
            Normed(x), linear_weight(weight, bias), residual, ResidualNorms(None, norm[0], EPS)
        )
        assert close(residual, expected), way
        assert close(apply_norm(after), normed(residual.float(), norm.float())), way


@pytest.mark.parametrize("has_bias", [True, False])
def test_parts_of_a_product_by_cublas_add_up(monkeypatch, has_bias):
    """The parts are float32, which torch supports only on a GPU."""
    monkeypatch.setattr(torch, "bmm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    x, weight, bias, _ = made(70, 96, 256, "cpu", torch.bfloat16)
    bias = bias if has_bias else None
    shares = library.in_shares(operands(Normed(x), linear_weight(weight, bias)), 2)
    assert shares.dtype is torch.float32 and not torch.equal(shares[0], shares[1])
    expected = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
    assert torch.allclose(shares.sum(0), expected, atol=1e-4)


def test_added_products_by_cublas_are_split_at_valid_places():
    shared = {
        (rows, inner, kind)
        for rows, inner, kind in itertools.product((1, 64, 65, 256), (2056, 2048), KINDS)
        if "cublas, 2 shares" in map(str, ways_for(rows, inner, kind))
    }
    assert shared == {(65, 2048, "add"), (256, 2048, "add")}


@pytest.mark.parametrize("rows", ROWS)
def test_one_feature(device, half, rows):
    """The compiler treats the argument 1 as a constant."""
    x, weight, bias, _ = made(rows, 1, 96, device, half)
    expected = F.linear(x.float(), weight.float(), bias.float())
    for tile in tiles_to_try(rows, 96, "linear"):
        out = torch.empty(rows, 1, device=device).to(half)
        linear(operands(Normed(x), linear_weight(weight, bias)), out, tile)
        assert close(out, expected), tile


@pytest.mark.parametrize("size", [5, 16])
def test_a_row_does_not_depend_on_other_rows(device, half, size):
    x, weight, _, norm = made(size, 48, 256, device, half)
    bad = [3, size // 2 + 2]
    hostile = x.clone()
    hostile[bad] = torch.nan
    others = [row for row in range(size) if row not in bad]
    for tile in tiles_to_try(size, 256, "linear"):
        outs = []
        for rows in (x, hostile):
            out = torch.empty(size, 48, device=device).to(half)
            linear(operands(late(rows, norm, 3), linear_weight(weight)), out, tile)
            outs.append(out[others])
        assert torch.equal(*outs), tile


@pytest.mark.parametrize("shape", SHAPES[2:] if INTERPRETED else SHAPES)
def test_a_row_of_a_plain_tile_does_not_depend_on_the_number_of_rows(device, half, shape):
    x, weight, bias, norm = made(8, *shape, device, half)
    normed = late(x, norm, 3)
    for tile in PLAIN:
        outs = []
        for rows in (8, 5, 4, 2):
            out = torch.empty(rows, shape[0], device=device).to(half)
            few = Normed(normed.x[:rows], normed.squares[:, :rows].contiguous(), EPS)
            linear(operands(few, linear_weight(weight, bias)), out, tile)
            outs.append(out[:2])
        assert all(torch.equal(out, outs[0]) for out in outs), tile


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_of_slot_0_get_zeros(device, half, rows):
    x, weight, bias, _ = made(rows, *SHAPES[2], device, half)
    slots = torch.arange(rows, dtype=torch.int32, device=device) % 3
    expected = F.linear(x.float(), weight.float(), bias.float())
    expected[slots == 0] = 0
    for tile in tiles_to_try(rows, SHAPES[2][1], "linear"):
        out = torch.full((rows, SHAPES[2][0]), torch.nan, device=device)
        linear(operands(Normed(x), linear_weight(weight, bias)), out, tile, slots=slots)
        assert (out[slots == 0] == 0).all(), tile
        assert torch.allclose(out, expected, atol=1e-2), tile


def test_plain_tiles_are_for_few_rows():
    for rows in range(2, 257):
        plain = [tile for tile in tiles_for(rows, 576, "add") if tile.slices == 1]
        assert plain == (PLAIN if rows <= PLAIN_ROWS else [])
    for tile in PLAIN:
        side = min(tile.features, tile.num_warps)
        assert tile.features % side == tile.num_warps % side == 0
        assert tile.depth % (4 * 32 * tile.num_warps // side) == 0


def test_whole_rows_of_weights_are_covered_once():
    for inner in (16, 72, 576, 1024, 1536, 2048, 3072):
        whole = [tile for tile in tiles_for(PLAIN_ROWS, inner, "linear") if tile.ahead > 1]
        assert whole or inner < 512
        for tile in whole:
            covered = tile.depth * tile.slices * tile.ahead
            assert inner <= covered < inner + 16 * tile.slices
    assert all(tile.ahead == 1 for tile in tiles_for(PLAIN_ROWS, 4096, "linear"))


@pytest.mark.parametrize(("rows", "processors"), [(12, 1), (250, 2)])
@pytest.mark.parametrize("out", [190, 60])
def test_tiles_that_do_not_fill_the_gpu_are_split(device, half, monkeypatch, rows, processors, out):
    """The last of three tiles or the last two of six are split; with one or two tiles, all are."""
    monkeypatch.setattr(linear_tma, "num_processors", lambda: processors)  # with two programs each
    x, weight, bias, _ = made(rows, out, 328, device, half)
    norm = torch.randn(out, device=device).to(half)
    before = torch.randn(rows, out, device=device).to(half)
    expected = F.linear(x.float(), weight.float(), bias.float())
    tile = next(t for t in tiles_for(rows, 328, "linear") if t.rows and t.features == 64)
    runs = []
    for least in (64, 64, 512):
        monkeypatch.setattr(linear_tma, "LEAST_SHARE", least)
        given = operands(Normed(x), linear_weight(weight, bias))
        result = linear(given, torch.empty_like(before), tile)
        assert close(result, expected)
        residual = before.clone()
        after = linear_add(given, residual, ResidualNorms(None, norm, EPS), tile)
        assert close(residual, before.float() + expected)
        assert close(apply_norm(after), normed(residual.float(), norm.float()))
        assert not linear_tma.arrivals().any(), "a product leaves its counts to the next"
        runs.append((result, residual))
    assert torch.equal(runs[0][0], runs[1][0]) and torch.equal(runs[0][1], runs[1][1])


def test_tensors_that_cannot_be_copied_in_bulk(device, half):
    whole = torch.empty(6, 24, device=device).to(half)
    assert linear_tma.takes(whole, whole[:, 8:])
    assert not linear_tma.takes(whole, whole[:, 4:])
    assert not linear_tma.takes(torch.empty(6, 20, device=device).to(half), whole)


def test_how_many_tiles_are_split(monkeypatch):
    monkeypatch.setattr(linear_tma, "num_processors", lambda: 132)
    monkeypatch.setattr(linear_tma, "shared_memory", lambda: 227 << 10)
    alone, in_pairs = Tile(256, 64, 0, 4, 8, rows=128), Tile(64, 64, 0, 4, 4, rows=128)
    assert linear_tma._split(448, 4096, alone, 2) == (52, 2)
    assert linear_tma._split(64, 14336, alone, 2) == (64, 2)
    assert linear_tma._split(16, 14336, alone, 2) == (16, 8)
    assert linear_tma._split(32, 1024, alone, 2) == (32, 2)
    assert linear_tma._split(264, 4096, alone, 2) == (0, 1)
    assert linear_tma._split(224, 4096, alone, 2) == (92, 1)
    assert linear_tma._split(96, 4096, in_pairs, 2) == (96, 2)
    assert linear_tma._split(300, 4096, in_pairs, 2) == (36, 7)


def test_rows_of_one_padded_size_have_the_same_tiles():
    """One choice serves all of them: a tile that some of them lack would have to be chosen
    again."""
    for rows in range(1, 257):
        for kind in KINDS:
            assert tiles_for(rows, 576, kind) == tiles_for(padded_rows(rows), 576, kind)


def test_the_data_in_flight_of_a_tile_fits_an_h200():
    for rows in range(2, 257):
        for kind in KINDS:
            for tile in tiles_for(rows, 576, kind):
                twice = kind == "gated" and not tile.rows  # a bulk tile has half as many of each
                beside = tile.rows or max(16, padded_rows(rows))
                wide = beside + tile.features * (2 if twice else 1)
                assert 2 * tile.stages * wide * tile.depth <= 227 << 10, (rows, kind, tile)


def test_rows_are_padded_to_few_sizes():
    assert {padded_rows(rows) for rows in range(1, 257)} == {1, 8, 16, 64, 104, 128, 232, 256}


def test_large_tiles_are_for_rows_that_nearly_fill_them():
    for rows in range(1, 257):
        is_large = any(tile.rows == BULK_ROWS for tile in tiles_for(rows, 576, "linear"))
        assert is_large == (105 <= rows <= 128 or 233 <= rows <= 256), rows


@pytest.mark.parametrize("size", [6, 576, 1024])
def test_norms_beside_a_product(device, size):
    before, delta = torch.randn(2, 5, size, device=device)
    weight, after = torch.randn(2, size, device=device)
    for is_late, change_norm in itertools.product((True, False), (None, after)):
        residual = before.clone()
        made = add_norm(residual, delta, ResidualNorms(change_norm, weight, EPS), late=is_late)
        change = delta if change_norm is None else normed(delta, after)
        assert torch.allclose(residual, before + change, atol=1e-5)
        assert (made.squares is not None) == is_late
        assert torch.allclose(apply_norm(made), normed(residual, weight), atol=1e-5)


@pytest.mark.parametrize("change_norm", [True, False])
def test_without_a_norm_the_result_is_the_residual(device, change_norm):
    before, delta = torch.randn(2, 5, 72, device=device)
    after = torch.randn(72, device=device) if change_norm else None
    residual = before.clone()
    made = add_norm(residual, delta, ResidualNorms(after, None, EPS), late=True)
    assert made.x is residual and made.squares is None
    change = delta if after is None else normed(delta, after)
    assert torch.allclose(residual, before + change, atol=1e-5)


def test_an_added_norm_is_rounded_where_the_model_rounds(device, half):
    before, delta = torch.randn(2, 5, 72, device=device).to(half)
    after, norm = torch.randn(2, 72, device=device).to(half)
    expected = before + REFERENCE.rms_norm(delta, after, EPS)
    made = add_norm(before, delta, ResidualNorms(after, norm, EPS), late=False)
    normed = REFERENCE.rms_norm(before, norm, EPS)
    if INTERPRETED:
        assert torch.equal(before, expected)
        assert torch.equal(made.x, normed)
    else:  # the compiler removes a rounding to 16 bits that is undone at once
        assert close(before, expected.float())
        assert close(made.x, normed.float())


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("size", [6, 1030])
def test_a_gate_beside_a_product(device, half, size, activation):
    joined = torch.randn(3, 2 * size, device=device) * 6
    joined[0, 0], joined[1, size] = torch.nan, torch.nan
    parts = joined.chunk(2, -1)
    expected = REFERENCE.gate(*parts, activation)
    assert torch.allclose(gate(*parts, activation), expected, atol=1e-5, equal_nan=True)
    gates, values = joined[2:].to(half).chunk(2, -1)
    wide = REFERENCE.gate(gates.float(), values.float(), activation)
    assert close(gate(gates, values, activation), wide)
    one = gates[:, :1].expand_as(values)
    assert torch.equal(gate(one, values, activation), gate(one.contiguous(), values, activation))


@pytest.mark.parametrize("size", [6, 5000])
def test_a_cap_in_place(device, size):
    x = torch.randn(3, size, device=device) * 50
    x[0, :5] = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan])
    expected = 30 * (x / 30).tanh()
    cap(x, 30.0)
    assert torch.allclose(x, expected, atol=1e-5, equal_nan=True)
    assert (x[0, :2] == 0).all()
