"""Memory of the intermediates of recordings.

Two intermediates of one recording share memory if the last call that uses one comes before the
first that uses the other. Recordings are replayed one after the other, so all share one arena.
"""

from bisect import insort
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.graph.operators import OperatorCall
from slotzero.graph.refusals import storage_key

ALIGNMENT = 64


class _Life(NamedTuple):
    """The calls that use a storage: [first, last]."""

    key: int
    num_bytes: int
    first: int
    last: int


class Arena:
    def __init__(self) -> None:
        self.blocks: list[Tensor] = []  # the last one is the largest
        """Recordings of a larger size, made later, need a larger block."""

    @property
    def num_bytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)

    def place(self, calls: Sequence[OperatorCall], made: Set[int]) -> list[OperatorCall]:
        """Return the calls with their intermediates in the arena; `made` has their storages."""
        offsets, size = plan(_lives(calls, made))
        if not self.blocks or self.blocks[-1].nbytes < size:
            self.blocks.append(torch.empty(size, dtype=torch.uint8))
        storage = self.blocks[-1].untyped_storage()

        def placed(tensor: Tensor) -> Tensor:
            if (offset := offsets.get(storage_key(tensor))) is None:
                return tensor
            first = offset // tensor.itemsize + tensor.storage_offset()
            blank = torch.empty(0, dtype=tensor.dtype)
            return blank.set_(storage, first, tensor.shape, tensor.stride())

        return [call.over(placed) for call in calls]


def _lives(calls: Sequence[OperatorCall], made: Set[int]) -> list[_Life]:
    lives: dict[int, _Life] = {}
    for index, call in enumerate(calls):
        for tensor in call.tensors():
            key = storage_key(tensor)
            if key in made:
                first = lives[key].first if key in lives else index
                lives[key] = _Life(key, tensor.untyped_storage().nbytes(), first, index)
    return list(lives.values())


def plan(lives: Sequence[_Life]) -> tuple[dict[int, int], int]:
    """Return an offset for each storage, and the bytes that all need."""
    offsets: dict[int, int] = {}
    placed: list[tuple[int, int, _Life]] = []  # [begin, end) of each, by begin
    size = 0
    for life in sorted(lives, key=lambda life: -life.num_bytes):
        need, at = -(-life.num_bytes // ALIGNMENT) * ALIGNMENT, 0
        for begin, end, other in placed:
            if other.last < life.first or life.last < other.first:
                continue
            if begin - at >= need:
                break
            at = max(at, end)
        insort(placed, (at, at + need, life))
        offsets[life.key] = at
        size = max(size, at + need)
    return offsets, size
