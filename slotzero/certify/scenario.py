"""A scenario is one step that could happen; a trial runs it repeatedly from the same memory.

This module knows registered tensors and which slot owns which rows. It does not know requests or
models.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from slotzero.certify.padding import PaddingPieces, fill_with_garbage
from slotzero.graph import GraphKey, Registry, Runner, TensorKind
from slotzero.graph.backend import PlainPieces
from slotzero.graph.registry import Entry

FLOAT8_NAN = 0xFF
MUTABLE = (TensorKind.TABLE, TensorKind.PUBLISHED, TensorKind.DERIVED, TensorKind.OUTPUT)
WRITTEN = (TensorKind.DERIVED, TensorKind.OUTPUT)
GRAPH_MEMORY = "graph memory"
"""Name of what recordings share for their intermediates, where it can be overwritten."""
POISON_BYTE = 0xFF  # NaN as a number of any width, and -1 as an index
Rows = Sequence[int]


@dataclass(frozen=True)
class Scenario:
    """The memory when a step begins, and the slots that run in it."""

    key: GraphKey
    published: Mapping[str, Sequence[int]]  # by tensor, one value per row
    larger_step: Mapping[str, Sequence[int]]
    """The published values of another step with as many rows as possible, which ran before."""
    idle_slot: int
    """A slot that does not run: an index that is in range and wrong wherever it appears."""
    tables: Mapping[str, Tensor]
    unused: Mapping[str, Tensor] = field(default_factory=dict)
    """By table, with slots or owned rows first: True where a running slot's row holds nothing."""
    fresh: Mapping[str, Tensor] = field(default_factory=dict)
    """Same layout: True where the step must write before it reads."""
    kept: Mapping[str, Tensor] = field(default_factory=dict)
    """Same layout: True where the step must not write, although its slots own the place."""
    fetch: Callable[[], Mapping[str, Tensor]] = field(default=dict)
    """Downloads the real rows of each output that is sent to the host, by name."""

    @property
    def num_rows(self) -> int:
        return len(next(iter(self.published.values())))


@dataclass(frozen=True)
class Outcome:
    key: GraphKey
    slots: tuple[int, ...]  # by row
    tensors: Mapping[str, Tensor]
    owned_only: frozenset[str] = frozenset()
    """Tables of which `tensors` holds only the rows that the slots own."""
    counts: tuple[int, ...] | None = None
    """Tokens by row; None if all rows of the runner have the same number."""


