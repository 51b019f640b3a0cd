"""CPU kernels: a row's result is the same to the bit alone, in every batch and at every place.

Each primitive is tried with every number of rows up to ROWS, in random orders, with sizes that fill
registers of 4, 8 and 16 floats and sizes that do not. Instruction sets other than this machine's
best run in a process of their own, since a process loads the kernels once.
"""

import os
import platform
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from slotzero.kernels.cpu import build
from slotzero.kernels.cpu.kernels import ACTIVATIONS, CpuKernels
from slotzero.kernels.nouns import Experts, ExpertWeights, Normed, Tokens

ROWS = 37
SIZES = (1, 3, 4, 7, 8, 12, 16, 20, 33, 64, 100)
EPS = 1e-6

RowFunction = Callable[[Tensor], Tensor]
"""[rows, ...] -> [rows, ...], each row by itself."""


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels()


def values(rows: int, *size: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, *size, generator=torch.Generator().manual_seed(seed)) * 4


def require_invariant(function: RowFunction, x: Tensor) -> None:
    alone = torch.cat([function(x[i : i + 1].clone()) for i in range(len(x))])
    draw = torch.Generator().manual_seed(1)
    for count in range(1, len(x) + 1):
        order = torch.randperm(len(x), generator=draw)[:count]
        assert torch.equal(function(x[order].clone()), alone[order]), f"{count} rows in {order}"


def stacked(*tensors: Tensor) -> Tensor:
    return torch.cat([t.flatten(1) for t in tensors], dim=1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gates(kernels, activation, size):
    def gate(x: Tensor) -> Tensor:
        return kernels.gate(*x.chunk(2, -1), activation)

    require_invariant(gate, values(ROWS, 2 * size))


@pytest.mark.parametrize("size", SIZES)
def test_norms(kernels, size):
    weight, after = values(2, size, seed=2)
    require_invariant(lambda x: kernels.rms_norm(x, weight, EPS), values(ROWS, size))

    def add_norm(x: Tensor) -> Tensor:
        change, residual = x.chunk(2, -1)
        total, normed = kernels.add_norm(change, residual, after, weight, EPS)
        return stacked(total, normed.x)

    require_invariant(add_norm, values(ROWS, 2 * size))
    heads = values(ROWS, 3, size)
    require_invariant(lambda x: kernels.rms_norm(x, weight, EPS), heads)


@pytest.mark.parametrize("size", SIZES)
def test_softmax_and_softcap(kernels, size):
    require_invariant(kernels.softmax, values(ROWS, size))
    require_invariant(lambda x: kernels.softcap(x, 3.0), values(ROWS, size))


@pytest.mark.parametrize("size", SIZES)
def test_rope_angles(kernels, size):
    frequency = torch.rand(size)

    def angles(positions: Tensor) -> Tensor:
        return stacked(*kernels.turn(Tokens(torch.ones_like(positions), positions), frequency, 1.5))

    require_invariant(angles, torch.arange(ROWS, dtype=torch.int32) * 977)


@pytest.mark.parametrize("inner", [1, 5, 16, 33])
@pytest.mark.parametrize("size", SIZES)
def test_products(kernels, size, inner):
    weight, bias = kernels.pack(values(size, inner, seed=2)), values(1, size, seed=3)[0]
    require_invariant(lambda x: kernels.product(x, weight, bias, size), values(ROWS, inner))
    heads = values(ROWS, 3, inner)
    for transposed in (False, True):
        shape = (3, size, inner) if transposed else (3, inner, size)
        by = values(*shape, seed=4)
        require_invariant(lambda x, by=by, t=transposed: kernels.per_head_product(x, by, t), heads)


@pytest.mark.parametrize("scores", ["sigmoid", "softmax", "softmax_of_chosen"])
def test_experts(kernels, scores):
    groups = {"num_groups": 4, "top_groups": 2} if scores == "sigmoid" else {}
    shape = Experts(12, 5, 20, "silu", scores=scores, is_normed=True, num_shared=1, **groups)
    hidden = 24
    weights = ExpertWeights(
        kernels.pack(values(12, hidden, seed=2)), None, None,
        kernels.pack(values(13, 40, hidden, seed=3)), None,
        kernels.pack(values(13, hidden, 20, seed=4)), None,
    )  # fmt: skip

    def experts(x: Tensor) -> Tensor:
        slots = torch.ones(len(x), dtype=torch.int32)
        chosen = kernels.choose(Normed(x, None), EPS, slots, weights, shape)
        return kernels.experts(chosen, weights, shape, torch.empty(14, dtype=torch.int32))

    require_invariant(experts, values(ROWS, hidden) / 4)


def instruction_sets() -> list[str]:
    """Those that this machine can run besides its best one, which this process tests."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ["plain"]
    flags = build.cpu_features().split()
    return ["plain", *(["avx2"] if "avx2" in flags and "avx512f" in flags else [])]


@pytest.mark.skipif("SLOTZERO_CPU_ISA" in os.environ, reason="tries the other instruction sets")
@pytest.mark.parametrize("isa", instruction_sets())
def test_other_instruction_sets(isa):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "SLOTZERO_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
