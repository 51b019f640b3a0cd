"""The pool of slots. A request owns one slot: its row in all tables.

The pool gives out ids; it does not know tables or requests. The rule: padded rows read slot 0, so
it is never given out; every other slot has at most one owner.
"""

from slotzero.errors import CapacityError, PoolError


class SlotPool:
    """Slots 1 to num_slots.

    The slot that was given back last is given out first: its rows are in the cache, and a row that
    was not reset is noticed at once.
    """

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise CapacityError(f"{num_slots} slots: at least 1 is needed in addition to slot 0")
        self.num_slots = num_slots
        # _free holds each slot with not _taken[slot], once; slot 0 is in neither
        self._free = list(range(num_slots, 0, -1))
        self._taken = [False] * (num_slots + 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        if not self._free:
            raise PoolError(f"all {self.num_slots} slots are taken; check num_free first")
        slot = self._free.pop()
        self._taken[slot] = True
        return slot

    def give_back(self, slot: int) -> None:
        if not 1 <= slot <= self.num_slots:
            raise PoolError(f"slot {slot} is not in this pool of slots 1 to {self.num_slots}")
        if not self._taken[slot]:
            raise PoolError(f"slot {slot} was given back twice")
        self._taken[slot] = False
        self._free.append(slot)

    def is_taken(self, slot: int) -> bool:
        return 1 <= slot <= self.num_slots and self._taken[slot]

    def check(self) -> None:
        if self._taken[0] or 0 in self._free:
            raise PoolError("slot 0, which is reserved for padding, was given out")
        free = [slot for slot in range(1, self.num_slots + 1) if not self._taken[slot]]
        if sorted(self._free) != free:
            raise PoolError(f"free slots are {sorted(self._free)}, but a recount finds {free}")
