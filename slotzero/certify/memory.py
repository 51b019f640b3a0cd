"""The memory of one live step: saved, overwritten where it is unowned, and restored.

This module knows registered tensors and which slot owns which rows, and judges nothing. Tables are
small and copied whole. Of a paged table only the rows that slots own are copied; changes in the
rest are found by checksums.
"""

import random
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from slotzero.certify.checksum import row_checksums
from slotzero.certify.compare import extent, first_difference
from slotzero.certify.reach import unused_tails
from slotzero.certify.scenario import MUTABLE, Outcome, others_of, owned_rows, poison_of
from slotzero.graph import GraphKey, Runner, TensorKind
from slotzero.graph.registry import Entry

POISONED_PAGES = 8  # a sample of the pages that no running slot owns, as each is copied


class Patch:
    """Rows of a table, and a mask of the places in them that the step does not own."""

    def __init__(self, entry: Entry, rows: Tensor, mask: Tensor, poison: float) -> None:
        """mask: [rows, ...], with any number of the table's further axes."""
        self.entry, self.rows = entry, rows
        self._by_row = entry.tensor.movedim(entry.axis, 0)
        self._saved = self._by_row[rows]
        self._mask = mask.view(*mask.shape, *[1] * (self._saved.dim() - mask.dim()))
        self._poisoned = self._saved.masked_fill(self._mask, poison)

    def poison(self) -> None:
        self._by_row[self.rows] = self._poisoned

    def put_back(self) -> None:
        self._by_row[self.rows] = torch.where(self._mask, self._saved, self._by_row[self.rows])

    def first_change(self) -> tuple[int, str, str] | None:
        """Return the row, its value and the poison that it should still hold, or None."""
        now = torch.where(self._mask, self._by_row[self.rows], self._poisoned)
        if torch.equal(now.view(torch.uint8), self._poisoned.view(torch.uint8)):
            return None  # the usual case, and NaN is not equal to itself
        found = first_difference(now, self._poisoned, 0.0)
        return None if found is None else (int(self.rows[found[0]]), *found[1:])


