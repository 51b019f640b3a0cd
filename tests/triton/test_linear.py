"""Products over few rows against plain torch: every tile, with norm, gate, bias and residual."""

import pytest
import torch
from torch.nn import functional as F

from slotzero.kernels.contract import Normed
from slotzero.kernels.triton.elementwise import add_norm, applied, gated
from slotzero.kernels.triton.linear import linear, linear_add
from slotzero.kernels.triton.tiles import padded_rows, tiles_for

SHAPES = [(48, 256), (50, 72), (16, 1100)]  # features, inner; the last two leave ragged tiles
ROWS = [1, 2, 11, 20, 64]
EPS = 1e-3


def made(rows, out, inner, device, half):
    torch.manual_seed(rows)
    shapes = {"x": (rows, inner), "weight": (out, inner), "bias": (out,), "norm": (inner,)}
    return [torch.randn(shape, device=device).to(half) for shape in shapes.values()]


def late(x: torch.Tensor, norm: torch.Tensor, parts: int) -> Normed:
    """As a product that cut its features into parts would leave it."""
    cuts = x.float().square().tensor_split(parts, dim=-1)
    return Normed(x * norm, torch.stack([cut.sum(-1) for cut in cuts]))


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
    for tile in tiles_for(rows, adds=False):
        out = torch.full((rows, shape[0]), torch.nan, device=device).to(half)
        linear(late(x, norm, 5), EPS, weight, bias, out, tile, gated=False)
        assert close(out, expected), tile


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gated(device, half, rows, shape):
    x, weight, bias, norm = made(rows, *shape, device, half)
    size = shape[0] // 2
    joined = F.linear(normed(x.float(), norm.float()), weight.float(), bias.float())
    expected = F.silu(joined[:, :size]) * joined[:, size:]
    for tile in tiles_for(rows, adds=False):
        out = torch.full((rows, size), torch.nan, device=device).to(half)
        linear(late(x, norm, 1), EPS, weight, bias, out, tile, gated=True)
        assert close(out, expected), tile


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_add_leaves_what_the_next_norm_needs(device, half, rows, shape):
    x, weight, bias, _ = made(rows, *shape, device, half)
    before, norm = (torch.randn(n, shape[0], device=device).to(half) for n in (rows, 1))
    expected = before.float() + F.linear(x.float(), weight.float(), bias.float())
    for tile in tiles_for(rows, adds=True):
        residual = before.clone()
        after = linear_add(x, weight, bias, residual, norm[0], tile)
        assert close(residual, expected), tile
        assert close(applied(after, EPS), normed(residual.float(), norm.float())), tile


def test_a_row_does_not_depend_on_its_neighbours(device, half):
    x, weight, _, norm = made(16, 48, 256, device, half)
    hostile = x.clone()
    hostile[[3, 9]] = torch.nan
    others = [row for row in range(16) if row not in (3, 9)]
    for tile in tiles_for(16, adds=False):
        outs = []
        for rows in (x, hostile):
            out = torch.empty(16, 48, device=device).to(half)
            linear(late(rows, norm, 3), EPS, weight, None, out, tile, gated=False)
            outs.append(out[others])
        assert torch.equal(*outs), tile


def test_rows_are_padded_to_few_sizes():
    assert {padded_rows(rows) for rows in range(1, 65)} == {1, 8, 16, 64}


@pytest.mark.parametrize("size", [6, 576, 1024])
def test_norm_and_gate_beside_a_product(device, size):
    before, delta = torch.randn(2, 5, size, device=device)
    weight = torch.randn(size, device=device)
    for is_late in (True, False):
        residual = before.clone()
        after = add_norm(residual, delta, weight, EPS, late=is_late)
        assert torch.equal(residual, before + delta)
        assert (after.squares is not None) == is_late
        assert torch.allclose(applied(after, EPS), normed(residual, weight), atol=1e-5)
    joined = torch.randn(3, 2 * size, device=device)
    expected = F.silu(joined[:, :size]) * joined[:, size:]
    assert torch.allclose(gated(joined), expected, atol=1e-5)
