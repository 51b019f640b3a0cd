"""Checks S0 to S6 of a captured step of another engine, and its certificate.

They know what is declared (captured_step.py), and not what the step computes. Unlike Slotzero's own
runners, an engine may leave anything in the outputs of padded rows, as it does not read them.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Generic

import torch
from torch import Tensor

from slotzero.certify.captured_step import (
    CapturedStep,
    Constant,
    Input,
    Output,
    Request,
    State,
    Workspace,
)
from slotzero.certify.captured_trial import CapturedOutcome, CapturedTrial
from slotzero.certify.checks import Bounds
from slotzero.certify.checksum import checksum
from slotzero.certify.compare import Mismatch, first_difference, leaks
from slotzero.certify.operator_trace import (
    OperatorTrace,
    first_divergence,
    span_of,
    stray_addresses,
)
from slotzero.certify.report import CHECKS, Cell, Certificate, Violation
from slotzero.errors import RecordingError
from slotzero.graph.registry import Registry, fingerprint

Finding = tuple[str, str, int | None]
"""A tensor, what is wrong with it, and the row of the batch or the index in a state."""
ROUNDING = Bounds(replay=0.0, size=1e-4, neighbours=1e-4)
"""Matrix products round differently at another size; float32."""


def certify_captured(
    step: CapturedStep[Request], requests: Sequence[Request], bounds: Bounds = ROUNDING
) -> Certificate:
    """Check every captured size of a step, and return what was found.

    `requests` are rows that could run together, one more than the largest size or more; the first
    ones run, the last never does. What they read must be in the state already. All memory is
    restored afterwards.
    """
    start = time.perf_counter()
    with torch.inference_mode():
        trial = CapturedTrial(step, requests)
        certificate = Certificate(step.name, trial.replays.name, num_all_sizes=len(step.sizes))
        constants = {one.name: checksum(one.tensor) for one in step.of_kind(Constant)}
        try:
            for size in reversed(step.sizes):  # smaller captures fit into the memory of larger ones
                trial.replays.prepare(size)
            for size in step.sizes:
                examination = CapturedExamination(trial, size, bounds, constants)
                certificate.cells += map(examination.cell, CHECKS)
        finally:
            trial.restore()
    certificate.seconds = time.perf_counter() - start
    return certificate


class CapturedExamination(Generic[Request]):
    """The checks of one size. All other runs are compared with the first replay."""

    def __init__(
        self,
        trial: CapturedTrial[Request],
        size: int,
        bounds: Bounds,
        constants: Mapping[str, int],
    ) -> None:
        self._trial, self._size, self._bounds, self._constants = trial, size, bounds, constants
        self._step = trial.step
        self._rows = trial.rows(size)
        self._fingerprints = {one.name: fingerprint(one.tensor) for one in self._step.tensors}

    def cell(self, check: str) -> Cell:
        start, name, key = time.perf_counter(), self._step.name, self._step.key(self._size)
        violations, left_out = [], ""
        try:
            for finding in CAPTURED_CHECKS[check](self):
                violations.append(Violation(check, name, key, *finding))
        except RecordingError as error:  # sizes are captured already: only S5 captures again
            left_out = str(error)
        seconds = time.perf_counter() - start
        return Cell(name, key, check, seconds, tuple(violations), left_out)

    @cached_property
    def _plain(self) -> CapturedOutcome:
        return self._trial.replay(self._rows, self._size)

    @cached_property
    def _after_larger(self) -> CapturedOutcome:
        return self._trial.replay_after_larger_step(self._rows, self._size)

    def s0(self) -> Iterator[Finding]:
        """Check that staging pads what it must, and that no step changes constants or replaces
        memory."""
        inputs = [one for one in self._step.of_kind(Input) if one.pad is not None]
        self._trial.stage(self._rows, self._size, [one.name for one in inputs])
        for one in inputs:
            tail = one.tensor[len(self._rows) * one.width : self._size * one.width]
            found = first_difference(tail, torch.full_like(tail, one.pad), 0.0)
            if found is not None:
                index, got, pad = found
                why = (
                    f"{got} where the pad value {pad} was expected: staging left it ({one.reason})"
                )
                yield one.name, why, len(self._rows) + index // one.width
        _ = self._plain
        for one in self._step.tensors:
            if fingerprint(one.tensor) != self._fingerprints[one.name]:
                yield one.name, "its memory was replaced, the capture uses the old one", None
            elif isinstance(one, Constant) and checksum(one.tensor) != self._constants[one.name]:
                yield one.name, "a constant has changed", None

    def s1(self) -> Iterator[Finding]:
        names = [
            one.name
            for kind in (Input, Workspace, State, Output)
            for one in self._step.of_kind(kind)
        ]
        for name, mismatch in leaks(names, self._changed_by_poison):
            yield name, f"poisoned, it changed {mismatch.tensor!r}: {mismatch}", mismatch.row

    def _changed_by_poison(self, names: Sequence[str]) -> Mismatch | None:
        outcome = self._trial.replay(self._rows, self._size, names)
        found = self._differences(outcome, self._plain, 0.0)
        return next(found, None) or next(self._foreign_writes(outcome, self._plain), None)

    def s2(self) -> Iterator[Finding]:
        eager = self._trial.eager(self._rows, self._size)
        yield from self._differ(self._plain, eager, self._bounds.replay, "eager")
        if len(self._rows) < self._size:
            unpadded = self._trial.eager(self._rows, len(self._rows))
            yield from self._differ(eager, unpadded, self._bounds.size, "eager without padding")

    def s3(self) -> Iterator[Finding]:
        trial, plain, rows, size = self._trial, self._plain, self._rows, self._size
        history = "history: after a larger step"
        yield from self._differ(self._after_larger, plain, 0.0, history)
        if len(rows) > 1:
            turned, fewer = trial.replay(rows[::-1], size), trial.replay(rows[::2], size)
            bound = self._bounds.neighbours
            yield from self._differ(turned, plain, bound, "order: rows reversed")
            yield from self._differ(fewer, plain, bound, "neighbours: every other row removed")
        larger = [other for other in self._step.sizes if other > size]
        if larger:
            padded = trial.replay(rows, larger[0])
            yield from self._differ(padded, plain, self._bounds.size, f"size: at {larger[0]}")

    def s4(self) -> Iterator[Finding]:
        found: dict[str, Mismatch] = {}
        for outcome in (self._plain, self._after_larger):
            for mismatch in self._foreign_writes(outcome):
                found.setdefault(mismatch.tensor, mismatch)
        for mismatch in found.values():
            yield mismatch.tensor, f"{mismatch}: no row of the step may write it", mismatch.row

    def s5(self) -> Iterator[Finding]:
        registry, replays, size = self._registry(), self._trial.replays, self._size
        steps = (self._rows, self._rows[::2])
        traces = [self._trace(rows, registry) for rows in steps]
        operators = [*traces[0].findings, *first_divergence(*(t.lines for t in traces))]
        for tensor, what in dict.fromkeys(operators):
            yield tensor, what, None
        captures = []
        for rows in steps:
            self._trial.stage(rows, size)
            captures.append(replays.transcript(size))
        stray = stray_addresses(captures[0], registry, replays.memory())
        for tensor, what in dict.fromkeys([*first_divergence(*captures), *stray]):
            yield tensor, what, None

    def _trace(self, rows: Sequence[int], registry: Registry) -> OperatorTrace:
        trace = OperatorTrace(registry)
        self._trial.stage(rows, self._size)

        def run() -> None:
            self._step.step(self._size)

        trace.watch(run)
        return trace

    def _registry(self) -> Registry:
        """Return the declared tensors by address."""
        registry = Registry(self._step.device)
        for one in self._step.tensors:
            registry.constant(one.name, one.tensor)
        return registry

    def s6(self) -> Iterator[Finding]:
        tensors = [one for one in self._step.tensors if one.tensor.numel()]
        spans = sorted(((span_of(one.tensor), one) for one in tensors), key=lambda pair: pair[0])
        pools = self._trial.replays.memory()
        for number, ((start, end), one) in enumerate(spans):
            for (other_start, _), other in spans[number + 1 :]:
                if other_start >= end:
                    break
                if _shares_memory(one.tensor, other.tensor):
                    yield other.name, f"its memory overlaps that of {one.name!r}", None
            if any(start < stop and begin < end for begin, stop in pools):
                yield one.name, "its memory is inside a graph's pool", None

    def _differ(
        self, got: CapturedOutcome, expected: CapturedOutcome, bound: float, how: str
    ) -> Iterator[Finding]:
        for mismatch in self._differences(got, expected, bound):
            yield mismatch.tensor, f"{mismatch}; {how}", mismatch.row

    def _differences(
        self, got: CapturedOutcome, expected: CapturedOutcome, bound: float
    ) -> Iterator[Mismatch]:
        """Yield mismatches in the rows that both have: what they wrote to state, and outputs."""
        shared = [row for row in got.rows if row in expected.rows]
        for state in self._step.of_kind(State):
            own = self._trial.writes(state, shared)
            ours, theirs = (outcome.after[state.name][own] for outcome in (got, expected))
            found = first_difference(ours, theirs, bound)
            if found is not None:
                yield Mismatch(state.name, int(own.nonzero()[found[0]]), *found[1:])
        outputs = self._step.of_kind(Output)
        for output in outputs:
            rows = shared
            if bound and output.chosen_from:
                source = next(o for o in outputs if o.name == output.chosen_from)
                rows = [r for r in shared if _is_equal(source, r, got, expected)]
            ours, theirs = (_entries(output, rows, outcome) for outcome in (got, expected))
            found = first_difference(ours, theirs, bound)
            if found is not None:
                row = got.rows.index(rows[found[0] // output.width])
                yield Mismatch(output.name, row, *found[1:])

    def _foreign_writes(
        self, outcome: CapturedOutcome, known: CapturedOutcome | None = None
    ) -> Iterator[Mismatch]:
        """Yield changes of inputs, and of state that no row of the step may write; but not where
        the outcome `known` has changes too."""
        for one in self._step.of_kind(Input, State):
            kept = torch.ones(len(one.tensor), dtype=torch.bool, device=one.tensor.device)
            if isinstance(one, State):
                kept &= ~self._trial.writes(one, outcome.rows)
                kept[list(one.null)] = False
            if known is not None:
                kept &= ~_changed(known, one.name)
            now, then = (of[one.name][kept] for of in (outcome.after, outcome.before))
            found = first_difference(now, then, 0.0)
            if found is not None:
                yield Mismatch(one.name, int(kept.nonzero()[found[0]]), *found[1:])


def _changed(outcome: CapturedOutcome, name: str) -> Tensor:
    """Return [first axis] bool: where a run has changed a tensor."""
    now, then = outcome.after[name], outcome.before[name]
    return (now != then).reshape(len(now), -1).any(1)


def _entries(output: Output, rows: Iterable[int], outcome: CapturedOutcome) -> Tensor:
    """Return the entries of these rows."""
    starts = [outcome.rows.index(row) * output.width for row in rows]
    index = [start + offset for start in starts for offset in range(output.width)]
    return outcome.after[output.name][index]


def _is_equal(output: Output, row: int, got: CapturedOutcome, expected: CapturedOutcome) -> bool:
    return torch.equal(*(_entries(output, [row], outcome) for outcome in (got, expected)))


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether a change of every bit of one tensor changes the other: strided views of one
    storage may alternate without sharing memory."""
    kept, before = one.clone(memory_format=torch.contiguous_format), checksum(other)
    one.copy_(kept.view(torch.uint8).bitwise_not().view(kept.dtype))
    is_shared = checksum(other) != before
    one.copy_(kept)
    return is_shared


CapturedCheck = Callable[[CapturedExamination[Any]], Iterator[Finding]]
CAPTURED_CHECKS: Mapping[str, CapturedCheck] = {
    "S0": CapturedExamination.s0,
    "S1": CapturedExamination.s1,
    "S2": CapturedExamination.s2,
    "S3": CapturedExamination.s3,
    "S4": CapturedExamination.s4,
    "S5": CapturedExamination.s5,
    "S6": CapturedExamination.s6,
}
