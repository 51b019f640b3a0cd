"""Tests of the page pool against a plain counter, and of the pages that a window reads."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from slotzero.errors import CapacityError, PoolError
from slotzero.pools.pages import KvPool, PagePool


def test_page_zero_is_never_handed_out() -> None:
    pool = PagePool(4)
    assert sorted(pool.take(3)) == [1, 2, 3]
    assert pool.num_free == 0


def test_too_many_pages_takes_none() -> None:
    pool = PagePool(4)
    with pytest.raises(PoolError, match="4 pages requested, 3 are free"):
        pool.take(4)
    assert pool.num_free == 3


def test_a_shared_page_is_free_after_its_last_owner() -> None:
    pool = PagePool(4)
    (page,) = pool.take(1)
    pool.share(page)
    pool.release(page)
    assert (pool.references(page), pool.num_free) == (1, 2)
    pool.release(page)
    assert (pool.references(page), pool.num_free) == (0, 3)


def test_the_page_freed_last_is_handed_out_first() -> None:
    pool = PagePool(6)
    pages = pool.take(4)
    pool.release(pages[3])
    pool.release(pages[1])
    assert pool.take(2) == [pages[1], pages[3]]


@pytest.mark.parametrize("verb", ["share", "release"])
def test_a_free_page_cannot_be_used(verb: str) -> None:
    pool = PagePool(4)
    (page,) = pool.take(1)
    pool.release(page)
    with pytest.raises(PoolError, match=f"page {page} was {verb}d, but it is free"):
        getattr(pool, verb)(page)


@pytest.mark.parametrize("verb", ["share", "release", "references"])
@pytest.mark.parametrize("page", [-1, 0, 4])
def test_a_foreign_page_is_named(verb: str, page: int) -> None:
    with pytest.raises(PoolError, match=f"page {page} is not in this pool"):
        getattr(PagePool(4), verb)(page)


def test_a_pool_without_pages_is_refused() -> None:
    with pytest.raises(CapacityError):
        PagePool(1)


@pytest.mark.parametrize(
    "damage",
    [
        lambda pool: pool._free.append(pool._free[0]),
        lambda pool: pool._free.pop(),
        lambda pool: pool._free.append(0),
        lambda pool: pool._references.__setitem__(0, 1),
        lambda pool: pool._references.__setitem__(1, 0),
        lambda pool: pool._references.__setitem__(1, -1),
    ],
)
def test_check_finds_damage(damage) -> None:
    pool = PagePool(4)
    assert pool.take(1) == [1]
    pool.check()
    damage(pool)
    with pytest.raises(PoolError):
        pool.check()


class PagesLikeACounter(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(6)
        self.owners: Counter[int] = Counter()

    @rule(n=st.integers(0, 6))
    def take(self, n: int) -> None:
        if n > 5 - len(+self.owners):
            with pytest.raises(PoolError):
                self.pool.take(n)
            return
        pages = self.pool.take(n)
        assert len(set(pages)) == n
        assert not any(self.owners[page] for page in pages)
        self.owners.update(pages)

    @rule(page=st.integers(1, 5), change=st.sampled_from([1, -1]))
    def share_or_release(self, page: int, change: int) -> None:
        act = self.pool.share if change == 1 else self.pool.release
        if self.owners[page]:
            act(page)
            self.owners[page] += change
        else:
            with pytest.raises(PoolError, match=f"page {page} "):
                act(page)

    @invariant()
    def counts_agree(self) -> None:
        self.pool.check()
        assert self.pool.num_free == 5 - len(+self.owners)
        assert [self.pool.references(p) for p in range(1, 6)] == [
            self.owners[p] for p in range(1, 6)
        ]


TestPagesLikeACounter = PagesLikeACounter.TestCase
TestPagesLikeACounter.settings = settings(max_examples=60, deadline=None)


@given(position=st.integers(0, 40), page_size=st.integers(1, 5), window=st.integers(1, 50))
def test_a_window_begins_in_the_first_page_that_is_read(position, page_size, window) -> None:
    read = [p for p in range(position + 1) if p > position - window]
    assert len(read) == min(window, position + 1)
    pool = PagePool(2)
    assert KvPool(pool, window).first_read(position, page_size) == read[0] // page_size
    assert KvPool(pool).first_read(position, page_size) == 0
