"""The prefix cache against a slow one: a dictionary from whole prefixes to pages."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotzero.errors import PoolError
from slotzero.pools.pages import PagePool
from slotzero.pools.prefix import PrefixCache

SIZE = 2


def _cache(num_pages: int = 12) -> PrefixCache:
    return PrefixCache(PagePool(num_pages), SIZE)


def _seed(cache: PrefixCache, tokens: list[int]) -> list[int]:
    """A request came with these tokens and left: its pages, now owned by the cache alone."""
    pages = cache.pool.take(-(-len(tokens) // SIZE))
    cache.release(tokens, pages)
    return pages


def test_a_match_is_whole_pages_within_the_limit() -> None:
    cache = _cache()
    pages = _seed(cache, [1, 2, 3, 4, 5])
    assert cache.num_pages == 2  # the half page is not kept
    assert cache.match([1, 2, 3, 4, 9, 9], limit=6) == pages[:2]
    assert cache.match([1, 2, 3, 4], limit=3) == pages[:1]
    assert cache.match([1, 2, 3], limit=3) == pages[:1]
    assert cache.match([1, 2], limit=1) == []
    assert cache.match([2, 1, 3, 4], limit=4) == []


def test_the_same_tokens_after_another_prefix_are_another_page() -> None:
    cache = _cache()
    _seed(cache, [1, 1, 7, 7])
    assert cache.match([2, 2, 7, 7], limit=4) == []


def test_a_match_takes_one_reference_each() -> None:
    cache = _cache()
    pages = _seed(cache, [1, 2, 3, 4])
    assert cache.num_evictable == 2
    assert cache.match([1, 2, 3, 4], limit=4) == pages
    assert [cache.pool.references(page) for page in pages] == [2, 2]
    assert cache.num_evictable == 0
    assert cache.evict(9) == 0
    cache.release((), pages)
    assert cache.num_evictable == 2
    cache.check()


def test_a_running_request_offers_no_page_below_anothers() -> None:
    """Else the node above could not be evicted, though nobody uses its page."""
    cache = _cache()
    (first,) = _seed(cache, [1, 2])
    mine = cache.pool.take(2)
    cache.insert([1, 2, 3, 4], mine)
    assert cache.pages() == [first]
    cache.release([1, 2, 3, 4], mine)  # but leaves it there
    assert cache.pages() == [first, mine[1]]
    assert cache.pool.references(mine[0]) == 0
    assert cache.num_evictable == 2
    cache.check()


def test_a_leaver_below_anothers_page_keeps_what_a_third_still_owns() -> None:
    cache = _cache()
    old = _seed(cache, [1, 2, 3, 4])
    leaver, stayer = (cache.match([1, 2, 3, 4], limit=4) for _ in range(2))
    cache.clear()
    (new,) = _seed(cache, [1, 2])
    cache.release([1, 2, 3, 4], leaver)
    assert (leaver, stayer, cache.pages()) == (old, old, [new])
    cache.check()


def test_eviction_takes_the_leaf_unused_for_longest() -> None:
    cache = _cache()
    a, b = _seed(cache, [1, 1, 2, 2])
    (c,) = _seed(cache, [3, 3])
    (d,) = _seed(cache, [1, 1, 4, 4])[1:]
    cache.release((), cache.match([1, 1, 2, 2], limit=4))  # b and a are young again
    order = []
    while cache.num_evictable:
        before = set(cache.pages())
        assert cache.evict(1) == 1
        order += before - set(cache.pages())
        cache.check()
    assert order == [c, d, b, a]
    assert cache.stats.num_evicted_pages == 4


def test_offering_a_duplicate_makes_the_cached_page_young() -> None:
    cache = _cache()
    (a,), (b,) = _seed(cache, [1, 1]), _seed(cache, [2, 2])
    (twin,) = _seed(cache, [1, 1])
    cache.evict(1)
    assert cache.pages() == [a]
    assert len({a, b, twin}) == 3


def test_eviction_says_how_many() -> None:
    cache = _cache()
    _seed(cache, [1, 1, 2, 2, 3, 3])
    assert cache.evict(-1) == cache.evict(0) == 0
    assert cache.evict(2) == 2
    assert cache.evict(2) == 1
    assert cache.pool.num_free == cache.pool.max_free


def test_the_queue_stays_as_small_as_the_tree() -> None:
    cache = _cache()
    _seed(cache, [1, 1])
    for _ in range(50):
        cache.release((), cache.match([1, 1], limit=2))
    assert len(cache._queue) == 1


def test_clear_leaves_requests_their_pages() -> None:
    cache = _cache()
    _seed(cache, [1, 1, 2, 2])
    (held,) = cache.match([1, 1], limit=2)
    cache.clear()
    cache.check()
    assert (cache.num_pages, cache.num_evictable) == (0, 0)
    assert cache.pool.references(held) == 1
    assert cache.pool.num_free == cache.pool.max_free - 1


def test_a_page_cannot_hold_two_prefixes() -> None:
    cache = _cache()
    (page,) = cache.pool.take(1)
    cache.insert([1, 1], [page])
    with pytest.raises(PoolError, match=f"page {page} is offered for a second prefix"):
        cache.insert([2, 2], [page])


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: setattr(cache, "_num_evictable", 1),
        lambda cache: cache._nodes.popitem(),
        lambda cache: cache._queue.clear(),
        lambda cache: cache._queue.append(cache._queue[0]),
        lambda cache: cache._root.children.clear(),
        lambda cache: cache.pool.release(cache.pages()[1]),
        lambda cache: cache.pool.share(cache.pages()[1]),
        lambda cache: setattr(cache, "page_size", 3),
    ],
)
def test_check_finds_damage(damage) -> None:
    cache = _cache()
    _seed(cache, [1, 1, 2, 2])
    cache.check()
    damage(cache)
    with pytest.raises(PoolError):
        cache.check()


class SlowPrefixes(RuleBasedStateMachine):
    """Requests come, go on, and leave; the slow cache says which page each prefix has."""

    @initialize(num_pages=st.integers(6, 14))
    def start(self, num_pages: int) -> None:
        self.cache = _cache(num_pages)
        self.slow: dict[tuple[int, ...], int] = {}
        self.requests: list[tuple[list[int], list[int]]] = []

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=9)
    pick = st.integers(0, 99)

    def _longest(self, tokens: list[int], limit: int) -> list[int]:
        ends = range(SIZE, min(limit, len(tokens)) + 1, SIZE)
        pages = [self.slow.get(tuple(tokens[:end])) for end in ends]
        return pages[: pages.index(None)] if None in pages else pages

    @rule(tokens=tokens)
    def arrive(self, tokens: list[int]) -> None:
        expected = self._longest(tokens, len(tokens) - 1)
        pages = self.cache.match(tokens, len(tokens) - 1)
        assert pages == expected
        num_fresh = -(-len(tokens) // SIZE) - len(pages)
        if num_fresh > self.cache.pool.num_free + self.cache.num_evictable:
            self.cache.release((), pages)
            return
        self._evict(num_fresh - self.cache.pool.num_free)
        self.requests.append((tokens, pages + self.cache.pool.take(num_fresh)))

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def offer(self, pick: int) -> None:
        tokens, pages = self.requests[pick % len(self.requests)]
        self.cache.insert(tokens, pages)
        for i, page in enumerate(pages[: len(tokens) // SIZE]):
            if self.slow.setdefault(tuple(tokens[: (i + 1) * SIZE]), page) != page:
                break

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def leave(self, pick: int) -> None:
        tokens, pages = self.requests.pop(pick % len(self.requests))
        self.cache.release(tokens, pages)
        for i, page in enumerate(pages[: len(tokens) // SIZE]):
            self.slow.setdefault(tuple(tokens[: (i + 1) * SIZE]), page)

    @rule(n=st.integers(0, 4))
    def evict(self, n: int) -> None:
        self._evict(n)

    def _evict(self, n: int) -> None:
        expected = min(max(n, 0), self.cache.num_evictable)
        before = self.cache.pool.num_free
        assert self.cache.evict(n) == expected == self.cache.pool.num_free - before
        left = set(self.cache.pages())
        self.slow = {prefix: page for prefix, page in self.slow.items() if page in left}

    @invariant()
    def books_agree(self) -> None:
        self.cache.pool.check()
        self.cache.check()
        assert sorted(self.slow.values()) == sorted(self.cache.pages())
        held = {page for _, pages in self.requests for page in pages}
        assert self.cache.num_evictable == len(set(self.slow.values()) - held)
        for prefix in self.slow:  # no prefix without the shorter ones
            assert len(prefix) == SIZE or prefix[:-SIZE] in self.slow


TestSlowPrefixes = SlowPrefixes.TestCase
TestSlowPrefixes.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
