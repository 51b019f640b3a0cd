"""Recurrent states: one row per slot, rows for snapshots, and states after drafts for rollback.

A request's state is in the row of its slot. Rows for snapshots are given out like pages (see
ledger.py), and a table has the snapshot rows of each slot. Row 0 is always zeros and never written.
This module knows shapes, but not tokens or weights.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from slotzero.errors import CapacityError
from slotzero.graph import Registry
from slotzero.kernels.types_recurrent import Scan, States, Trail
from slotzero.pools.budget import Demand, show
from slotzero.sampling.tables import TableSpec

SNAPSHOT_ROWS = "snapshot_rows"
CONV_STATE, SCAN_STATE = "conv_state", "scan_state"
CONV_KEPT, SCAN_KEPT = "conv_snapshots", "scan_snapshots"
CONV_TRAIL, SCAN_TRAIL = "conv_trail", "scan_trail"
STATES, SNAPSHOTS = (CONV_STATE, SCAN_STATE), (CONV_KEPT, SCAN_KEPT)
TRAILS = (CONV_TRAIL, SCAN_TRAIL)
SNAPSHOT_SHARE = 0.25  # fraction of the memory for KV and snapshots
MAX_SNAPSHOTS = 4  # per request, in addition to those that a step takes

_Kind = tuple[Sequence[int], torch.dtype]


@dataclass(frozen=True)
class StateShape:
    """Shape of the states of all recurrent layers."""

    num_layers: int
    scan: Scan
    conv_dtype: torch.dtype
    scan_dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one row."""
        size = prod(self.scan.conv_shape) * self.conv_dtype.itemsize
        if self.scan.has_scan:
            size += prod(self.scan.scan_shape) * self.scan_dtype.itemsize
        return self.num_layers * size

    def reserve(self, num_slots: int, max_width: int, budget: int) -> int:
        """Return the rest of a budget after the states of all slots and their drafts."""
        drafts = num_slots * max_width if max_width > 1 else 0
        taken = self.num_bytes * (num_slots + 1 + drafts)
        if taken >= budget:
            lower = "--max-num-seqs or --speculative-steps" if drafts else "--max-num-seqs"
            raise CapacityError(
                f"recurrent states of {num_slots} requests need {show(taken)}, but the KV budget "
                f"is {show(budget)}: lower {lower}, or raise --kv-cache-memory"
            )
        return budget - taken

    def snapshots(self, interval: int, budget: int, demand: Demand) -> int:
        """Return the number of rows for snapshots, row 0 included."""
        longest = demand.max_model_len or demand.limit
        needed = min(demand.chunk, longest) // interval + 1
        if (needed + 1) * self.num_bytes >= budget:
            raise CapacityError(
                f"{show(budget)} for KV and snapshots are too small for the {needed} snapshots of "
                f"{show(self.num_bytes)} that one request may take in a step: raise "
                "--kv-cache-memory or --snapshot-interval, or use --no-enable-prefix-caching"
            )
        fitting = int(budget * SNAPSHOT_SHARE) // self.num_bytes - 1
        most = needed + demand.max_num_seqs * MAX_SNAPSHOTS
        return min(max(needed, fitting), most) + 1

    def tables(
        self, registry: Registry, num_slots: int, num_snapshots: int, rows: torch.Tensor | None
    ) -> States:
        """Allocate the states.

        `num_snapshots` includes row 0. `rows` is the table with the snapshot rows of each slot, or
        None without snapshots.
        """

        def tables(
            names: tuple[str, str], num_rows: int, through: str = ""
        ) -> list[torch.Tensor | None]:
            kinds = zip(names, self._kinds(), strict=True)
            return [kind and table(name, num_rows, *kind, through) for name, kind in kinds]

        def table(
            name: str, num_rows: int, shape: Sequence[int], dtype: torch.dtype, through: str
        ) -> torch.Tensor:
            size = self.num_layers, num_rows, *shape
            try:
                states = torch.zeros(size, dtype=dtype, device=registry.device)
            except (torch.OutOfMemoryError, RuntimeError) as error:
                raise CapacityError(
                    f"{name} of {num_rows} rows does not fit into memory: lower --max-num-seqs"
                ) from error
            return registry.table(name, states, axis=1, through=through)

        conv, scan = tables(STATES, num_slots + 1)
        assert conv is not None
        if rows is None:
            return States(conv, scan)
        conv_kept, scan_kept = tables(SNAPSHOTS, num_snapshots, SNAPSHOT_ROWS)
        return States(conv, scan, conv_kept, scan_kept, rows)

    def trail(self, registry: Registry, num_tokens: int) -> Trail:
        """Allocate the states after each draft token: [tokens, layers, ...] each."""

        def output(name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
            size = num_tokens, self.num_layers, *shape
            return registry.output(name, size, dtype, per="token")

        of_conv, of_scan = self._kinds()
        return Trail(output(CONV_TRAIL, *of_conv), of_scan and output(SCAN_TRAIL, *of_scan))

    def _kinds(self) -> tuple[_Kind, _Kind | None]:
        """Return shape and dtype of the convolution's states, and of the scan's if it exists."""
        conv, scan = self.scan.conv_shape, self.scan.scan_shape
        return (conv, self.conv_dtype), (scan, self.scan_dtype) if self.scan.has_scan else None


def stored(names: tuple[str, str], states: States) -> tuple[str, ...]:
    """Return the names of those tensors that exist: a model may have no scan."""
    return names if states.scan is not None else names[:1]


def snapshot_tables(interval: int, max_len: int) -> tuple[TableSpec, ...]:
    """Return the table of snapshot rows: one column per `interval` tokens, 0 for no snapshot."""
    if not interval:
        return ()
    return (TableSpec(SNAPSHOT_ROWS, -(-max_len // interval), "int32", 0, is_matrix=True),)


def rows_of_table(
    first_page: int, rows: list[int], pages_per_snapshot: int
) -> tuple[int, list[int]]:
    """Convert rows by page, from `first_page` on, to rows by column of the table.

    Return the first column, and the rows from there on.
    """
    skipped = -(first_page + 1) % pages_per_snapshot
    return first_page // pages_per_snapshot, rows[skipped::pages_per_snapshot]
