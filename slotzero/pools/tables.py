"""The tables: one row of device state per slot, and the staged host writes that change them.

All tables are views of one arena of 32-bit words, so the writes of a step to any tables are one
upload and one kernel in stream order. The row of slot 0 is written once, here, and never again.
Staged writes may also be for the same tables on another rank. This module does not know the owners
of slots.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slotzero.errors import CapacityError, ConfigError, ContractError
from slotzero.graph import Registry
from slotzero.pools.budget import refuse_beyond
from slotzero.sampling.tables import SAMPLING_TABLES, SamplingTables, TableSpec, mask_tables

MAX_WORDS = 2**31 - 1  # 8 GiB; offsets of staged writes are int32
REMEDY = "lower --max-num-seqs or --max-model-len"
_DTYPES = {"int32": (torch.int32, np.int32), "float32": (torch.float32, np.float32)}


class TableObserver(ABC):
    """Observer of the host's writes, for checks."""

    @abstractmethod
    def applied(self, words: Tensor, offsets: np.ndarray, values: np.ndarray) -> None:
        """Handle that staged writes were applied: words[offsets] must now be `values`."""


@dataclass(frozen=True)
class _Place:
    spec: TableSpec
    base: int  # the first word of the table in the arena


def count_words(num_slots: int, specs: Sequence[TableSpec]) -> int:
    """Return the number of words of all tables; raise ConfigError if they cannot be addressed."""
    num_words = (num_slots + 1) * sum(spec.width for spec in specs)
    if num_words > MAX_WORDS:
        raise ConfigError(
            f"max_num_seqs={num_slots}: the slot tables have {num_words} words with this "
            f"max_model_len, but at most {MAX_WORDS} can be addressed: {REMEDY}"
        )
    return num_words


class Staging:
    """Staged writes to tables with this layout, on this rank or another."""

    def __init__(self, num_slots: int, specs: Sequence[TableSpec]) -> None:
        self.num_slots, self.specs = num_slots, tuple(specs)
        self.num_words = count_words(num_slots, specs)
        self._places: dict[str, _Place] = {}
        base = 0
        for spec in specs:
            self._places[spec.name] = _Place(spec, base)
            base += spec.width * (num_slots + 1)
        self._staged: list[tuple[int, int]] = []  # (first word, number of words), in order
        self._taken: list[tuple[int, int]] = []  # by the last `take`
        self._latest = np.zeros(self.num_words, np.int32)  # by word: the last value staged, if any
        self._written: dict[int, dict[str, int]] = {}  # slot -> table -> words away from neutral

    def stage(
        self, name: str, slot: int, values: Sequence[int | float] | np.ndarray, first: int = 0
    ) -> None:
        """Write `values` to row `slot` of a table from column `first` on, at the next `apply`."""
        spec, base = self._places[name].spec, self._places[name].base
        if not 1 <= slot <= self.num_slots:
            raise ContractError(f"table {name!r}: slot {slot} is not one of 1 to {self.num_slots}")
        if first < 0 or first + len(values) > spec.width:
            raise ContractError(
                f"table {name!r}: {len(values)} values from column {first} on do not fit into "
                f"{spec.width} columns"
            )
        words = np.asarray(values, dtype=_DTYPES[spec.dtype][1]).view(np.int32)
        offset = base + slot * spec.width + first
        self._latest[offset : offset + len(values)] = words
        self._staged.append((offset, len(values)))
        written = self._written.setdefault(slot, {})
        written[name] = max(written.get(name, 0), first + len(values))

    def reset(self, slot: int) -> None:
        """Reset all values written for the last owner of this slot, except tokens, to neutral."""
        for name, width in self._written.pop(slot, {}).items():
            if name != "tokens":
                self.stage(name, slot, np.full(width, self._places[name].spec.neutral))
        self._written.pop(slot, None)

    def take(self) -> np.ndarray | None:
        """Return the staged writes, [2, n]: words and their values.

        If a word was staged twice, both writes have the later value, so their order does not
        matter.
        """
        self._taken, self._staged = self._staged, []
        if not self._taken:
            return None
        offsets = np.concatenate([np.arange(i, i + n, dtype=np.int32) for i, n in self._taken])
        values = np.concatenate([self._latest[i : i + n] for i, n in self._taken])
        return np.stack([offsets, values])

    def take_back(self) -> None:
        """Stage the writes of the last `take` again, because they may not have been applied.

        Writes that were applied are repeated, with the latest values.
        """
        self._staged, self._taken = self._taken + self._staged, []

    def place_of(self, offset: int) -> tuple[str, int, int]:
        """Return table, slot and column of a word of the arena."""
        for name, place in self._places.items():
            width = place.spec.width
            if place.base <= offset < place.base + width * (self.num_slots + 1):
                return name, *divmod(offset - place.base, width)
        raise ContractError(f"word {offset} is in no table")


