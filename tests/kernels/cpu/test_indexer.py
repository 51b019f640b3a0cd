"""Tests of the indexer of sparse attention: C++ against plain torch, with NaN in unseen memory."""

import pytest
import torch
from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.attention_plans import TorchPlan
from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.types import Branches, Heads, IndexShape, MlaShape, PagedKv, Tokens

PAGE, PAGES, DIM, VALUE, TOP_K = 4, 6, 12, 20, 5
HEADS = Heads(
    3, 1, DIM + VALUE, VALUE, 1e-6, 0.2, mla=MlaShape(8, 8, 16, IndexShape(2, DIM, TOP_K))
)
CPU, REFERENCE = CpuKernels(), ReferenceKernels()


class Case:
    """Two slots with keys up to positions 21 and 3; tokens of both, of slot 0, and of a prompt."""

    def __init__(self, seed: int = 0) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        table = torch.arange(2 * PAGES, dtype=torch.int32).view(2, PAGES) + 1
        self.table = torch.cat((torch.zeros_like(table[:1]), table))
        self.pages = torch.full((2 * PAGES + 1, PAGE, 1, DIM + VALUE), torch.nan)
        for slot, num in ((1, 22), (2, 4)):
            at = torch.arange(num)
            self.pages[self.table[slot, at // PAGE], at % PAGE] = self.random(num, 1, DIM + VALUE)
        self.slots = torch.tensor([1, 0, 2, 1, 1, 2], dtype=torch.int32)
        self.positions = torch.tensor([21, 0, 3, 9, 10, 1], dtype=torch.int32)
        num = len(self.slots)
        self.q, self.weights = self.random(num, 2, DIM), self.random(num, 2)
        self.weights[0] = self.weights[0].abs()  # scores are not negative
        self.pages[self.table[1, 5], 0, 0, :DIM] = 9 * self.q[0, 0]  # the best, at position 20
        self.queries = self.random(num, 3, DIM + VALUE)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.draw)

    def plan(self, branches: Branches | None = None) -> TorchPlan:
        return TorchPlan(Tokens(self.slots, self.positions), branches)

    def select(self, kernels: CpuKernels | ReferenceKernels, plan: TorchPlan) -> Tensor:
        kv = PagedKv(self.pages, self.table)
        return kernels.select_keys(self.q, self.weights, kv, plan, TOP_K)

    def attend(self, kernels: CpuKernels | ReferenceKernels, plan: TorchPlan) -> Tensor:
        taken = self.select(kernels, plan)
        kv = PagedKv(self.pages, self.table)
        return kernels.attend(self.queries, None, kv, plan._replace(taken=taken), HEADS)


def tree(case: Case) -> Branches:
    """The last three places of slot 1 are a tree: its newest token does not see place 20."""
    bases = torch.tensor([19, 0, 4, 10, 11, 2], dtype=torch.int32)
    seen = torch.tensor([0b101, 1, 1, 1, 1, 1])
    return Branches(bases, seen, case.positions)


@pytest.mark.parametrize("branches", [None, tree], ids=["text", "tree"])
def test_the_best_keys_are_selected_and_attended_to(branches):
    case = Case()
    plan = case.plan(None if branches is None else branches(case))
    taken = case.select(CPU, plan)
    assert torch.equal(taken, case.select(REFERENCE, plan))
    assert taken.sum(1).tolist() == [5, 0, 4, 5, 5, 2]
    assert branches is None or taken[0, 20] == 0
    out = case.attend(CPU, plan)
    assert out[1].abs().max() == 0 and not out.isnan().any()
    torch.testing.assert_close(out, case.attend(REFERENCE, plan), atol=5e-6, rtol=1e-5)


def test_of_equal_scores_the_earlier_positions_are_selected():
    case = Case()
    case.weights[0] = 0.0
    taken = case.select(CPU, case.plan())
    assert taken[0].nonzero().flatten().tolist() == list(range(TOP_K))
    assert torch.equal(taken, case.select(REFERENCE, case.plan()))


def test_a_token_selects_the_same_keys_in_any_batch():
    case = Case(1)
    together = case.select(CPU, case.plan())
    for i in range(len(case.slots)):
        alone = Case(1)
        for field in ("slots", "positions", "q", "weights"):
            setattr(alone, field, getattr(alone, field)[i : i + 1].contiguous())
        assert torch.equal(alone.select(CPU, alone.plan()), together[i : i + 1])


def test_an_fp8_cache_is_refused():
    CPU.refuse(HEADS)
    with pytest.raises(UnsupportedModelError, match=r"index_topk.*drop it"):
        CPU.refuse(HEADS, float8_kv=True)
