"""The `SlotWriter` of a scheduler: it stages writes to the table rows of requests.

The tables are on this rank or on another DP rank. It does not know when writes are applied.
"""

from collections.abc import Sequence

import numpy as np

from slotzero.grammars.grammar import next_mask
from slotzero.pools.states import SNAPSHOT_ROWS, rows_of_table
from slotzero.pools.tables import Staging
from slotzero.request import Request
from slotzero.sampling.tables import SAMPLING_TABLES, encode
from slotzero.speculative.drafter import DRAFTED_AT, DRAFTER_LEN, LIMIT, NO_DRAFT, PAGED, SPECULATES


class TableWriter:
    def __init__(
        self,
        staging: Staging,
        page_tables: Sequence[str],
        page_size: int,
        snapshot_interval: int,
        has_drafter: bool,
        vocab_size: int,
        logprobs_mode: str,
    ) -> None:
        self.staging = staging
        self._page_tables, self._page_size = page_tables, page_size
        self._snapshot_interval = snapshot_interval
        self._has_drafter = has_drafter
        self._vocab_size = vocab_size
        self._logprobs_mode = logprobs_mode

    def admitted(
        self, request: Request, tokens: list[int], num_computed: int, pages: list[list[int]]
    ) -> None:
        stage, slot = self.staging.stage, request.slot
        stage("tokens", slot, tokens)
        stage("length", slot, [num_computed])
        stage("target", slot, [request.target])
        for group, numbers in enumerate(pages):
            self._stage_pages(request, group, 0, numbers)
        prompt_len = len(request.prompt_token_ids)
        row = encode(
            request.params, request.seed, prompt_len, request.stop_ids, self._logprobs_mode
        )
        for spec in SAMPLING_TABLES:
            stage(spec.name, slot, _without_neutral_tail(row[spec.name], spec.neutral))
        if self._has_drafter:
            stage(LIMIT, slot, [request.max_len])
            stage(SPECULATES, slot, [int(request.speculates)])
            stage(DRAFTED_AT, slot, [NO_DRAFT])
            stage(DRAFTER_LEN, slot, [num_computed])
            self._stage_paged(request)

    def pages_changed(
        self, request: Request, group: int, first_index: int, pages: list[int]
    ) -> None:
        self._stage_pages(request, group, first_index, pages)
        if self._has_drafter:
            self._stage_paged(request)

    def constrained(self, request: Request) -> None:
        mask = next_mask(request.grammar, request.banned_ids, self._vocab_size)
        self.staging.stage("is_masked", request.slot, [1])
        self.staging.stage("allowed", request.slot, mask.view(np.int32))

    def released(self, slot: int) -> None:
        self.staging.reset(slot)

    def _stage_pages(self, request: Request, group: int, first: int, pages: list[int]) -> None:
        if group < len(self._page_tables):
            self.staging.stage(self._page_tables[group], request.slot, pages, first)
            return
        column, rows = rows_of_table(first, pages, self._snapshot_interval // self._page_size)
        if rows:
            self.staging.stage(SNAPSHOT_ROWS, request.slot, rows, column)

    def _stage_paged(self, request: Request) -> None:
        num_pages = min(map(len, request.pages))
        self.staging.stage(PAGED, request.slot, [num_pages * self._page_size])


def _without_neutral_tail(
    values: Sequence[int | float], neutral: int | float
) -> Sequence[int | float]:
    """Return the row without the columns at its end that have the neutral value."""
    n = len(values)
    while n and values[n - 1] == neutral:
        n -= 1
    return values[:n]
