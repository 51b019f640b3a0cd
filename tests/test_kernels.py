"""The CPU's kernels against their slow reference, with hostile memory wherever they must not look.

Triton's are in tests/triton.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import SHAPES

from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.reference import ReferenceKernels

REFERENCE = ReferenceKernels()


class Pages:
    """A few slots with pages scattered over a pool whose every other value is NaN."""

    def __init__(self, heads: int, kv_heads: int, dim: int, page: int, lengths: list[int]) -> None:
        self.lengths, self.page = lengths, page
        per_slot = max(-(-(n + 1) // page) for n in lengths)
        used = 1 + len(lengths) * per_slot
        order = (torch.randperm(used + 3)[: len(lengths) * per_slot] + 1).int()
        self.table = torch.zeros(len(lengths) + 1, per_slot, dtype=torch.int32)
        self.table[1:] = order.view(len(lengths), per_slot)
        self.kv = torch.full((2, used + 4, page, kv_heads, dim), torch.nan)
        for slot, length in enumerate(lengths, start=1):
            for position in range(length):
                at = self.table[slot, position // page], position % page
                self.kv[0, at[0], at[1]] = torch.randn(kv_heads, dim)
                self.kv[1, at[0], at[1]] = torch.randn(kv_heads, dim)


def decode_batch(pages: Pages, heads: int, dim: int) -> tuple[torch.Tensor, ...]:
    """One token of each slot at its last position, with padding between and after."""
    slots, positions = [0], [0]
    for slot, length in enumerate(pages.lengths, start=1):
        slots += [slot, 0]
        positions += [length - 1, 0]
    return (
        torch.randn(len(slots), heads, dim),
        torch.tensor(slots, dtype=torch.int32),
        torch.tensor(positions, dtype=torch.int32),
    )


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels()


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_decode(kernels, shape):
    heads, _, dim, _ = shape
    pages = Pages(*shape, lengths=[1, 7, 33, 16, 17])
    q, slots, positions = decode_batch(pages, heads, dim)
    args = (q, pages.kv, pages.table, slots, positions, dim**-0.5)
    out = kernels.attend(*args)
    assert torch.allclose(out, REFERENCE.attend(*args), atol=2e-6)
    assert out[slots == 0].abs().max() == 0


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_prefill_over_a_prefix(kernels, shape):
    heads, _, dim, _ = shape
    pages = Pages(*shape, lengths=[40, 23])
    rows = [(1, p) for p in range(11, 40)] + [(2, p) for p in range(23)] + [(0, 0)] * 5
    slots = torch.tensor([slot for slot, _ in rows], dtype=torch.int32)
    positions = torch.tensor([position for _, position in rows], dtype=torch.int32)
    args = (torch.randn(len(rows), heads, dim), pages.kv, pages.table, slots, positions, dim**-0.5)
    assert torch.allclose(kernels.attend(*args), REFERENCE.attend(*args), atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_store_writes_each_token_once_and_drops_slot_0(kernels, shape):
    _, kv_heads, dim, _ = shape
    pages = Pages(*shape, lengths=[9, 30])
    slots = torch.tensor([1, 0, 2, 2, 0], dtype=torch.int32)
    positions = torch.tensor([9, 3, 30, 29, 0], dtype=torch.int32)
    k, v = torch.randn(2, 5, kv_heads, dim)
    expected = pages.kv.clone()
    REFERENCE.store_kv(k, v, expected, pages.table, slots, positions)
    kernels.store_kv(k, v, pages.kv, pages.table, slots, positions)
    assert torch.equal(pages.kv.nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9))
    assert pages.kv[:, 0].isnan().all(), "page 0 was written"


def test_a_token_attends_alike_alone_and_in_a_prompt():
    kernels = CpuKernels()
    pages = Pages(4, 2, 16, 16, lengths=[50])
    q = torch.randn(50, 4, 16)
    slots, positions = torch.ones(50, dtype=torch.int32), torch.arange(50, dtype=torch.int32)
    together = kernels.attend(q, pages.kv, pages.table, slots, positions, 0.25)
    for i in range(50):
        one = slice(i, i + 1)
        alone = kernels.attend(q[one], pages.kv, pages.table, slots[one], positions[one], 0.25)
        assert torch.equal(alone, together[one])


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70), out=st.integers(1, 70), inner=st.integers(1, 90), bias=st.booleans()
)
def test_linear_of_any_shape(rows, out, inner, bias):
    kernels = CpuKernels()
    x, weight = torch.randn(rows, inner), torch.randn(out, inner)
    b = torch.randn(out) if bias else None
    packed = kernels.pack(weight)
    assert packed.shape == kernels.packed_shape(out, inner)
    got = kernels.product(x, packed, b, out)
    exact = torch.nn.functional.linear(x.double(), weight.double(), b.double() if bias else None)
    assert torch.allclose(got.double(), exact, atol=1e-4)
    for i in range(rows):  # a row is the same bits alone and in company
        assert torch.equal(kernels.product(x[i : i + 1].contiguous(), packed, b, out)[0], got[i])


def test_embedding_reads_rows_of_the_packed_head():
    kernels = CpuKernels()
    weight = torch.randn(37, 20)
    tokens = torch.tensor([0, 36, 5, 16, 15], dtype=torch.int32)
    assert torch.equal(kernels.embed(tokens, kernels.pack(weight)), weight[tokens])
