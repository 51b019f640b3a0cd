"""Faults of recurrent layers: a state that does not match its text, and unrequested snapshots."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slotzero.certify.faults.case import Case, Fault, swapped
from slotzero.certify.faults.device import (
    TABLE,
    KernelFault,
    RecordedFault,
    recorded,
    write_kept,
)
from slotzero.certify.scenario import kind_of
from slotzero.graph import Pieces
from slotzero.pools.states import SNAPSHOTS, STATES
from slotzero.speculative.passes import VERIFY


@dataclass(frozen=True)
class WrongToken(Fault):
    """After rejected drafts, the state is rolled back one token too far."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        kernels, runner, key = case.engine.worker.kernels, case.runner, case.scenario.key
        right = kernels.commit_trail

        def commit(
            trail: Any, slots: Tensor, length: Tensor, num_confirmed: Tensor, *rest: Any
        ) -> None:
            right(trail, slots, length, (num_confirmed - 1).clamp_min(0), *rest)

        def damaged(pieces: Pieces) -> None:
            with swapped(kernels, "commit_trail", commit):
                runner.spec.function(key, pieces)

        with recorded(runner, key, damaged):
            yield


def _begins(case: Case) -> bool:
    return case.entry.name in STATES and bool(case.written_rows and case.begun)


def _add_to_what_was(case: Case, now: Tensor, was: Tensor) -> None:
    for slot in case.begun:
        now[slot].add_(was[slot])


RECURRENT: tuple[Fault, ...] = (
    KernelFault(
        "stale snapshot mask",
        TABLE,
        lambda case: case.entry.name in SNAPSHOTS and case.kept is not None,
        write_kept,
    ),
    WrongToken(
        "rollback to the wrong token",
        TABLE,
        lambda case: case.entry.name in STATES and kind_of(case.runner) == VERIFY,
    ),
    RecordedFault(
        "state not zeroed for a new request",
        TABLE,
        _begins,
        _add_to_what_was,
    ),
)
