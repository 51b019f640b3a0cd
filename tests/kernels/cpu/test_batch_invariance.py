"""Tests that CPU kernels are batch invariant: a row has the same bits alone and in every batch.

Each primitive is tested with every number of rows up to ROWS, in random order, with sizes that fill
registers of 4, 8 and 16 floats and sizes that do not. Instruction sets other than the best of this
machine run in a separate process, since a process loads the kernels only once.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slotzero.kernels.attention_plans import TorchPlan
from slotzero.kernels.cpu.kernels import ACTIVATIONS, CpuKernels
from slotzero.kernels.types import (
    Experts,
    ExpertWeights,
    Heads,
    Normed,
    PagedKv,
    ResidualNorms,
    Tokens,
)
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States
from slotzero.kernels.weights import DenseWeight
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.tables import SAMPLING_TABLES, Sampled, SamplingTables, encode, mask_tables

pytestmark = pytest.mark.slow

HERE = Path(__file__)
KERNEL_TESTS = [
    HERE,
    HERE.with_name("test_kernels.py"),
    HERE.with_name("test_quantized_kernels.py"),
    HERE.with_name("test_recurrent_kernels.py"),
]
ROWS = 37
SIZES = (1, 3, 4, 7, 8, 12, 16, 20, 33, 64, 100)
EPS = 1e-6

RowFunction = Callable[[Tensor], Tensor]
"""A function [rows, ...] -> [rows, ...] that computes each row by itself."""


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


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_norms(kernels, size, is_centred):
    weight, after = values(2, size, seed=2)
    norms = ResidualNorms(after, weight, EPS, is_centred)
    require_invariant(lambda x: kernels.rms_norm(x, weight, EPS, is_centred), values(ROWS, size))

    def add_norm(x: Tensor) -> Tensor:
        change, residual = x.chunk(2, -1)
        total, normed = kernels.add_norm(change, residual, norms)
        return stacked(total, normed.x)

    require_invariant(add_norm, values(ROWS, 2 * size))
    heads = values(ROWS, 3, size)
    require_invariant(lambda x: kernels.rms_norm(x, weight, EPS, is_centred), heads)


@pytest.mark.parametrize("size", SIZES)
def test_softmax_and_softcap(kernels, size):
    require_invariant(kernels.softmax, values(ROWS, size))
    require_invariant(lambda x: kernels.softcap(x, 3.0), values(ROWS, size))


@pytest.mark.parametrize("size", SIZES)
def test_rope_angles(kernels, size):
    frequency = torch.rand(size)
    frequency[-1] = 0

    def angles(positions: Tensor) -> Tensor:
        return stacked(
            *kernels.rope_angles(Tokens(torch.ones_like(positions), positions), frequency, 1.5)
        )

    positions = torch.arange(ROWS, dtype=torch.int32) * 977
    require_invariant(angles, positions)
    by_token = torch.rand(ROWS, size)

    def angles_by_token(positions: Tensor) -> Tensor:
        tokens = Tokens(torch.ones_like(positions), positions)
        return stacked(*kernels.rope_angles(tokens, by_token[positions // 977], 1.0))

    require_invariant(angles_by_token, positions)


@pytest.mark.parametrize("inner", [1, 5, 16, 33])
@pytest.mark.parametrize("size", SIZES)
def test_products(kernels, size, inner):
    data, bias = kernels.pack(values(size, inner, seed=2)), values(1, size, seed=3)[0]
    weight = DenseWeight(data, bias, size)
    require_invariant(lambda x: kernels.product(x, weight), values(ROWS, inner))
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
        DenseWeight(kernels.pack(values(12, hidden, seed=2)), None, 12),
        None,
        DenseWeight(kernels.pack(values(13, 40, hidden, seed=3)), None, 40),
        DenseWeight(kernels.pack(values(13, hidden, 20, seed=4)), None, hidden),
    )

    def experts(x: Tensor) -> Tensor:
        slots = torch.ones(len(x), dtype=torch.int32)
        routed = kernels.route(Normed(x), slots, weights, shape)
        return kernels.experts(routed, weights, shape, torch.empty(14, dtype=torch.int32))

    require_invariant(experts, values(ROWS, hidden) / 4)


@pytest.mark.parametrize("size", [5, 16, 20])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention(kernels, size, softcap):
    """Row i is the token of slot i + 1, each at a different position."""
    page, pages = 4, 6
    heads = Heads(4, 2, size, size, EPS, size**-0.5, softcap=softcap)
    table = torch.arange((ROWS + 1) * pages, dtype=torch.int32).view(ROWS + 1, pages)
    kv = values(table.numel(), page, 2, 2 * size, seed=5)
    q = values(ROWS, 4, size)

    def attend(rows: Tensor) -> Tensor:
        slots, positions = (rows + 1).int(), (rows * 7 % (page * pages)).int()
        return kernels.attend(
            q[rows], None, PagedKv(kv, table), TorchPlan(Tokens(slots, positions), None), heads
        )

    require_invariant(attend, torch.arange(ROWS))


@pytest.mark.parametrize("num_heads", [2, 6, 8, 16])
@pytest.mark.parametrize("page", [16, 32])
@pytest.mark.parametrize("size", [5, 20, 64])
@pytest.mark.parametrize("window", [None, 23])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_attention_of_a_prompt(kernels, num_heads, page, size, window, softcap):
    """Tokens of one slot, and the heads of a KV head, are taken through blocks of keys together."""
    num, pages = 75, 5
    heads = Heads(num_heads, 2, size, size, EPS, size**-0.5, softcap=softcap, window=window)
    table = torch.arange(2 * pages, dtype=torch.int32).view(2, pages)
    kv = PagedKv(values(table.numel(), page, 2, 2 * size, seed=5), table)
    q, positions = values(num, num_heads, size), torch.arange(num, dtype=torch.int32)

    def attend(first: int, last: int) -> Tensor:
        tokens = Tokens(torch.ones(last - first, dtype=torch.int32), positions[first:last])
        return kernels.attend(q[first:last], None, kv, TorchPlan(tokens, None), heads)

    alone = torch.cat([attend(i, i + 1) for i in range(num)])
    assert torch.equal(attend(0, num), alone)
    assert torch.equal(attend(13, 70), alone[13:70])


@pytest.mark.parametrize(
    "shape",
    [
        Scan("mamba", 4, 5, 2, 3, 4, (0.01, 0.5)),
        Scan("delta", 2, 20, 2, 12, 3),
        Scan("kda", 2, 20, 2, 12, 3),
    ],
)
def test_recurrent_layers(kernels, shape):
    """In a decode step, each row continues from the state of its own slot."""
    conv, scan = (values(ROWS + 1, *s, seed=6) for s in (shape.conv_shape, shape.scan_shape))
    weight, bias = values(shape.channels, shape.conv_width, seed=7), values(1, shape.channels)[0]
    a_log, d = values(2, shape.num_heads, seed=8) / 4
    dt_bias = values(1, shape.num_gates, seed=8)[0] / 4
    x = values(ROWS, shape.channels)
    gates, beta = values(ROWS, shape.num_gates, seed=9), values(ROWS, shape.num_heads, seed=9)

    def mix(rows: Tensor) -> Tensor:
        tokens = Tokens((rows + 1).int(), torch.full_like(rows, 3).int())
        states = States(conv.clone(), scan.clone())
        step = RecurrentStep(tokens, None, states)
        mixed = kernels.convolve(x[rows], weight, bias, step, shape)
        weights = ScanWeights(a_log, dt_bias, d)
        out = kernels.scan(mixed, gates[rows], beta[rows], weights, step, shape)
        norm = out.new_ones(out.shape[1])
        gated = kernels.gate_norm(out, out.flip(1), norm, EPS, out.shape[1] // 2, True)
        return stacked(out, gated, states.conv[rows + 1], states.scan[rows + 1])

    require_invariant(mix, torch.arange(ROWS))


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampling(kernels, temperature, mode):
    vocab = 101
    params = SamplingParams(temperature=temperature, top_p=0.9, top_k=30, logprobs=3)
    tables = {"tokens": torch.zeros(ROWS + 1, 8, dtype=torch.int32)}
    for spec in (*SAMPLING_TABLES, *mask_tables(vocab)):
        table = torch.full(spec.shape(ROWS), spec.neutral, dtype=getattr(torch, spec.dtype))
        tables[spec.name] = table
    for slot in range(1, ROWS + 1):
        for name, value in encode(params, slot, 2, frozenset(), mode).items():
            table = tables[name]
            table[slot] = torch.tensor(value, dtype=table.dtype).view(table[slot].shape)
    logits = values(ROWS, vocab)

    def sample(rows: Tensor) -> Tensor:
        slots, count = (rows + 1).int(), len(rows)
        ids, floats = torch.zeros(count, 3, dtype=torch.int32), torch.zeros(count, 3)
        out = Sampled(slots.clone(), torch.zeros(count), ids, floats)
        kernels.sample(
            logits[rows], slots, torch.full_like(slots, 5), SamplingTables(**tables), out
        )
        return stacked(*(part.double().view(count, -1) for part in out))

    require_invariant(sample, torch.arange(ROWS))


@pytest.mark.skipif(
    "SLOTZERO_CPU_ISA" in os.environ, reason="already runs for one of the other instruction sets"
)
def test_plain_code():
    """Sets between plain code and the best one differ in primitives (test_instruction_sets.py)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *KERNEL_TESTS],
        env={**os.environ, "SLOTZERO_CPU_ISA": "plain"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-4000:]
