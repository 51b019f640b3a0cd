"""Check that the device holds what the host staged for a slot's row."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from slotzero.errors import ContractError
from slotzero.pools.tables import SlotTables, TableObserver


class Mirror(TableObserver):
    def __init__(self, tables: SlotTables) -> None:
        self._tables = tables

    def applied(self, words: Tensor, offsets: np.ndarray, values: np.ndarray) -> None:
        index = torch.from_numpy(offsets).to(words.device)
        wrong = (words[index].cpu().numpy() != values).nonzero()[0]
        if len(wrong):
            name, slot, column = self._tables.place_of(int(offsets[wrong[0]]))
            raise ContractError(
                f"table tensor {name!r}: row {slot}, column {column} does not hold the value that "
                "was staged for it; a row must keep nothing of an earlier owner",
                tensor=name,
            )


@contextmanager
def mirrored(tables: SlotTables) -> Iterator[None]:
    before = tables.observer
    tables.observer = Mirror(tables)
    try:
        yield
    finally:
        tables.observer = before