class SlotTables(Staging):
    def __init__(
        self,
        registry: Registry,
        num_slots: int,
        max_len: int,
        pages_per_slot: int,
        vocab_size: int,
        page_tables: Sequence[str],
        extra_tables: Sequence[TableSpec] = (),
    ) -> None:
        """Allocate all tables; `page_tables` are the names of the page tables by KV group."""
        specs = (
            # tokens[slot, i] is known for i <= length[slot]; one more column for the last sample.
            TableSpec("tokens", max_len + 1, "int32", 0, chosen_from="logits"),
            TableSpec("length", 1, "int32", 0),  # tokens whose KV is stored
            TableSpec("target", 1, "int32", 0),  # sampling begins once length reaches it
            *(TableSpec(name, pages_per_slot, "int32", 0, is_matrix=True) for name in page_tables),
            *SAMPLING_TABLES,
            *mask_tables(vocab_size),
            *extra_tables,
        )
        what, num_bytes = f"tables of {num_slots} requests", 4 * count_words(num_slots, specs)
        refuse_beyond(2 * num_bytes, registry.device, what, REMEDY)  # tables and staged values
        super().__init__(num_slots, specs)
        try:
            self._arena = torch.zeros(self.num_words, dtype=torch.int32, device=registry.device)
        except RuntimeError as error:
            raise CapacityError(f"{what} do not fit into memory: {REMEDY}") from error
        self._views = {
            name: registry.table(name, self._view(place), chosen_from=place.spec.chosen_from)
            for name, place in self._places.items()
        }
        for spec in specs:
            self._views[spec.name].fill_(spec.neutral)
        self.tokens = self._views["tokens"]
        self.length = self._views["length"]
        self.target = self._views["target"]
        self.sampling = SamplingTables(*(self._views[name] for name in SamplingTables._fields))
        self.observer: TableObserver | None = None

    def __getitem__(self, name: str) -> Tensor:
        """Return a table by name: a page table, or one of `extra_tables`."""
        return self._views[name]

    def apply(self) -> None:
        """Apply all staged writes."""
        self.put(self.take())

    def put(self, writes: np.ndarray | None) -> None:
        """Apply writes, with one upload and one kernel."""
        if writes is None:
            return
        host = torch.from_numpy(writes)
        if self._arena.is_cuda:
            host = host.pin_memory()  # PyTorch does not reuse pinned memory before the copy ends
        self._write(host.to(self._arena.device, non_blocking=True))
        if self.observer is not None:
            self.observer.applied(self._arena, *writes)

    def _write(self, words: Tensor) -> None:
        self._arena.scatter_(0, words[0].long(), words[1])

    def _view(self, place: _Place) -> Tensor:
        spec, rows = place.spec, self.num_slots + 1
        words = self._arena[place.base : place.base + rows * spec.width]
        return words.view(_DTYPES[spec.dtype][0]).view(spec.shape(self.num_slots))
