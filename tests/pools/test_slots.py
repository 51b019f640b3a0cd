"""Tests of the slot pool against a plain set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slotzero.errors import CapacityError, PoolError
from slotzero.pools.slots import SlotPool


def test_slot_zero_is_never_handed_out() -> None:
    pool = SlotPool(3)
    assert sorted(pool.take() for _ in range(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_an_empty_pool_raises() -> None:
    pool = SlotPool(1)
    pool.take()
    with pytest.raises(PoolError, match="all 1 slots are taken"):
        pool.take()


def test_the_slot_returned_last_is_handed_out_first() -> None:
    pool = SlotPool(4)
    slots = [pool.take() for _ in range(4)]
    pool.give_back(slots[2])
    pool.give_back(slots[0])
    assert pool.take() == slots[0]


def test_returning_a_slot_twice_is_an_error_that_names_it() -> None:
    pool = SlotPool(4)
    slot = pool.take()
    pool.give_back(slot)
    with pytest.raises(PoolError, match=f"slot {slot} was given back twice"):
        pool.give_back(slot)


@pytest.mark.parametrize("slot", [-1, 0, 5])
def test_a_foreign_slot_is_named(slot: int) -> None:
    pool = SlotPool(4)
    assert not pool.is_taken(slot)
    with pytest.raises(PoolError, match=f"slot {slot} is not in this pool"):
        pool.give_back(slot)


def test_a_pool_without_slots_is_refused() -> None:
    with pytest.raises(CapacityError):
        SlotPool(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(0),
        lambda pool: pool._taken.__setitem__(0, True),
    ],
)
def test_check_finds_damage(damage) -> None:
    pool = SlotPool(3)
    pool.take()
    pool.check()
    damage(pool)
    with pytest.raises(PoolError):
        pool.check()


@given(st.integers(1, 6), st.lists(st.integers(0, 7)))
def test_it_behaves_like_a_set(num_slots: int, moves: list[int]) -> None:
    """Move 0 takes a slot; any other move returns that slot."""
    pool, taken = SlotPool(num_slots), set()
    for move in moves:
        if move == 0 and len(taken) < num_slots:
            slot = pool.take()
            assert slot not in taken
            taken.add(slot)
        elif move in taken:
            pool.give_back(move)
            taken.remove(move)
        elif move:
            with pytest.raises(PoolError, match=f"slot {move} "):
                pool.give_back(move)
        assert pool.num_free == num_slots - len(taken)
        assert {slot for slot in range(9) if pool.is_taken(slot)} == taken
        pool.check()
