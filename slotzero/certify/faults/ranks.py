"""Faults of a rank that computes with the values of another one.

All ranks have the same fault at the same time, so that the collectives of a step still match.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from slotzero.certify.faults.case import Case, Fault, swapped
from slotzero.certify.faults.device import OUTPUT, KernelFault, recorded
from slotzero.graph import TensorKind
from slotzero.models.blocks import expert_parallel


@dataclass(frozen=True)
class GlobalCount(Fault):
    """Each rank uses a wrong count of real tokens: that of the first rank, or with DP attention
    that of all ranks."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        right, runner, key = expert_parallel.share_of, case.runner, case.scenario.key
        ranks = case.engine.worker.ranks

        def wrong(slots: Tensor, share: int, rank: int) -> Tensor:
            if not ranks.dp_attention:
                return right(slots, share, 0)
            place = torch.arange(len(slots), device=slots.device)
            return slots.clamp_min(1) * (place < ranks.size * (slots > 0).sum())

        with (
            swapped(expert_parallel, "share_of", wrong),
            recorded(runner, key, partial(runner.spec.function, key)),
        ):
            yield


@dataclass(frozen=True)
class OtherSize(Fault):
    """Every rank but the first picks another size for the same step."""

    def culprit(self, case: Case) -> str:
        return str(case.scenario.key)

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        runner, key = case.runner, case.scenario.key
        other = next(size for size in runner.all_keys() if size != key)
        if case.engine.worker.ranks.rank == 0:
            yield
            return
        with swapped(runner, "pick", lambda num_tokens, num_rows: other):
            yield


def _has_ranks_and_sizes(case: Case) -> bool:
    is_first = case.entry.name == case.runner.spec.published[0]
    is_distributed = case.engine.worker.ranks.is_distributed
    return is_first and is_distributed and len([*case.runner.all_keys()]) > 1


def _is_expert_parallel(case: Case) -> bool:
    return case.engine.worker.ranks.expert_parallel and case.entry.per == "step"


def _has_other_scales(case: Case) -> bool:
    return case.entry.name.endswith(".scales") and case.of_next_rank is not None


def _take_from_next_rank(case: Case, rows: Tensor) -> None:
    assert case.of_next_rank is not None
    case.entry.tensor.copy_(case.of_next_rank)


RANKS: tuple[Fault, ...] = (
    GlobalCount("global count of real tokens instead of the rank's", OUTPUT, _is_expert_parallel),
    OtherSize("ranks that replay different sizes", (TensorKind.PUBLISHED,), _has_ranks_and_sizes),
    KernelFault(
        "scale of another rank",
        (TensorKind.CONSTANT,),
        _has_other_scales,
        _take_from_next_rank,
    ),
)
