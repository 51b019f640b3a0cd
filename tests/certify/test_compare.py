"""Tests of tensor comparison: rounding passes, and no value is too small to be compared."""

from types import SimpleNamespace

import pytest
import torch

from slotzero.certify.checks import Bounds
from slotzero.certify.compare import first_difference, magnitude
from slotzero.certify.scenarios import _RELATIVE as RELATIVE
from slotzero.certify.scenarios import bounds_of

DTYPES = {name: getattr(torch, name) for name in RELATIVE}


def values(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator) * scale


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("scale", [1e3, 1.0, 0.04, 1e-4])
def test_zeros_in_place_of_small_values_differ(name: str, scale: float) -> None:
    expected = (values(4, 64).sign() * scale).to(DTYPES[name])
    found = first_difference(torch.zeros_like(expected), expected, RELATIVE[name])
    assert found is not None
    assert found[:2] == (0, "0")


@pytest.mark.parametrize("name", DTYPES)
def test_a_small_row_is_not_measured_by_a_large_one(name: str) -> None:
    expected = values(3, 64).to(DTYPES[name])
    expected[1] *= 1e-3
    got = expected.clone()
    got[1] = 0
    found = first_difference(got, expected, RELATIVE[name])
    assert found is not None
    assert found[0] == 1


def test_a_token_is_not_measured_by_another_layer_or_by_its_neighbours() -> None:
    """Pages are compared as [pages, layers, page_size, heads, width]."""
    expected = values(2, 3, 16, 2, 8).bfloat16()
    expected[1, 2, 5] *= 0.01
    got = expected.clone()
    got[1, 2, 5] = 0
    found = first_difference(got, expected, RELATIVE["bfloat16"])
    assert found is not None
    assert found[0] == 1
    assert magnitude(expected).shape == (2, 3, 16, 1, 1)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("scale", [100.0, 1.0, 0.04, 1e-4])
@pytest.mark.parametrize("num_layers", [4, 96])
def test_rounding_is_no_difference(name: str, scale: float, num_layers: int) -> None:
    """The layers of a residual stream are summed in two orders, and rounded after each."""
    dtype, depth, width = DTYPES[name], 256, 64
    first = second = values(8, width, scale=scale).to(dtype)
    for layer in range(num_layers):
        weight = values(depth, width, scale=depth**-0.5, seed=layer + 1)
        x = values(8, depth, scale=scale, seed=1000 + layer)
        halves = x[:, 128:] @ weight[128:] + x[:, :128] @ weight[:128]
        first = (first.float() + (x @ weight).to(dtype)).to(dtype)
        second = (second + halves.to(dtype) * (1 + torch.finfo(dtype).eps)).to(dtype)
    assert not torch.equal(first, second)
    assert first_difference(first, second, RELATIVE[name]) is None


def test_bitwise_comparison_and_nan() -> None:
    expected = torch.tensor([[1.0, torch.nan], [2.0, torch.inf]])
    assert first_difference(expected.clone(), expected, 0.0) is None
    assert first_difference(expected.clone(), expected, 1e-4) is None
    nearly = expected + torch.tensor([[1e-6, 0.0], [0.0, 0.0]])
    assert first_difference(nearly, expected, 0.0) is not None
    assert first_difference(nearly, expected, 1e-4) is None
    for wrong in (torch.nan, torch.inf):
        got = expected.clone()
        got[1, 0] = wrong
        assert first_difference(got, expected, 1e-4) == (1, str(wrong), "2")


@pytest.mark.parametrize("backend", ["cpu", "cuda", "eager"])
def test_bounds_follow_from_the_promise_and_not_from_the_backend(backend: str) -> None:
    def bounds(**limits: object) -> Bounds:
        given = {"dtype": "bfloat16", "kv_cache_dtype": "auto", "backend": backend, **limits}
        return bounds_of(SimpleNamespace(limits=SimpleNamespace(**given)))  # type: ignore[arg-type]

    assert bounds(is_deterministic=True, kv_cache_dtype="fp8") == Bounds(0.0, 0.0, 0.0)
    assert bounds(is_deterministic=False) == Bounds(0.0, 0.05, 0.05)
    assert bounds(is_deterministic=False, kv_cache_dtype="fp8") == Bounds(0.0, 0.1, 0.1)
