"""Tests of recordings on the CPU: lists of operators over an arena."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from slotzero.errors import RecordingError
from slotzero.graph.arena import ALIGNMENT, _Life, plan
from slotzero.graph.cpu import CpuBackend


def step(x: Tensor, table: Tensor, out: Tensor) -> None:
    """Views, in-place writes, lists of tensors, several results, and operators without `out`."""
    first, second = (x * 2).chunk(2, -1)
    both = torch.cat((second, first), dim=-1)
    order = both.sort(dim=-1, descending=True)
    mask = (x > 0).all(-1, keepdim=True) & (x < 9).any(-1, keepdim=True)
    kept = torch.where(mask, order.values, both.view(-1).view_as(both))
    table.index_put_((order.indices[:, 0],), kept[:, 0])
    torch.add(kept, torch.arange(kept.shape[1]), out=out)


def test_a_replay_repeats_the_step_over_other_values() -> None:
    backend, x = CpuBackend(), torch.randn(3, 4)
    table, out = torch.zeros(8), torch.zeros(3, 4)
    with torch.inference_mode():
        recording = backend.record(lambda _: step(x, table, out))
        for seed in range(3):
            x.copy_(torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)))
            expected_table, expected = torch.zeros(8), torch.zeros(3, 4)
            step(x, expected_table, expected)
            table.zero_()
            recording.replay()
            assert torch.equal(out, expected) and torch.equal(table, expected_table)


def test_recordings_share_one_arena() -> None:
    backend, out = CpuBackend(), torch.zeros(64, 64)
    sizes = [64, 16, 4]
    made = [backend.record(lambda _, n=n: out[:n].copy_((out[:n] + 1).relu() * 2)) for n in sizes]
    assert [r.num_bytes > 0 for r in made] == [True, False, False]
    ((first, last),) = backend.memory()
    assert last - first == made[0].num_bytes == 2 * out.nbytes


@pytest.mark.parametrize("dynamic", [torch.nonzero, lambda x: x[x > 0], lambda x: x.sum().item()])
def test_results_that_depend_on_values_are_refused(dynamic) -> None:
    x = torch.ones(3)
    with pytest.raises(RecordingError, match="depends on values"):
        CpuBackend().record(lambda _: dynamic(x))


@given(st.lists(st.tuples(st.integers(1, 500), st.integers(0, 20), st.integers(0, 8)), max_size=30))
def test_lives_that_overlap_have_memory_of_their_own(drawn) -> None:
    lives = [_Life(i, size, first, first + more) for i, (size, first, more) in enumerate(drawn)]
    offsets, total = plan(lives)
    for one in lives:
        assert offsets[one.key] % ALIGNMENT == 0
        assert offsets[one.key] + one.num_bytes <= total
        for other in lives[: one.key]:
            if one.last < other.first or other.last < one.first:
                continue
            a, b = sorted((offsets[life.key], life.num_bytes) for life in (one, other))
            assert a[0] + a[1] <= b[0]
