"""One tensor of one runner in one scenario, and the base class of faults in it.

A case reads a value from the device only once, because a fault may need it during capture.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from slotzero.certify.compare import extent
from slotzero.certify.scenario import Outcome, Scenario, Trial, owned_rows
from slotzero.engine.engine import Engine
from slotzero.graph import Registry, Runner, TensorKind
from slotzero.graph.registry import Entry
from slotzero.speculative.drafter import NUM_DRAFTS
from slotzero.speculative.passes import NUM_CONFIRMED, VERIFY_LEN

COUNTS = ("new_length", NUM_DRAFTS, NUM_CONFIRMED, VERIFY_LEN)
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Case:
    engine: Engine
    runner: Runner
    entry: Entry
    scenario: Scenario
    plain: Outcome  # of the scenario without any fault

    @property
    def registry(self) -> Registry:
        return self.runner.registry

    @property
    def size(self) -> int:
        return extent(self.entry, self.plain)

    @property
    def num_real(self) -> int:
        """Number of rows or tokens within the size that are not padding."""
        rows = range(self.scenario.num_rows)
        if self.entry.per == "step":
            return self.size
        if self.entry.per == "row":
            return len(rows)
        return Trial(self.runner, self.scenario).num_tokens(self.scenario.published, rows)

    @property
    def is_padded(self) -> bool:
        return self.num_real < self.size

    @property
    def is_count(self) -> bool:
        """Whether a row's value counts its tokens, so that a sum over rows is a possible fault."""
        return self.entry.name in (*self.runner.spec.published[1:], *COUNTS)

    @property
    def is_staged(self) -> bool:
        """Whether the host stages this table; only kernels write pages and drafter states."""
        return self.entry.name in self.engine.worker.tables._places

    @property
    def is_written(self) -> bool:
        return self.entry.kind is not TensorKind.TABLE or bool(self.written_rows)

    @cached_property
    def real_rows(self) -> Tensor:
        """Indices of the rows that are not padding; for a table by slot, of running slots."""
        rows = self.plain.slots if self.entry.kind is TensorKind.TABLE else range(self.num_real)
        return torch.tensor(list(rows), device=self.entry.tensor.device)

    @cached_property
    def victim(self) -> Tensor:
        """A place where a change of what a real row has read is visible."""
        entries = [e for e in self.runner.entries() if e.tensor.numel()]
        outputs = [
            e for e in entries if e.kind is TensorKind.OUTPUT and e.tensor.is_floating_point()
        ]
        made = [*outputs, *(e for e in entries if e.kind is TensorKind.DERIVED)]
        if made:
            return made[0].tensor[:1]
        tables = (replace(self, entry=e) for e in entries if e.kind is TensorKind.TABLE)
        written = next(case for case in tables if case.written_rows and not case.entry.through)
        before, after = (
            of[written.entry.name] for of in (self.scenario.tables, self.plain.tensors)
        )
        return written.entry.tensor[tuple((before != after).nonzero()[0].tolist())]

    @property
    def view(self) -> Tensor:
        """The tensor with rows first; a derived or output tensor within the size only."""
        if self.entry.kind in (TensorKind.DERIVED, TensorKind.OUTPUT):
            return self.entry.tensor[: self.size]
        return self.entry.tensor.movedim(self.entry.axis, 0)

    @cached_property
    def foreign(self) -> int | None:
        """A row of this table that an idle slot owns, and that holds no poison yet."""
        idle_slot, tables = self.scenario.idle_slot, self.scenario.tables
        larger_step = self.scenario.larger_step[self.runner.spec.published[0]]
        idle = [slot for slot in (*larger_step, idle_slot) if slot not in self.plain.slots]
        if self.entry.through:
            rows: list[int] = owned_rows(self.entry, idle, tables).nonzero()[:, 0].tolist()
            return rows[0] if rows else None
        by_row = tables[self.entry.name].movedim(self.entry.axis, 0)
        return next((s for s in idle if (by_row[s] != idle_slot).any()), idle[-1] if idle else None)

    @cached_property
    def elsewhere(self) -> int | None:
        """A row that a running slot owns in another paged table, but not in this one."""
        tables, slots = self.plain.tensors, self.plain.slots
        owned = owned_rows(self.entry, slots, tables)
        for other in self.registry.entries():
            if other.through and other.name != self.entry.name:
                rows = owned_rows(other, slots, tables)[: len(owned)].nonzero()[:, 0].tolist()
                only_other: list[int] = [row for row in rows if not owned[row]]
                if only_other:
                    return only_other[0]
        return None

    @cached_property
    def unused(self) -> tuple[int, ...] | None:
        """One unused place in the rows of this table that running slots own."""
        unused = self.scenario.unused.get(self.entry.name)
        if unused is None:
            return None
        if not self.entry.through:
            by_row = self.scenario.tables[self.entry.name].movedim(self.entry.axis, 0)
            unused = unused & (by_row != self.scenario.idle_slot)
        return self._first_owned(unused)

    @cached_property
    def kept(self) -> tuple[int, ...] | None:
        """One place in the rows that running slots own where the step must not write."""
        kept = self.scenario.kept.get(self.entry.name)
        return None if kept is None else self._first_owned(kept)

    def _first_owned(self, mask: Tensor) -> tuple[int, ...] | None:
        owned = owned_rows(self.entry, self.plain.slots, self.plain.tensors)
        places = (mask & owned.view(-1, *[1] * (mask.dim() - 1))).nonzero()
        return tuple(places[0].tolist()) if len(places) else None

    @cached_property
    def written_rows(self) -> list[int]:
        """Rows of this table that the step changes."""
        num_rows = self.entry.tensor.shape[self.entry.axis]
        before, after = (
            tensors[self.entry.name].movedim(self.entry.axis, -1).reshape(-1, num_rows)
            for tensors in (self.scenario.tables, self.plain.tensors)
        )
        return [int(row) for row in (before != after).any(0).nonzero()[:, 0]]

    @cached_property
    def begun(self) -> list[int]:
        """Running slots whose first tokens are computed in this step."""
        length = self.scenario.tables["length"].tolist()
        return [slot for slot in self.plain.slots if length[slot] == 0]

    @cached_property
    def exchanged(self) -> tuple[Tensor, Tensor] | None:
        """Indices of two rows of this tensor that differ, and their values after an exchange."""
        rows = self.view
        differs = (rows != rows[:1]).view(len(rows), -1).any(1).nonzero()[:, 0]
        if not len(differs):
            return None
        index = torch.stack([differs.new_zeros(()), differs[-1]])
        return index, rows[index.flip(0)].clone()

    @cached_property
    def of_next_rank(self) -> Tensor | None:
        """The values of this tensor on the next rank; None if all ranks have the same values. All
        ranks must ask for it at the same time."""
        ranks, held = self.engine.worker.ranks, self.entry.tensor
        if not ranks.is_distributed:
            return None
        own = held.flatten().view(torch.uint8)
        other = ranks.gather(own).view(ranks.size, -1)[(ranks.rank + 1) % ranks.size]
        if not ranks.any(not torch.equal(own, other)):
            return None
        return other.view(held.dtype).view(held.shape)

    @cached_property
    def places_at_double_stride(self) -> Tensor:
        """Index of the place that each row or token has if a row is taken for twice as wide."""
        place = torch.arange(self.size, device=self.entry.tensor.device)
        return (2 * place).clamp(max=max(self.size - 1, 0))

    @cached_property
    def last_owned(self) -> int | None:
        """The last token of a row, in a tensor that holds the slot of each token."""
        owned = self.plain.tensors[self.entry.name][: self.num_real].nonzero()
        return int(owned[-1]) if len(owned) else None

    @cached_property
    def exchanged_slots(self) -> tuple[int, int] | None:
        """Two slots whose rows in this table differ."""
        by_row = self.scenario.tables[self.entry.name].movedim(self.entry.axis, 0)
        differs = (by_row[2:] != by_row[1]).view(len(by_row) - 2, -1).any(1).nonzero()[:, 0]
        return (1, 2 + int(differs[0])) if len(differs) else None

    @cached_property
    def row_unlike_padding(self) -> int | None:
        """The first real row whose value differs from that of an empty step."""
        rows = self.plain.tensors[self.entry.name][: self.num_real]
        return next((row for row, value in enumerate(rows) if value.any()), None)


def always(case: Case) -> bool:
    return True


@dataclass(frozen=True)
class Fault(ABC):
    name: str
    kinds: tuple[TensorKind, ...]
    only: Callable[[Case], bool] = always

    @property
    def shows_in_setup(self) -> bool:
        """Whether the fault is injected before a scenario is set up, not before it is run."""
        return False

    def applies(self, case: Case) -> bool:
        return case.entry.kind in self.kinds and self.only(case)

    def culprit(self, case: Case) -> str:
        """Return what a check must name: the tensor, graph memory or the size."""
        return case.entry.name

    @abstractmethod
    def inject(self, case: Case) -> AbstractContextManager[None]: ...


@contextmanager
def swapped(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute of one object; it may be an attribute of its class."""
    held = vars(owner)
    is_own, before = name in held, held.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextmanager
def swapped_item(owner: MutableMapping[K, V], key: K, value: V) -> Iterator[None]:
    before = owner[key]
    owner[key] = value  # in place: the order of registered tensors stays the same
    try:
        yield
    finally:
        owner[key] = before
