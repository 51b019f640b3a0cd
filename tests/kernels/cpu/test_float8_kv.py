"""Tests of the CPU kernels over FP8 pages, with NaN in all memory they must not read.

The cases are those of test_kernels.py, with their pages as codes. Attention over codes is that over
the numbers that they stand for.
"""

import dataclasses

import pytest
import torch
from attention_cases import Attending, Branching, attendings, branchings, heads_of, ints
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slotzero.kernels.attention_plans import TorchPlan
from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.float8_kv import CODES, from_codes, to_codes
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.types import Heads, MlaShape, PagedKv, Tokens

REFERENCE = ReferenceKernels()
SCALES = torch.tensor([0.011, 0.3])


def in_codes(kv: Tensor, heads: Heads) -> Tensor:
    k, v = kv.split([heads.head_dim, heads.value_dim], dim=-1)
    return torch.cat((to_codes(k, SCALES[0]), to_codes(v, SCALES[1])), dim=-1)


def as_numbers(codes: Tensor, heads: Heads) -> Tensor:
    k, v = codes.split([heads.head_dim, heads.value_dim], dim=-1)
    return torch.cat((from_codes(k, SCALES[0]), from_codes(v, SCALES[1])), dim=-1)


@settings(max_examples=60, deadline=None)
@given(case=attendings())
def test_attention_over_codes_is_that_over_their_numbers(case: Attending) -> None:
    kv, table = case.pages()
    codes = in_codes(kv, case.heads)
    plan = TorchPlan(Tokens(*case.tokens()), None)
    q = case.queries(len(plan.tokens.slots))
    plain = PagedKv(as_numbers(codes, case.heads), table)
    expected = REFERENCE.attend(q, case.sinks, plain, plan, case.heads)
    for kernels in (CpuKernels(), REFERENCE):
        out = kernels.attend(q, case.sinks, PagedKv(codes, table, SCALES), plan, case.heads)
        torch.testing.assert_close(out, expected, atol=5e-6, rtol=2e-5)


@settings(max_examples=30, deadline=None)
@given(case=branchings())
def test_a_token_of_a_tree_sees_its_branch(case: Branching) -> None:
    kv, table = case.pages()
    heads = case.attending.heads
    codes = in_codes(kv, heads)
    tokens, branches = case.tokens()
    q = case.attending.queries(len(tokens.slots))
    plan = TorchPlan(tokens, branches)
    out = CpuKernels().attend(q, case.attending.sinks, PagedKv(codes, table, SCALES), plan, heads)
    expected = case.by_the_book(q, as_numbers(codes, heads), table).float()
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-4)


@settings(max_examples=30, deadline=None)
@given(case=attendings(), size=st.integers(1, 11))
def test_attention_does_not_depend_on_the_batch(case: Attending, size: int) -> None:
    kv, table = case.pages()
    stored = PagedKv(in_codes(kv, case.heads), table, SCALES)
    slots, positions = case.tokens()
    q, kernels = case.queries(len(slots)), CpuKernels()

    def attend(rows: slice) -> Tensor:
        plan = TorchPlan(Tokens(slots[rows].contiguous(), positions[rows].contiguous()), None)
        return kernels.attend(q[rows].contiguous(), case.sinks, stored, plan, case.heads)

    together = attend(slice(None))
    parts = [attend(slice(i, i + size)) for i in range(0, len(q), size)]
    assert torch.equal(torch.cat(parts), together)


@settings(max_examples=30, deadline=None)
@given(case=attendings(), power=st.integers(-8, 8))
def test_store_writes_the_nearest_codes(case: Attending, power: int) -> None:
    kv, table = case.pages()
    tokens, heads = Tokens(*case.tokens()), case.heads
    num = len(tokens.slots)
    k = torch.randn(num, heads.num_kv_heads, heads.head_dim) * 2.0**power
    v = torch.randn(num, heads.num_kv_heads, heads.value_dim) * 2.0**power
    pages = [in_codes(kv, heads) for _ in range(3)]
    for kernels, page in ((REFERENCE, pages[0]), (CpuKernels(), pages[1])):
        kernels.store_kv(k, v, PagedKv(page, table, SCALES), tokens)
    assert torch.equal(pages[0], pages[1])
    written = (pages[1] != pages[2]).any(-1).any(-1)
    assert written.sum() == (tokens.slots > 0).sum()
    assert torch.equal(pages[1][0], pages[2][0]), "page 0 was written"


