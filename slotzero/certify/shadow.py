"""One live step run twice: eagerly, then replayed with its unowned memory overwritten.

This module does not know requests, or how a violation is handled. The rule: without a violation,
memory is then as after one replay; with one, or after an exception, it is as before the step.
"""

from collections.abc import Callable, Collection, Iterator, Mapping

import torch
from torch import Tensor

from slotzero.certify.compare import Mismatch, differences, first_difference, padding_of
from slotzero.certify.memory import StepMemory
from slotzero.certify.report import Violation
from slotzero.certify.scenario import Outcome
from slotzero.graph import GraphKey, Runner, TensorKind
from slotzero.graph.registry import Entry


class Shadow:
    def __init__(self, runner: Runner, key: GraphKey, memory: StepMemory, bound: float) -> None:
        self._runner, self._key, self._memory, self._bound = runner, key, memory, bound

    def examine(self) -> list[Violation]:
        memory = self._memory
        try:
            expected = self._run(self._runner.eager)
            memory.undo()
            violations = self._replay_over_poison(memory.poisonable)
            after = memory.outcome()
            violations += self._s4(after)
            violations += self._s1_and_s2(after, expected)
        except BaseException:
            memory.undo()
            raise
        if violations:
            memory.undo()
        return violations

    def _run(self, how: Callable[[GraphKey], None]) -> Outcome:
        how(self._key)
        return self._memory.outcome()

    def _replay_over_poison(self, names: Collection[str]) -> list[Violation]:
        """Replay over overwritten memory, and return violations where it wrote to it."""
        violations = []
        with self._memory.poisoned(names) as patches:
            self._runner.replay(self._key)
            for patch in patches:
                found = patch.first_change()
                if found is not None:
                    row, got, poison = found
                    text = f"{got} in place of {poison}: the step does not own this row"
                    violations.append(self._violation("S4", patch.entry.name, text, row))
        return violations

    def _s4(self, after: Outcome) -> Iterator[Violation]:
        for entry in self._memory.entries:
            if entry.through:
                for row in self._memory.changed_rows(entry)[:1]:
                    text = "it has changed: the step does not own this row"
                    yield self._violation("S4", entry.name, text, row)
            elif entry.kind is TensorKind.TABLE:
                foreign = ~self._memory.owned[entry.name]
                now, before = (
                    outcome.tensors[entry.name].movedim(entry.axis, 0)[foreign]
                    for outcome in (after, self._memory.before)
                )
                rows = foreign.nonzero()[:, 0]
                yield from self._unchanged(
                    entry, now, before, rows, "the step does not own this row"
                )
            elif entry.kind is TensorKind.OUTPUT:
                num_rows = len(after.slots)
                padding = padding_of(entry, after)
                zeros, rows = torch.zeros_like(padding), torch.arange(len(padding)) + num_rows
                yield from self._unchanged(entry, padding, zeros, rows, "padded rows must be zero")
            elif entry.kind is TensorKind.PUBLISHED:
                now = after.tensors[entry.name]
                right = torch.tensor(self._memory.registry.published_values(entry.name)).to(now)
                rows = torch.arange(len(now))
                yield from self._unchanged(entry, now, right, rows, "not what was published")
        for entry, before in self._memory.others:
            rows = torch.arange(len(before))
            yield from self._unchanged(
                entry, entry.tensor, before, rows, "it belongs to another runner"
            )

    def _s1_and_s2(self, after: Outcome, expected: Outcome) -> Iterator[Violation]:
        """Tell S1 from S2 by another replay over clean memory."""
        wrong = self._wrong(after, expected)
        if not wrong:
            return
        self._memory.undo()
        clean = self._wrong(self._run(self._runner.replay), expected)
        for mismatch in clean.values():
            yield self._violation("S2", mismatch.tensor, f"{mismatch}; eager", mismatch.row)
        hurt = next((mismatch for name, mismatch in wrong.items() if name not in clean), None)
        if hurt is not None:
            found = f"{hurt}: it is right if unowned memory is not overwritten"
            unexplained = self._violation("S1", hurt.tensor, found, hurt.row)
            yield from list(self._leaks(expected, clean)) or [unexplained]

    def _leaks(self, expected: Outcome, clean: Mapping[str, Mismatch]) -> Iterator[Violation]:
        """Yield the tensors that change a result when only their memory is overwritten."""
        for name in self._memory.poisonable:
            self._memory.undo()
            self._replay_over_poison([name])
            wrong = self._wrong(self._memory.outcome(), expected)
            hurt = next((mismatch for other, mismatch in wrong.items() if other not in clean), None)
            if hurt is not None:
                found = f"poisoned, it changed {hurt.tensor!r}: {hurt}"
                yield self._violation("S1", name, found, hurt.row)

    def _wrong(self, got: Outcome, expected: Outcome) -> dict[str, Mismatch]:
        found = differences(self._runner, got, expected, self._bound)
        return {mismatch.tensor: mismatch for mismatch in found}

    def _unchanged(
        self, entry: Entry, now: Tensor, before: Tensor, rows: Tensor, why: str
    ) -> Iterator[Violation]:
        found = first_difference(now, before, 0.0)
        if found is not None:
            index, got, expected = found
            text = f"{got} where {expected} was expected: {why}"
            yield self._violation("S4", entry.name, text, int(rows[index]))

    def _violation(self, check: str, tensor: str, found: str, row: int | None) -> Violation:
        return Violation(check, self._key.runner, str(self._key), tensor, found, row)