class StepMemory:
    """A copy of a step's memory, taken after publishing and before anything runs."""

    def __init__(
        self, runner: Runner, key: GraphKey, highest_index: int, rng: random.Random
    ) -> None:
        """`highest_index` is in range as every kind of index: slot, page, position and token."""
        self.registry = registry = runner.registry
        self.slots, counts = _who_runs(runner)
        self._counts = None if runner.spec.rows is None else tuple(counts)
        self.entries = [e for e in runner.entries() if e.kind in MUTABLE]
        self.others = [(entry, entry.tensor.clone()) for entry in others_of(runner)]
        self.tables = [e for e in self.entries if e.kind is TensorKind.TABLE]
        self.paged = [e for e in self.tables if e.through]
        self.owned = {e.name: owned_rows(e, self.slots, registry) for e in self.tables}
        self._key = key
        self._pages = {e.name: self.owned[e.name].nonzero()[:, 0] for e in self.paged}
        self._others = {e.name: self._rows_of_others(e) for e in self.paged}
        self._others_before = {
            e.name: e.tensor.index_select(e.axis, self._others[e.name]) for e in self.paged
        }
        self.before = self.outcome()
        self._sums = {e.name: row_checksums(e.tensor, e.axis) for e in self.paged}
        idle = set(range(1, highest_index + 1)) - set(self.slots)
        self._indices = dict.fromkeys((e.name for e in self.entries), min(idle, default=1))
        tails = unused_tails(runner, self.slots, counts)
        self._patches: dict[str, Patch] = {}
        for entry in sorted(self.tables, key=lambda e: not e.through):  # pages first: see _foreign
            foreign = self._foreign(entry, rng)
            self._patches[entry.name] = self._patch(entry, foreign, tails.get(entry.name))

    @property
    def poisonable(self) -> list[str]:
        return [e.name for e in self._scratch] + list(self._patches)

    def outcome(self) -> Outcome:
        tensors = {
            e.name: e.tensor.index_select(e.axis, self._pages[e.name])
            if e.through
            else e.tensor.clone()
            for e in self.entries
        }
        owned_only = frozenset(e.name for e in self.paged)
        return Outcome(self._key, self.slots, tensors, owned_only, self._counts)

    @contextmanager
    def poisoned(self, names: Collection[str]) -> Iterator[list[Patch]]:
        """Overwrite the unowned memory of these tensors, and yield the patches of tables.

        Afterwards everything is restored except what a step rewrites.
        """
        patches = [patch for name, patch in self._patches.items() if name in names]
        try:
            for patch in patches:
                patch.poison()
            for entry in self._scratch:
                if entry.name in names:
                    entry.tensor.fill_(self._poison_of(entry))
            yield patches
        finally:
            for patch in patches:
                patch.put_back()
            for entry in self._scratch:
                beyond = slice(extent(entry, self.before), None)
                entry.tensor[beyond] = self.before.tensors[entry.name][beyond]

    def undo(self) -> None:
        """Restore the memory from before the step, except for pages that no slot owns."""
        for entry in self.entries:
            before = self.before.tensors[entry.name]
            if not entry.through:
                entry.tensor.copy_(before)
                continue
            entry.tensor.index_copy_(entry.axis, self._pages[entry.name], before)
            others, others_before = self._others[entry.name], self._others_before[entry.name]
            entry.tensor.index_copy_(entry.axis, others, others_before)
        for entry, before in self.others:
            entry.tensor.copy_(before)

    def changed_rows(self, entry: Entry) -> list[int]:
        """Return the rows of a paged table that have changed and that the step does not own."""
        sums = row_checksums(entry.tensor, entry.axis)
        changed = (sums != self._sums[entry.name]) & ~self.owned[entry.name]
        return [int(row) for row in changed.nonzero()[:, 0]]

    @property
    def _scratch(self) -> list[Entry]:
        return [e for e in self.entries if e.kind in (TensorKind.DERIVED, TensorKind.OUTPUT)]

    def _rows_of_others(self, entry: Entry) -> Tensor:
        """Return row 0 and the rows of slots that do not run."""
        all_slots = range(len(self.registry[entry.through]))
        others = owned_rows(entry, all_slots, self.registry) & ~self.owned[entry.name]
        others[0] = True
        return others.nonzero()[:, 0]

    def _foreign(self, entry: Entry, rng: random.Random) -> Tensor:
        """Return [rows] bool: rows to overwrite whole. The first such page is the poison of page
        tables."""
        foreign = ~self.owned[entry.name]
        foreign[0] = False
        if not entry.through:
            return foreign
        pages = foreign.nonzero()[:, 0].tolist()
        some = rng.sample(pages, min(POISONED_PAGES, len(pages)))
        self._indices[entry.through] = next(iter(some), 1)
        foreign[:] = False
        foreign[some] = True
        return foreign

    def _patch(self, entry: Entry, foreign: Tensor, tail: Tensor | None) -> Patch:
        mask = foreign
        if tail is not None:
            mask = foreign[:, None] | (self.owned[entry.name][:, None] & tail)
        rows = mask.view(len(mask), -1).any(1).nonzero()[:, 0]
        mask = mask[rows].view(-1, *[1] * entry.axis, *mask.shape[1:])
        return Patch(entry, rows, mask, self._poison_of(entry))

    def _poison_of(self, entry: Entry) -> float:
        return poison_of(entry, self._indices[entry.name])


def _who_runs(runner: Runner) -> tuple[tuple[int, ...], list[int]]:
    """Return the slot of each row, and how many tokens each row computes."""
    spec, registry = runner.spec, runner.registry
    who = spec.published[0]
    slots = tuple(s for s in registry.published_values(who) if s != registry.entry(who).pad)
    if spec.rows is None:
        return slots, [spec.width] * len(slots)
    return slots, registry.published_values(spec.published[1])[: len(slots)]