def test_every_number_is_rounded_and_read_as_in_torch() -> None:
    codes = torch.arange(256).to(CODES).view(torch.float8_e4m3fn).float()
    halfway = (codes[:-1] + codes[1:]) / 2
    spread = [torch.randn(1000) * 2.0**power for power in range(-12, 14)]
    x = torch.cat([codes, halfway, torch.tensor([torch.inf, -torch.inf, -0.0]), *spread])
    x = torch.nn.functional.pad(x, (0, -len(x) % 8)).view(-1, 1, 8)
    table = torch.stack((torch.zeros(len(x)), torch.arange(len(x)) + 1)).int()
    tokens = Tokens(torch.ones(len(x)).int(), torch.arange(len(x)).int())
    kv = PagedKv(torch.zeros(len(x) + 1, 1, 1, 16, dtype=CODES), table, torch.ones(2))
    kernels = CpuKernels()
    kernels.store_kv(x, x, kv, tokens)
    assert torch.equal(kv.pages[1:, 0, :, :8], to_codes(x, torch.ones(())))
    heads = dataclasses.replace(heads_of(1, 1, 8), window=1)
    out = kernels.attend(torch.randn(len(x), 1, 8), None, kv, TorchPlan(tokens, None), heads)
    is_number = ~x.isnan().any(-1)[:, 0]
    assert torch.equal(
        out[is_number], from_codes(to_codes(x, torch.ones(())), torch.ones(()))[is_number]
    )


def test_with_mla_the_scale_of_keys_is_that_of_values() -> None:
    heads = Heads(3, 1, 12, 8, 1e-6, 0.3, mla=MlaShape(4, 4, 8))
    tokens = Tokens(torch.ones(5).int(), torch.arange(5).int())
    pages = torch.full((3, 4, 1, 12), 0xFF, dtype=CODES)
    kv = PagedKv(pages, ints([0, 0, 2, 1]).view(2, 2), SCALES)
    row, q = torch.randn(5, 1, 12), torch.randn(5, 3, 12)
    outs = []
    for kernels in (CpuKernels(), REFERENCE):
        kernels.store_kv(row, row[..., :0], kv, tokens)
        outs.append(kernels.attend(q, None, kv, TorchPlan(tokens, None), heads))
    stored = from_codes(to_codes(row, SCALES[0]), SCALES[0])
    assert torch.allclose(outs[0][0], stored[0, :, 4:].expand(3, 8), atol=1e-6)
    torch.testing.assert_close(outs[0], outs[1], atol=5e-6, rtol=2e-5)


def test_pages_and_scales_must_fit() -> None:
    heads, table, one = heads_of(4, 2, 8), torch.zeros(2, 1, dtype=torch.int32), ints([1])
    q, k, plan = torch.randn(1, 4, 8), torch.randn(1, 2, 8), TorchPlan(Tokens(one, one), None)
    codes, numbers = torch.zeros(2, 4, 2, 16, dtype=CODES), torch.zeros(2, 4, 2, 16)
    kernels = CpuKernels()
    for kv in (PagedKv(codes, table), PagedKv(numbers, table, SCALES)):
        with pytest.raises(RuntimeError, match="uint8 with scales"):
            kernels.attend(q, None, kv, plan, heads)
        with pytest.raises(RuntimeError, match="uint8 with scales"):
            kernels.store_kv(k, k, kv, plan.tokens)
    for scales in (torch.ones(3), torch.ones(2).double(), torch.ones(4)[::2]):
        with pytest.raises(RuntimeError, match="two of float32"):
            kernels.attend(q, None, PagedKv(codes, table, scales), plan, heads)
