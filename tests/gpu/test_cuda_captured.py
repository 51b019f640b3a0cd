"""Tests of certificates of functions that are captured with torch.cuda.graph."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import certify_a_decode_step as decode
import certify_an_mlp as mlp

from slotzero.certify import CapturedStep, Certificate, certify_captured

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

ROWS = max(mlp.SIZES) + 1


def certified(step: CapturedStep[torch.Tensor]) -> Certificate:
    return certify_captured(step, list(torch.randn(ROWS, mlp.WIDTH, device="cuda")))


@pytest.mark.parametrize(
    "certificate_of",
    [
        lambda: mlp.certificate_of(is_centred=False, device="cuda"),
        lambda: decode.certificate_of(is_mended=True, device="cuda"),
    ],
    ids=["mlp", "decode"],
)
def test_own_graphs_are_certified_to_their_nodes(certificate_of: Callable[[], Certificate]) -> None:
    certificate = certificate_of()
    assert certificate.backend == "CUDA graphs"
    assert certificate.passed, str(certificate)
    assert not any(cell.left_out for cell in certificate.cells), str(certificate)


def test_unsafe_padding_of_own_graphs_is_named() -> None:
    centred = mlp.certificate_of(is_centred=True, device="cuda")
    assert {violation.tensor for violation in centred.violations} == {"y"}
    usual = decode.certificate_of(is_mended=False, device="cuda")
    leaked = {violation.tensor for violation in usual.violations if violation.check == "S1"}
    assert leaked == {"input_ids", "positions"}


def test_graphs_that_torch_does_not_keep_are_certified_without_their_nodes() -> None:
    captured = mlp.CapturedMlp(device="cuda")
    graphs = {}
    for size in mlp.SIZES:
        graphs[size] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[size]):
            captured.run(size)
    certificate = certified(replace(captured.declared(), replay=graphs))
    assert certificate.passed, str(certificate)
    left_out = [cell for cell in certificate.cells if cell.left_out]
    assert {cell.check for cell in left_out} == {"S5"}
    assert all("keep_graph=True" in cell.left_out for cell in left_out)


def test_a_function_without_graphs_is_captured_for_the_certificate() -> None:
    certificate = certified(replace(mlp.CapturedMlp(device="cuda").declared(), replay=None))
    assert certificate.backend == "cuda"
    assert certificate.passed, str(certificate)


def test_an_output_inside_the_pool_of_the_graphs_is_named() -> None:
    """The usual way to capture a module leaves its output there, where other sizes write."""
    captured = mlp.CapturedMlp(device="cuda")
    with torch.cuda.graph(graph := torch.cuda.CUDAGraph(keep_graph=True)):
        captured.y = captured.mlp(captured.x)

    def run(size: int) -> None:
        captured.y[:size].copy_(captured.mlp(captured.x[:size]))

    graphs = {max(mlp.SIZES): graph}
    step = replace(captured.declared(), sizes=(max(mlp.SIZES),), step=run, replay=graphs)
    found = [(v.check, v.tensor) for v in certified(step).violations if v.check == "S6"]
    assert found == [("S6", "y")]
