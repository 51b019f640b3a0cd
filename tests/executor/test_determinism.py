"""What deterministic mode refuses, and where its promise holds."""

import pytest
import torch

from slotzero.checkpoint.tiny import tiny_configs
from slotzero.config import EngineConfig
from slotzero.distributed.ranks import Ranks
from slotzero.errors import SlotzeroError
from slotzero.executor.determinism import is_deterministic, refuse_dependence
from slotzero.kernels.reference import ReferenceKernels
from slotzero.models.families.family import parse_config

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Exact(ReferenceKernels):
    is_batch_invariant = True


@pytest.mark.parametrize(
    ("family", "settings", "kernels", "device", "named"),
    [
        ("llama", {}, ReferenceKernels(), CPU, "kernel set 'reference'"),
        ("mixtral", {"tensor_parallel_size": 2, "enable_expert_parallel": True}, Exact(), CPU,
         "enable_expert_parallel"),
        ("falcon-h1", {"tensor_parallel_size": 2}, Exact(), CUDA, "tensor_parallel_size=2"),
        ("olmo2", {"tensor_parallel_size": 2}, Exact(), CUDA, "tensor_parallel_size=2"),
    ],
)  # fmt: skip
def test_what_would_break_the_promise_is_refused_by_name(family, settings, kernels, device, named):
    model = parse_config(tiny_configs()[family])
    refuse_dependence(EngineConfig(**settings), model, kernels, device)
    with pytest.raises(SlotzeroError, match=f"deterministic.*{named}"):
        refuse_dependence(EngineConfig(deterministic=True, **settings), model, kernels, device)


def test_the_promise_holds_for_these_ranks():
    assert is_deterministic(True, Ranks())
    assert is_deterministic(True, Ranks(size=2)) and not is_deterministic(True, Ranks(size=3))
    assert is_deterministic(True, Ranks(size=3, in_order=True))
    assert not is_deterministic(False, Ranks())
    assert not is_deterministic(True, Ranks(size=2, expert_parallel=True))


def test_ranks_add_in_their_order(monkeypatch):
    """The sum of these three numbers is 1 only if the first two are added first."""
    parts = torch.tensor([2.0**24, -(2.0**24), 1.0])
    monkeypatch.setattr(Ranks, "gather", lambda self, x: parts.to(x.dtype))
    monkeypatch.setattr(Ranks, "exchange", lambda self, x: parts.view(3, 1).to(x.dtype))
    ranks = Ranks(size=3, in_order=True)
    assert ranks.sum(torch.zeros(())).item() == 1
    assert ranks.scatter_sum(torch.zeros(3)).tolist() == [1]
