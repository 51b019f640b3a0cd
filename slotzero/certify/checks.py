"""Checks S0 to S6 of one trial. Each yields violations; none knows what a runner computes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from slotzero.certify.checksum import checksum
from slotzero.certify.compare import (
    Mismatch,
    differences,
    first_difference,
    leaks,
    padding_of,
)
from slotzero.certify.operator_trace import (
    Finding,
    OperatorTrace,
    first_divergence,
    span_of,
    stray_addresses,
)
from slotzero.certify.padding import PADDED_ROWS
from slotzero.certify.report import Violation
from slotzero.certify.scenario import GRAPH_MEMORY, Outcome, Trial, others_of, owned_rows
from slotzero.graph import GraphKey, Registry, TensorKind
from slotzero.graph.backend import TraceLine
from slotzero.graph.registry import Entry


@dataclass(frozen=True)
class Bounds:
    """How much results may differ, relative to `compare.magnitude`; 0 means bit-identical."""

    replay: float = 0.0
    """A replay and the same function run eagerly."""
    size: float = 0.0
    """The same rows at another size."""
    neighbours: float = 0.0
    """The same row with other rows beside it, or in another place, at the same size. Attention on a
    GPU lays all rows end to end and cuts the line into equal shares, so both move the cuts."""


class Examination:
    """The checks of one size of one runner. All other runs are compared with the first replay."""

    def __init__(self, trial: Trial, bounds: Bounds, constants: Mapping[str, int]) -> None:
        self.trial, self.bounds = trial, bounds
        self.registry: Registry = trial.registry
        self._entries = trial.runner.entries()
        self._constants = constants

    @cached_property
    def plain(self) -> Outcome:
        return self.trial.replay()

    def s0(self) -> Iterator[Violation]:
        """Check the size, published tensors, constants and downloads. The checks that every replay
        makes raise by themselves."""
        yield from self._picked()
        _ = self.plain
        yield from self._not_given()
        yield from self._arrivals()

    def s1(self) -> Iterator[Violation]:
        def changed(names: Sequence[str]) -> Mismatch | None:
            return next(self._changed_results(self.trial.replay(poison=names)), None)

        for name, mismatch in leaks(self.trial.poisonable(), changed):
            found = f"poisoned, it changed {mismatch.tensor!r}: {mismatch}"
            yield self._violation("S1", name, found, mismatch.row)
        yield from self._padding_between_layers()

    def _padding_between_layers(self) -> Iterator[Violation]:
        """Check that padding in what layers return reaches nothing: kernels may skip it, and leave
        there what was in memory."""
        over, expected = self.trial.eager_over_garbage(), self.trial.eager()
        mismatch = next(differences(self.trial.runner, over, expected), None)
        if mismatch is not None:
            found = f"filled with NaN between layers, it changed {mismatch.tensor!r}: {mismatch}"
            yield self._violation("S1", PADDED_ROWS, found, mismatch.row)

    def s2(self) -> Iterator[Violation]:
        eager = self.trial.eager()
        yield from self._differ("S2", self.plain, eager, self.bounds.replay, "eager")
        if self.trial.unpadded_key != self.trial.scenario.key:
            unpadded = self.trial.eager(key=self.trial.unpadded_key)
            yield from self._differ(
                "S2", eager, unpadded, self.bounds.size, "eager without padding"
            )

    def s3(self) -> Iterator[Violation]:
        trial, bounds = self.trial, self.bounds
        rows = range(trial.scenario.num_rows)
        after = trial.replay_after_larger_step()
        yield from self._differ("S3", after, self.plain, 0.0, "history: after a larger step")
        moved = trial.replay_in_other_slots()
        if moved is not None:
            yield from self._differ("S3", moved, self.plain, 0.0, "slots: numbered backwards")
        if len(rows) > 1:
            turned = trial.replay(rows=rows[::-1])
            why = "order: rows reversed"
            yield from self._differ("S3", turned, self.plain, bounds.neighbours, why)
            fewer = trial.replay(rows=rows[::2])
            why = "neighbours: every other row removed"
            yield from self._differ("S3", fewer, self.plain, bounds.neighbours, why)
        larger = self._next_size()
        if larger is not None:
            trial.runner.prepare(larger)
            padded = trial.replay(key=larger)
            yield from self._differ("S3", padded, self.plain, bounds.size, f"size: at {larger}")

    def s4(self) -> Iterator[Violation]:
        plain, scenario = self.plain, self.trial.scenario
        for entry in self._entries:
            if entry.kind is TensorKind.TABLE:
                before, after = (
                    tensors[entry.name].movedim(entry.axis, 0)
                    for tensors in (scenario.tables, plain.tensors)
                )
                if torch.equal(before, after):
                    continue
                owned = owned_rows(entry, plain.slots, plain.tensors)
                yield from self._unchanged(
                    entry, after[~owned], before[~owned], (~owned).nonzero()[:, 0].tolist(),
                    "the step does not own this row",
                )  # fmt: skip
                if entry.name in scenario.kept:
                    kept = scenario.kept[entry.name][owned]
                    now, then = (of[owned].masked_fill(~kept, 0) for of in (after, before))
                    rows = owned.nonzero()[:, 0].tolist()
                    yield from self._unchanged(entry, now, then, rows, "the step must only read it")
            elif entry.kind is TensorKind.OUTPUT:
                padding = padding_of(entry, plain)
                yield from self._unchanged(
                    entry, padding, torch.zeros_like(padding),
                    range(len(plain.slots), len(plain.slots) + len(padding)),
                    "padded rows must be zero",
                )  # fmt: skip
        yield from self._empty_step_outputs()
        yield from self._others_touched()

    def _empty_step_outputs(self) -> Iterator[Violation]:
        """Check that outputs of the step as a whole come from real rows only."""
        entries = [e for e in self._entries if e.kind is TensorKind.OUTPUT and e.per == "step"]
        if entries:
            empty = self.trial.replay(rows=())
        for entry in entries:
            made = empty.tensors[entry.name]
            rows = range(len(made))
            yield from self._unchanged(
                entry, made, torch.zeros_like(made), rows, "an empty step must give zeros"
            )

    def _others_touched(self) -> Iterator[Violation]:
        others, idle_slot = others_of(self.trial.runner), self.trial.scenario.idle_slot
        for entry in others:
            entry.tensor.fill_(idle_slot)
        if others:
            self.trial.replay()
        for entry in others:
            before = torch.full_like(entry.tensor, idle_slot)
            rows = range(len(before))
            yield from self._unchanged(
                entry, entry.tensor, before, rows, "it belongs to another runner"
            )

    def s5(self) -> Iterator[Violation]:
        trial, runner = self.trial, self.trial.runner
        rows = range(trial.scenario.num_rows)
        steps = (rows[:0], rows, rows[::2])  # a size is recorded over an empty step
        traces, written = [], []
        for rows in steps:
            trace, key = OperatorTrace(self.registry), self._set(rows)
            trace.watch(partial(runner.eager, key))
            traces.append(trace)
            written.append(self._transcript(self._set(rows)))
        findings = [
            *traces[0].findings,
            *self._divergences([trace.lines for trace in traces]),
            *self._divergences(written),
            *stray_addresses(written[0], self.registry, runner.backend.memory()),
            *self._lost_memory(),
        ]
        for tensor, found in dict.fromkeys(findings):
            yield self._violation("S5", tensor, found, None)

    def _divergences(self, traces: Sequence[Sequence[TraceLine]]) -> Iterator[Finding]:
        first, *others = traces
        for other in others:
            yield from first_divergence(first, other)

    def _lost_memory(self) -> Iterator[Finding]:
        """Yield what the recording uses of memory that is neither registered nor held for it."""
        used = self.trial.runner.addresses(self.trial.scenario.key)
        line = TraceLine("the recording", tuple(sorted(used)))
        memory = self.trial.runner.backend.memory()
        for _, found in [*stray_addresses([line], self.registry, memory)][:1]:
            yield GRAPH_MEMORY, found

    def _transcript(self, key: GraphKey) -> list[TraceLine]:
        """Return what is recorded; nothing for a size that could not be, and runs eagerly."""
        runner = self.trial.runner
        if runner.records[key].failure:
            return []
        return runner.backend.transcript(partial(runner.spec.function, key))

    def s6(self) -> Iterator[Violation]:
        spans = sorted(
            (span_of(e.tensor), e.name) for e in self.registry.entries() if e.tensor.numel()
        )
        reaching: tuple[int, str] = (0, "")  # the span so far that ends last
        for (first, last), name in spans:
            if first < reaching[0]:
                guilty, other = self._intruder(name, reaching[1])
                yield self._violation("S6", guilty, f"its memory overlaps that of {other!r}", None)
            reaching = max(reaching, (last, name))
        for start, end in self.trial.runner.backend.memory():
            for (first, last), name in spans:
                if first < end and start < last:
                    yield self._violation("S6", name, "its memory is inside a graph's pool", None)

    def _intruder(self, *names: str) -> tuple[str, str]:
        """Order two overlapping tensors: the one that is not a table first, else the smaller."""
        one, other = sorted(
            (self.registry.entry(name) for name in names),
            key=lambda e: (e.kind is TensorKind.TABLE, e.tensor.nbytes),
        )
        return one.name, other.name

    def _picked(self) -> Iterator[Violation]:
        """Yield the size if this rank picks another one for the step: then ranks replay different
        recordings."""
        trial, key = self.trial, self.trial.scenario.key
        rows = range(trial.scenario.num_rows)
        num_tokens = trial.num_tokens(trial.scenario.published, rows)
        picked = trial.runner.pick(num_tokens, len(rows))
        if picked != key:
            yield self._violation("S0", "", f"this rank picks {picked} for its step", None)

    def _not_given(self) -> Iterator[Violation]:
        """Yield published tensors that do not hold the published values and padding up to the end
        of the buffer, and constants that have changed."""
        for name in self.trial.runner.spec.published:
            entry, after = self.registry.entry(name), self.plain.tensors[name]
            values = self.trial.scenario.published[name]
            pads = [entry.pad] * (len(after) - len(values))
            right = torch.tensor([*values, *pads], dtype=after.dtype, device=after.device)
            found = first_difference(after, right, 0.0)
            if found is not None:
                row, got, expected = found
                text = f"{got} where {expected} was expected: not what was published"
                yield self._violation("S0", name, text, row)
        for name, was in self._constants.items():
            if checksum(self.registry[name]) != was:
                yield self._violation("S0", name, "a constant has changed", None)

    def _arrivals(self) -> Iterator[Violation]:
        """Check that downloads bring what the device holds now, not data of another step."""
        for value in (self.trial.scenario.idle_slot, 0):
            for entry in self._entries:
                if entry.kind is TensorKind.OUTPUT:
                    entry.tensor.fill_(value)
            for name, arrived in self.trial.scenario.fetch().items():
                sent = self.registry[name][: len(arrived)].to(arrived.device)
                found = first_difference(arrived, sent, 0.0)
                if found is not None:
                    row, got, expected = found
                    text = f"the host got {got} where the device held {expected}"
                    yield self._violation("S0", name, text, row)

    def _changed_results(self, outcome: Outcome) -> Iterator[Mismatch]:
        """Yield what changed in real rows, derived tensors and padding because of poison."""
        for mismatch in differences(self.trial.runner, outcome, self.plain):
            if mismatch.tensor not in self.trial.scenario.unused:
                yield mismatch
        for name, unused in self.trial.scenario.unused.items():
            entry = self.registry.entry(name)
            owned = owned_rows(entry, outcome.slots, self.plain.tensors)
            got, expected = (
                of.tensors[name].movedim(entry.axis, 0)[owned].masked_fill(unused[owned], 0)
                for of in (outcome, self.plain)
            )
            found = first_difference(got, expected, 0.0)
            if found is not None:
                yield Mismatch(name, None, *found[1:])
        yield from self._padding_of(outcome)

    def _padding_of(self, outcome: Outcome) -> Iterator[Mismatch]:
        """Yield padded rows that poisoned memory changed. S4 checks that they are zero."""
        first = len(outcome.slots)
        for entry in self._entries:
            if entry.kind is TensorKind.OUTPUT:
                got, wanted = (padding_of(entry, of) for of in (outcome, self.plain))
                found = first_difference(got, wanted, 0.0)
                if found:
                    yield Mismatch(entry.name, first + found[0], *found[1:])

    def _unchanged(
        self, entry: Entry, after: Tensor, before: Tensor, rows: Iterable[int], why: str
    ) -> Iterator[Violation]:
        found = first_difference(after, before, 0.0)
        if found is not None:
            index, got, expected = found
            text = f"{got} where {expected} was expected: {why}"
            yield self._violation("S4", entry.name, text, list(rows)[index])

    def _differ(
        self, check: str, got: Outcome, expected: Outcome, bound: float, how: str
    ) -> Iterator[Violation]:
        for mismatch in differences(self.trial.runner, got, expected, bound):
            yield self._violation(check, mismatch.tensor, f"{mismatch}; {how}", mismatch.row)

    def _set(self, rows: range) -> GraphKey:
        """Set up the scenario for these rows without running it, and return its key."""
        key = self.trial.scenario.key
        self.trial.run(lambda key, num_tokens: None, rows, key)
        return key

    def _next_size(self) -> GraphKey | None:
        key = self.trial.scenario.key
        larger = [
            k
            for k in self.trial.runner.all_keys()
            if k.tokens >= key.tokens and k.rows >= key.rows and k != key
        ]
        return min(larger, key=lambda k: (k.tokens, k.rows), default=None)

    def _violation(self, check: str, tensor: str, found: str, row: int | None) -> Violation:
        key = self.trial.scenario.key
        return Violation(check, key.runner, str(key), tensor, found, row)


CheckFunction = Callable[[Examination], Iterator[Violation]]
CHECK_FUNCTIONS: Mapping[str, CheckFunction] = {
    "S0": Examination.s0,
    "S1": Examination.s1,
    "S2": Examination.s2,
    "S3": Examination.s3,
    "S4": Examination.s4,
    "S5": Examination.s5,
    "S6": Examination.s6,
}