class Trial:
    def __init__(self, runner: Runner, scenario: Scenario) -> None:
        self.runner, self.scenario = runner, scenario
        self.registry = runner.registry
        self._slots_name = runner.spec.published[0]
        self._entries = [e for e in runner.entries() if e.kind in MUTABLE]
        self._saved: list[tuple[Tensor, Tensor]] = []  # overwritten graph memory, as it was

    def replay(self, *, rows: Rows | None = None, key: GraphKey | None = None,
               poison: Iterable[str] = ()) -> Outcome:  # fmt: skip
        """Replay as the engine does, with the checks that every replay makes."""
        key = key or self.scenario.key
        return self.run(lambda k, n: self.runner.run(k, n), rows, key, poison)

    def eager(self, *, rows: Rows | None = None, key: GraphKey | None = None,
              poison: Iterable[str] = ()) -> Outcome:  # fmt: skip
        return self.run(lambda k, _: self.runner.eager(k), rows, key or self.scenario.key, poison)

    def eager_over_garbage(self) -> Outcome:
        """Run eagerly with padding that no kernel has written: NaN in what every layer returns."""
        num_rows, function = self.scenario.num_rows, self.runner.spec.function

        def run(key: GraphKey, num_tokens: int) -> None:
            pieces = PaddingPieces(PlainPieces(), key, num_rows, num_tokens, fill_with_garbage)
            function(key, pieces)

        return self.run(run, None, self.scenario.key)

    def replay_after_larger_step(self) -> Outcome:
        """Replay with the scenario's tables, and everything else as a larger step left it."""
        larger_step = self.scenario.larger_step
        num_rows = len(larger_step[self._slots_name])
        tokens = self.num_tokens(larger_step, range(num_rows))
        key = self.runner.pick(tokens, num_rows)
        assert isinstance(key, GraphKey), key
        self.runner.prepare(key)
        self._load(())
        self._publish(larger_step, range(num_rows))
        self.runner.run(key, tokens)
        for name, tensor in self.scenario.tables.items():
            self.registry[name].copy_(tensor)
        return self._finish(lambda k, n: self.runner.run(k, n), None, self.scenario.key)

    def replay_in_other_slots(self) -> Outcome | None:
        """Replay the same rows with the slots numbered backwards, and return tables and outputs as
        if each request were still in its own; None if there is no table by slot."""
        scenario = self.scenario
        by_slot = [e for e in self._entries if e.kind is TensorKind.TABLE and not e.through]
        if not by_slot:
            return None
        last = by_slot[0].tensor.shape[by_slot[0].axis] - 1
        self._load(())
        for entry in by_slot:
            entry.tensor.copy_(_backwards(entry, scenario.tables[entry.name]))
        slots = [last + 1 - slot for slot in scenario.published[self._slots_name]]
        rows = range(scenario.num_rows)
        self._publish({**scenario.published, self._slots_name: slots}, rows)
        self.runner.run(scenario.key, self.num_tokens(scenario.published, rows))
        made = self._outcome(rows, scenario.key)
        tensors = {
            e.name: _backwards(e, made.tensors[e.name]) if e in by_slot else made.tensors[e.name]
            for e in self._entries
            if e.kind in (TensorKind.TABLE, TensorKind.OUTPUT)
        }
        return replace(made, tensors=tensors)

    @property
    def unpadded_key(self) -> GraphKey:
        rows = self.scenario.num_rows
        return GraphKey(
            self.runner.spec.name, self.num_tokens(self.scenario.published, range(rows)), rows
        )

    def num_tokens(self, published: Mapping[str, Sequence[int]], rows: Iterable[int]) -> int:
        rows = list(rows)
        return self.runner.num_tokens(sum(self.counts(published, rows)), len(rows))

    def counts(self, published: Mapping[str, Sequence[int]], rows: Iterable[int]) -> list[int]:
        """Return the tokens of each of these rows, or nothing for a runner with a fixed row width.
        The second published tensor holds them."""
        spec = self.runner.spec
        return [] if spec.rows is None else [published[spec.published[1]][row] for row in rows]

    def poisonable(self) -> list[str]:
        """Return every tensor with unowned memory, in the order in which data flows, including
        those that other runners write."""
        kinds = (TensorKind.PUBLISHED, TensorKind.DERIVED, TensorKind.TABLE, TensorKind.OUTPUT)
        entries = [*self._entries, *others_of(self.runner)]
        names = [e.name for kind in kinds for e in entries if e.kind is kind]
        return [*names, GRAPH_MEMORY] if self.runner.backend.blocks() else names

    def run(
        self,
        how: Callable[[GraphKey, int], None],
        rows: Rows | None,
        key: GraphKey,
        poison: Iterable[str] = (),
    ) -> Outcome:
        """Set up the scenario and call `how` with the key and the number of tokens."""
        self._load(poison)
        return self._finish(how, rows, key)

    def _finish(
        self, how: Callable[[GraphKey, int], None], rows: Rows | None, key: GraphKey
    ) -> Outcome:
        rows = range(self.scenario.num_rows) if rows is None else rows
        self._publish(self.scenario.published, rows)
        how(key, self.num_tokens(self.scenario.published, rows))
        return self._outcome(rows, key)

    def _outcome(self, rows: Rows, key: GraphKey) -> Outcome:
        slots = tuple(self.scenario.published[self._slots_name][row] for row in rows)
        is_ragged = self.runner.spec.rows is not None
        counts = tuple(self.counts(self.scenario.published, rows)) if is_ragged else None
        tensors = {e.name: e.tensor.clone() for e in self._entries}
        return Outcome(key, slots, tensors, counts=counts)

    def _load(self, poison: Iterable[str]) -> None:
        self.registry.reupload_published()
        for block, was in self._saved:
            block.copy_(was)
        self._saved.clear()
        for entry in self._entries:
            if entry.kind is TensorKind.TABLE:
                entry.tensor.copy_(self.scenario.tables[entry.name])
            else:
                entry.tensor.zero_()
        for name in poison:
            if name == GRAPH_MEMORY:
                self._poison_graph_memory()
            else:
                self._poison(self.registry.entry(name))

    def _publish(self, published: Mapping[str, Sequence[int]], rows: Iterable[int]) -> None:
        self.registry.begin_step()
        for name in self.runner.spec.published:
            self.registry.publish(name, [published[name][row] for row in rows])

    def _poison_graph_memory(self) -> None:
        """Overwrite it until the next trial: what the replays before left there may not matter."""
        for block in self.runner.backend.blocks():
            self._saved.append((block, block.clone()))
            block.fill_(POISON_BYTE)

    def _poison(self, entry: Entry) -> None:
        poison = poison_of(entry, self.scenario.idle_slot)
        if entry.kind is not TensorKind.TABLE:
            entry.tensor.fill_(poison)
            return
        by_row = entry.tensor.movedim(entry.axis, 0)
        running = owned_rows(entry, self.scenario.published[self._slots_name], self.scenario.tables)
        foreign = ~running
        foreign[0] = False
        by_row[foreign] = poison
        for masks in (self.scenario.unused, self.scenario.fresh):
            if entry.name in masks:
                by_row.masked_fill_(masks[entry.name], poison)


def _backwards(entry: Entry, table: Tensor) -> Tensor:
    """Return a table by slot with its rows in reverse, except for row 0."""
    by_row = table.movedim(entry.axis, 0)
    return torch.cat([by_row[:1], by_row[1:].flip(0)]).movedim(0, entry.axis)


def poison_of(entry: Entry, index: int) -> float:
    """Return what shows in every result that it reaches: NaN, or for indices, a wrong one."""
    if entry.is_float8:
        return FLOAT8_NAN
    return torch.nan if entry.tensor.is_floating_point() else index


def kind_of(runner: Runner) -> str:
    """Return the runner's name without its width."""
    return runner.spec.name.removesuffix(f"-{runner.spec.width}")


def others_of(runner: Runner) -> list[Entry]:
    """Return the tensors that only other runners write, and this one must not change."""
    entries = runner.registry.entries()
    return [e for e in entries if e.kind in WRITTEN and e.name not in runner.spec.writes]


class Tables(Protocol):
    def __getitem__(self, name: str, /) -> Tensor: ...


def owned_rows(entry: Entry, slots: Sequence[int], tables: Tables) -> Tensor:
    """Return [rows of a table] bool: the rows that slots own according to `tables`; never row 0."""
    owned = torch.zeros(
        entry.tensor.shape[entry.axis], dtype=torch.bool, device=entry.tensor.device
    )
    index = torch.tensor(slots, dtype=torch.long, device=owned.device)
    if entry.through:
        index = tables[entry.through][index].long().flatten()
        index = index[(index >= 0) & (index < len(owned))]  # a damaged index is not followed
    owned[index] = True
    owned[0] = False
    return owned


def memory_of(registry: Registry) -> dict[str, Tensor]:
    """Return a copy of every table, for a scenario."""
    return {e.name: e.tensor.clone() for e in registry.entries() if e.kind is TensorKind.TABLE}
