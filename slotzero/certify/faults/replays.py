"""Faults of the time between a capture and its replays, and of the choice of a recording.

What the host decides while a size is captured is baked in; what a replay leaves in memory is there
in the next one; and a recording of another size computes other rows. An eager runner bakes in
nothing, so most of these need a backend that records.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.certify.faults.case import Case, Fault, always, swapped, swapped_item
from slotzero.certify.faults.device import DERIVED, OUTPUT, RecordedFault, recorded, replaced
from slotzero.certify.scenario import GRAPH_MEMORY
from slotzero.graph import GraphKey, Pieces, TensorKind
from slotzero.graph.arena import Arena
from slotzero.graph.cpu import CpuBackend

SCRATCH = 1024  # floats


def _add_to_last(case: Case, now: Tensor, was: Tensor) -> None:
    now.add_(was)


def _is_baked(case: Case) -> bool:
    return case.runner.backend.name != "eager"


def _is_baked_and_shows(case: Case) -> bool:
    return _is_baked(case) and case.row_unlike_padding is not None


@dataclass(frozen=True)
class HostPredicate(Fault):
    """The host leaves work out of an empty step, which is what a size is captured over."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        runner, registry, rows = case.runner, case.registry, case.view
        function, slots = runner.spec.function, runner.spec.published[0]
        pad = registry.entry(slots).pad

        def damaged(key: GraphKey, pieces: Pieces) -> None:
            function(key, pieces)
            if all(slot == pad for slot in registry.published_values(slots)):
                rows.zero_()

        with replaced(runner, case.scenario.key, damaged):
            yield


@dataclass(frozen=True)
class ColdCapture(Fault):
    """A kernel is not ready until the warm-up has ended, and the capture does not wait for that."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        function, rows, is_warm = case.runner.spec.function, case.view, [False]

        def damaged(key: GraphKey, pieces: Pieces) -> None:
            function(key, pieces)
            if not is_warm[0]:
                rows.zero_()

        with replaced(case.runner, case.scenario.key, damaged):
            is_warm[0] = True
            yield


@dataclass(frozen=True)
class WritingCapture(Fault):
    """Recording another size, which is never replayed, writes to a constant."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        runner, rows = case.runner, case.view
        other = _other_sizes(case)[0]
        saved = rows.clone()

        def damaged(pieces: Pieces) -> None:
            runner.spec.function(other, pieces)
            rows[0].add_(1)

        try:
            with recorded(runner, other, damaged):
                yield
        finally:
            rows.copy_(saved)


def _other_sizes(case: Case) -> list[GraphKey]:
    return [key for key in case.runner.records if key != case.scenario.key]


@dataclass(frozen=True)
class KeptMemory(Fault):
    """A replay reads what the capture put into graph memory, and what no replay writes."""

    def culprit(self, case: Case) -> str:
        return GRAPH_MEMORY

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        runner, key, victim = case.runner, case.scenario.key, case.victim

        def damaged(pieces: Pieces) -> None:
            scratch = torch.empty(SCRATCH, device=victim.device)
            scratch.mul_(1)  # nothing else may lie in its place
            runner.spec.function(key, pieces)
            victim.add_(scratch.sum().nan_to_num(1.0).to(victim.dtype))

        with recorded(runner, key, damaged):
            for block in runner.backend.blocks():
                block.zero_()
            yield


@dataclass(frozen=True)
class RegrownMemory(Fault):
    """Graph memory grows into another place, and the recordings before still use the old one."""

    def culprit(self, case: Case) -> str:
        return GRAPH_MEMORY

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        backend = case.runner.backend
        assert isinstance(backend, CpuBackend)
        largest = max(block.nbytes for block in backend.blocks())
        grown = Arena()
        grown.blocks.append(torch.zeros(2 * largest, dtype=torch.uint8))
        with swapped(backend, "_arena", grown):
            yield


def _is_first_with_memory(case: Case) -> bool:
    """Return whether the backend's memory can be overwritten; one tensor stands for it."""
    return bool(case.runner.backend.blocks()) and case.entry is _first_of(case, DERIVED + OUTPUT)


def _first_of(case: Case, kinds: tuple[TensorKind, ...], per: str = "") -> object:
    entries = (e for e in case.runner.entries() if e.tensor.numel())
    return next((e for e in entries if e.kind in kinds and per in ("", e.per)), None)


@dataclass(frozen=True)
class FewerRows(Fault):
    """The recording was made for fewer rows; it is found by its number of tokens alone."""

    @contextmanager
    def inject(self, case: Case) -> Iterator[None]:
        runner, key, other = case.runner, case.scenario.key, _with_fewer_rows(case)
        assert other is not None
        runner.prepare(other)
        with swapped_item(runner._recordings, key, runner._recordings[other]):
            yield


def _with_fewer_rows(case: Case) -> GraphKey | None:
    """Return the size of the same tokens, or of the same width, with fewer rows than run."""
    key, runner = case.scenario.key, case.runner
    smaller = [
        other
        for other in runner.all_keys()
        if other.rows < case.scenario.num_rows
        and (runner.spec.rows is None or other.tokens == key.tokens)
    ]
    return max(smaller, key=lambda other: other.rows, default=None)


def _has_fewer_rows(case: Case) -> bool:
    is_first = case.entry is _first_of(case, DERIVED + OUTPUT, "row")
    return is_first and _with_fewer_rows(case) is not None


REPLAYS: tuple[Fault, ...] = (
    HostPredicate(
        "host predicate evaluated at capture",
        (*DERIVED, *OUTPUT),
        lambda case: case.row_unlike_padding is not None,
    ),
    ColdCapture("captured before the warm-up has ended", OUTPUT, _is_baked_and_shows),
    WritingCapture(
        "capture of another size writes",
        (TensorKind.CONSTANT,),
        lambda case: _is_baked(case) and bool(_other_sizes(case)),
    ),
    RecordedFault("not reset between replays", OUTPUT, always, _add_to_last),
    KeptMemory("contents of graph memory needed", (*DERIVED, *OUTPUT), _is_first_with_memory),
    RegrownMemory("graph memory no longer held", (*DERIVED, *OUTPUT), _is_first_with_memory),
    FewerRows("recording for fewer rows", (*DERIVED, *OUTPUT), _has_fewer_rows),
)
