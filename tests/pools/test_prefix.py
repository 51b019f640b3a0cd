"""Tests of the prefix cache against a slow one, a dictionary from prefixes to pages by group."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotzero.errors import PoolError
from slotzero.pools.pages import KvPool, PagePool
from slotzero.pools.prefix import Lookup, PrefixCache

SIZE = 2


def _cache(num_pages: int = 12, windows: Sequence[int | None] = (None,)) -> PrefixCache:
    return PrefixCache([KvPool(PagePool(num_pages), window) for window in windows], SIZE)


def _take(cache: PrefixCache, num_tokens: int) -> list[list[int]]:
    return [group.pool.take(-(-num_tokens // SIZE)) for group in cache.groups]


def _seed(cache: PrefixCache, tokens: list[int]) -> list[list[int]]:
    """Run a request with these tokens to its end; return its pages, which only the cache owns
    now."""
    pages = _take(cache, len(tokens))
    cache.release(tokens, pages)
    return pages


def _match(cache: PrefixCache, tokens: list[int], limit: int) -> list[list[int]]:
    return cache.match(cache.look_up(tokens, limit))


def _try(cache: PrefixCache, tokens: list[int]) -> int:
    """Return how many pages are found, without keeping them."""
    found = _match(cache, tokens, limit=len(tokens))
    cache.release((), found)
    return len(found[0])


def test_a_match_is_whole_pages_within_the_limit() -> None:
    cache = _cache()
    (pages,) = _seed(cache, [1, 2, 3, 4, 5])
    assert cache.num_pages == 2  # the half page is not kept
    assert _match(cache, [1, 2, 3, 4, 9, 9], limit=6) == [pages[:2]]
    assert _match(cache, [1, 2, 3, 4], limit=3) == [pages[:1]]
    assert _match(cache, [1, 2, 3], limit=3) == [pages[:1]]
    assert _match(cache, [1, 2], limit=1) == [[]]
    assert _match(cache, [2, 1, 3, 4], limit=4) == [[]]


def test_the_same_tokens_after_another_prefix_are_another_page() -> None:
    cache = _cache()
    _seed(cache, [1, 1, 7, 7])
    assert _match(cache, [2, 2, 7, 7], limit=4) == [[]]


def test_a_match_takes_one_reference_each() -> None:
    cache = _cache()
    pages = _seed(cache, [1, 2, 3, 4])
    pool = cache.groups[0].pool
    assert cache.num_evictable(0) == 2
    assert _match(cache, [1, 2, 3, 4], limit=4) == pages
    assert [pool.references(page) for page in pages[0]] == [2, 2]
    assert cache.num_evictable(0) == 0
    assert cache.evict(0, 9) == 0
    cache.release((), pages)
    assert cache.num_evictable(0) == 2
    cache.check()


def test_pages_that_a_waiting_request_will_match_are_evicted_last() -> None:
    cache = _cache(windows=[None, 3])
    _seed(cache, [1, 1, 2, 2])
    lookup = cache.look_up([1, 1, 2, 2, 3], limit=4)
    for older, younger in (([5, 5], [6, 6]), ([7, 7], [8, 8])):
        _seed(cache, older)
        _seed(cache, younger)
        cache.keep_young(lookup)
        cache.evict(0, 2)
        cache.search(lookup)
        assert (lookup.num_pages, cache.num_evictable(0)) == (2, 2)
    cache.evict(0, 1)
    cache.search(lookup)
    assert (lookup.num_pages, cache.num_idle(lookup, 0), cache.num_idle(lookup, 1)) == (1, 1, 1)
    cache.check()


def test_a_running_request_offers_no_page_below_that_of_another() -> None:
    """Otherwise the node above could not be evicted although its page is unused."""
    cache = _cache()
    ((first,),) = _seed(cache, [1, 2])
    mine = _take(cache, 4)
    cache.insert([1, 2, 3, 4], mine)
    assert cache.pages(0) == [first]
    cache.release([1, 2, 3, 4], mine)  # but at its end it leaves the page there
    assert cache.pages(0) == [first, mine[0][1]]
    assert cache.groups[0].pool.references(mine[0][0]) == 0
    assert cache.num_evictable(0) == 2
    cache.check()


def test_release_below_a_page_of_another_keeps_what_a_third_owns() -> None:
    cache = _cache()
    old = _seed(cache, [1, 2, 3, 4])
    leaver, stayer = (_match(cache, [1, 2, 3, 4], limit=4) for _ in range(2))
    cache.clear()
    ((new,),) = _seed(cache, [1, 2])
    cache.release([1, 2, 3, 4], leaver)
    assert (leaver, stayer, cache.pages(0)) == (old, old, [new])
    cache.check()


def _evict_all(cache: PrefixCache, group: int) -> list[int]:
    """Evict the pages of a group one by one, and return them in order."""
    order: list[int] = []
    while cache.num_evictable(group):
        before = set(cache.pages(group))
        assert cache.evict(group, 1) == 1
        order += before - set(cache.pages(group))
        cache.check()
    return order


def test_eviction_takes_the_least_recently_used_leaf() -> None:
    cache = _cache()
    ((a, b),) = _seed(cache, [1, 1, 2, 2])
    ((c,),) = _seed(cache, [3, 3])
    ((_, d),) = _seed(cache, [1, 1, 4, 4])
    cache.release((), _match(cache, [1, 1, 2, 2], limit=4))  # b and a are now recently used
    assert _evict_all(cache, 0) == [c, d, b, a]
    assert cache.stats.num_evicted_pages == 4


def test_offering_a_duplicate_counts_as_use_of_the_cached_page() -> None:
    cache = _cache()
    ((a,),), ((b,),) = _seed(cache, [1, 1]), _seed(cache, [2, 2])
    ((twin,),) = _seed(cache, [1, 1])
    cache.evict(0, 1)
    assert cache.pages(0) == [a]
    assert len({a, b, twin}) == 3


def test_eviction_returns_how_many() -> None:
    cache = _cache()
    _seed(cache, [1, 1, 2, 2, 3, 3])
    assert cache.evict(0, -1) == cache.evict(0, 0) == 0
    assert cache.evict(0, 2) == 2
    assert cache.evict(0, 2) == 1
    assert cache.groups[0].pool.num_free == cache.groups[0].pool.max_free


@pytest.mark.parametrize("windows", [[None], [None, 3], [3]])
def test_clear_leaves_requests_their_pages(windows) -> None:
    cache = _cache(windows=windows)
    _seed(cache, [1, 1, 2, 2])
    held = _match(cache, [1, 1], limit=2)
    cache.clear()
    cache.check()
    assert cache.num_pages == 0
    for g, ((pool, *_), (page,)) in enumerate(zip(cache.groups, held, strict=True)):
        assert cache.num_evictable(g) == 0
        assert pool.references(page) == 1
        assert pool.num_free == pool.max_free - 1


def test_a_page_cannot_hold_two_prefixes() -> None:
    cache = _cache()
    ((page,),) = _take(cache, 2)
    cache.insert([1, 1], [[page]])
    with pytest.raises(PoolError, match=f"page {page} is offered, but the cache has"):
        cache.insert([2, 2], [[page]])


# -- windows ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "num_needed"), [(1, 0), (2, 1), (3, 1), (4, 2), (5, 2), (6, 3), (99, 3)]
)
def test_a_hit_has_the_pages_of_its_window(window: int, num_needed: int) -> None:
    cache = _cache(windows=[None, window])
    whole, windowed = _seed(cache, [1, 1, 2, 2, 3, 3])
    num_passed = 3 - num_needed
    found = _match(cache, [1, 1, 2, 2, 3, 3], limit=6)
    assert found == [whole, [0] * num_passed + windowed[num_passed:]]
    assert (cache.num_evictable(0), cache.num_evictable(1)) == (0, num_passed)
    cache.check()
    cache.release((), found)
    assert (cache.num_evictable(0), cache.num_evictable(1)) == (3, 3)


@pytest.mark.parametrize("windows", [[None, 4], [4], [4, 1, None]])
def test_a_hit_ends_before_a_hole_or_a_window_behind_it(windows) -> None:
    cache = _cache(windows=windows)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    pages = _take(cache, len(tokens))
    cache.insert(tokens, pages)
    group = windows.index(4)
    cache.let_go(group, [pages[group][2]])
    assert cache.evict(group, 9) == 1
    # a hit needs its last two pages, and the third is missing
    for n, num_found in enumerate([0, 1, 2, 2, 2, 5, 6]):
        assert _try(cache, tokens[: n * SIZE]) == num_found
    cache.check()


def test_a_window_that_was_passed_is_evicted_in_that_order() -> None:
    cache = _cache(windows=[None, 2])
    whole, windowed = _take(cache, 8)
    tokens = [1, 1, 2, 2, 3, 3, 4, 4]
    cache.insert(tokens, [whole, windowed])
    cache.let_go(1, windowed[:2])
    assert cache.num_evictable(1) == 2
    cache.release(tokens, [whole, [0, 0, *windowed[2:]]])
    # a hit counts as use of the pages that it reads, not of all that it passes
    cache.release((), _match(cache, [1, 1], limit=2))
    assert _evict_all(cache, 1) == [*windowed[1:], windowed[0]]
    assert cache.pages(0) == whole
    assert _try(cache, tokens) == 0
    assert _evict_all(cache, 0) == list(reversed(whole))


def test_a_leaf_goes_with_all_its_pages() -> None:
    cache = _cache(windows=[None, 2, None, 5])
    _seed(cache, [1, 1, 2, 2])
    assert cache.evict(2, 1) == 1
    cache.check()
    assert [len(cache.pages(g)) for g in range(4)] == [1, 1, 1, 1]
    assert cache.stats.num_evicted_pages == 4


def test_a_window_alone_is_pruned_upwards() -> None:
    cache = _cache(windows=[2])
    ((a, b, x),) = _seed(cache, [1, 1, 2, 2, 9, 9])
    ((*_, c, d),) = _seed(cache, [1, 1, 2, 2, 3, 3, 4, 4])
    assert cache.evict(0, 1) == 1
    assert cache.pages(0) == [a, b, c, d]
    assert x not in cache.pages(0)
    # the beginning of pages released together goes first, since the end is still a hit
    assert cache.evict(0, 3) == 3
    assert cache.pages(0) == [d]
    cache.check()
    assert _try(cache, [1, 1, 2, 2, 3, 3, 4, 4]) == 4
    assert _try(cache, [1, 1, 2, 2, 3, 3]) == 0
    assert _evict_all(cache, 0) == [d]
    assert cache._root.children == {}


def test_a_window_alone_stores_no_path_without_pages() -> None:
    cache = _cache(windows=[2])
    ((*_, c),) = _seed(cache, [1, 1, 2, 2, 3, 3])
    pages = _take(cache, 2)
    cache.release([5, 5, 6, 6, 7, 7], [[0, *pages[0], 0]])
    assert cache.pages(0)[-1] == pages[0][0]
    cache.release([8, 8], [[0]])
    cache.check()
    assert c in cache.pages(0)


def test_a_window_alone_is_filled_by_the_next_request() -> None:
    cache = _cache(windows=[3])
    ((_, b, c),) = _seed(cache, [1, 1, 2, 2, 3, 3])
    cache.evict(0, 1)
    (mine,) = _take(cache, 6)
    cache.insert([1, 1, 2, 2, 3, 3], [mine])
    assert cache.pages(0) == [b, c, mine[0]]
    assert cache.num_evictable(0) == 2
    cache.check()


@pytest.mark.parametrize("is_leaving", [True, False])
def test_a_prefix_that_lost_its_window_is_filled_again(is_leaving: bool) -> None:
    cache = _cache(windows=[None, 3])
    tokens = [1, 1, 2, 2, 3, 3]
    old = _seed(cache, [*tokens, 4, 4])
    cache.evict(1, 9)
    assert _try(cache, tokens) == 0
    mine = _take(cache, len(tokens))
    if is_leaving:
        cache.release(tokens, mine)
        assert cache.pages(0) == old[0]
    else:
        cache.insert(tokens, mine)  # the pages of an idle node are replaced
        assert set(cache.pages(0)) == {*mine[0], old[0][3]}
        assert cache.num_evictable(0) == 1
    assert cache.pages(1) == mine[1]
    assert _try(cache, tokens) == 3
    cache.check()


def test_a_node_in_use_is_not_replaced() -> None:
    cache = _cache(windows=[None, 3])
    theirs, mine = _take(cache, 4), _take(cache, 4)
    cache.insert([1, 1, 2, 2], theirs)
    cache.let_go(1, theirs[1])
    cache.evict(1, 9)
    cache.insert([1, 1, 2, 2], mine)
    assert (cache.pages(0), cache.pages(1)) == (theirs[0], [])
    cache.release([1, 1, 2, 2], mine)  # but it may keep pages that have no other owner
    assert (cache.pages(0), cache.pages(1)) == (theirs[0], mine[1])
    assert cache.num_evictable(1) == 2
    cache.check()


def test_release_adds_no_page_to_a_node_that_a_third_request_owns() -> None:
    cache = _cache(windows=[None, 3])
    _seed(cache, [1, 1])
    leaver, _ = (_match(cache, [1, 1], limit=2) for _ in range(2))
    cache.clear()
    _seed(cache, [1, 1])
    cache.evict(1, 9)
    cache.release([1, 1], leaver)
    assert cache.pages(1) == []
    cache.check()


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache: cache._idle[0].popitem(),
        lambda cache: cache._idle[1].popitem(),
        lambda cache: cache._idle[0].move_to_end(cache.pages(0)[1]),
        lambda cache: cache._nodes[0].popitem(),
        lambda cache: cache._nodes[1].popitem(),
        lambda cache: cache._root.children.clear(),
        lambda cache: cache.groups[0].pool.release(cache.pages(0)[1]),
        lambda cache: cache.groups[0].pool.share(cache.pages(0)[1]),
        lambda cache: cache.groups[1].pool.share(cache.pages(1)[0]),
        lambda cache: setattr(cache, "page_size", 3),
    ],
)
def test_check_finds_damage(damage) -> None:
    cache = _cache(windows=[None, 3])
    _seed(cache, [1, 1, 2, 2])
    cache.check()
    damage(cache)
    with pytest.raises(PoolError):
        cache.check()


@pytest.mark.parametrize(("group", "message"), [(0, "its node lacks"), (1, "that page .* lacks")])
def test_check_finds_wrong_owners(group: int, message: str) -> None:
    cache = _cache(windows=[3, None])
    _seed(cache, [1, 1, 2, 2])
    page = cache.pages(group)[1]
    cache.groups[group].pool.share(page)
    del cache._idle[group][page]
    with pytest.raises(PoolError, match=message):
        cache.check()


def test_check_finds_a_node_that_leads_nowhere() -> None:
    cache = _cache(windows=[3])
    _seed(cache, [1, 1, 2, 2])
    (node,) = cache._root.children.values()
    (leaf,) = node.children.values()
    cache._give_up(leaf, 0)
    with pytest.raises(PoolError, match="was not pruned"):
        cache.check()
    cache._prune(leaf)
    cache.check()


class SlowPrefixes(RuleBasedStateMachine):
    """State machine of requests that arrive, grow, pass pages and end, beside the slow cache.

    The slow cache says which pages a prefix has. `memory` is what was written: the prefix that ends
    in each page of each group. Pages are reused, so a stale hit would read another prefix.
    """

    window = st.integers(1, 7) | st.just(99)

    @initialize(
        num_pages=st.integers(6, 14),
        windows=st.just([None])
        | st.tuples(st.none(), window)
        | st.tuples(window)
        | st.lists(st.none() | window, min_size=2, max_size=3),
    )
    def start(self, num_pages: int, windows) -> None:
        self.cache = _cache(num_pages, windows)
        self.groups = range(len(windows))
        self.whole = [g for g in self.groups if windows[g] is None]
        self.windows = windows
        self.slow: dict[tuple[int, ...], list[int]] = {}
        self.requests: list[tuple[list[int], list[list[int]]]] = []
        self.memory: dict[tuple[int, int], tuple[int, ...]] = {}
        self.waiting: list[Lookup] = []

    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=11)
    pick = st.integers(0, 99)

    def _is_needed(self, group: int, i: int, n: int) -> bool:
        """Return whether a hit of n pages reads a position of page i."""
        window = self.windows[group]
        return window is None or any(p > n * SIZE - window for p in range(i * SIZE, (i + 1) * SIZE))

    def _longest(self, tokens: list[int], limit: int) -> list[list[int]]:
        for n in reversed(range(min(limit, len(tokens)) // SIZE + 1)):
            nodes = [self.slow.get(tuple(tokens[: (i + 1) * SIZE])) for i in range(n)]
            if None in nodes:
                continue
            pages = [
                [node[g] if self._is_needed(g, i, n) else 0 for i, node in enumerate(nodes)]
                for g in self.groups
            ]
            needed = [(g, i) for g in self.groups for i in range(n) if self._is_needed(g, i, n)]
            if all(pages[g][i] for g, i in needed):
                return pages
        raise AssertionError("an empty hit needs no page")

    def _owners(self, group: int, page: int) -> int:
        return sum(page in pages[group] for _, pages in self.requests)

    @rule(tokens=tokens)
    def arrive(self, tokens: list[int]) -> None:
        expected = self._longest(tokens, len(tokens) - 1)
        pages = _match(self.cache, tokens, len(tokens) - 1)
        assert pages == expected
        for g in self.groups:
            for i, page in enumerate(pages[g]):
                assert not page or self.memory[g, page] == tuple(tokens[: (i + 1) * SIZE])
        num_fresh = -(-len(tokens) // SIZE) - len(pages[0])
        pools = [group.pool for group in self.cache.groups]
        if any(num_fresh > pools[g].num_free + self.cache.num_evictable(g) for g in self.groups):
            self.cache.release((), pages)
            return
        self.requests.append((tokens, pages))
        for g in self.groups:
            self.evict(g, num_fresh - pools[g].num_free)
            pages[g] += pools[g].take(num_fresh)
            for i in range(len(pages[g]) - num_fresh, len(pages[g])):
                self.memory[g, pages[g][i]] = tuple(tokens[: (i + 1) * SIZE])

    @rule(tokens=tokens)
    def wait(self, tokens: list[int]) -> None:
        self.waiting = [*self.waiting[-2:], self.cache.look_up(tokens, len(tokens) - 1)]

    @precondition(lambda self: self.waiting)
    @rule(pick=pick, young=st.booleans())
    def look_again(self, pick: int, young: bool) -> None:
        """Continue a search; it must find what a new search finds, whatever has changed
        meanwhile."""
        lookup = self.waiting[pick % len(self.waiting)]
        self.cache.search(lookup)
        expected = self._longest(lookup.token_ids, len(lookup.token_ids) - 1)
        for g in self.groups:
            idle = [page for page in expected[g] if page and not self._owners(g, page)]
            assert self.cache.num_idle(lookup, g) == len(idle)
        if young:
            self.cache.keep_young(lookup)
        else:
            assert self.cache.match(lookup) == expected
            self.cache.release((), expected)

    def _offers(self, tokens, pages):
        full = [(tuple(tokens[: end * SIZE]), end - 1) for end in range(1, len(tokens) // SIZE + 1)]
        offers = [(prefix, [of_group[i] for of_group in pages]) for prefix, i in full]
        last = max((i for i, (_, mine) in enumerate(offers) if any(mine)), default=-1)
        return offers[: last + 1]

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def offer(self, pick: int) -> None:
        tokens, pages = self.requests[pick % len(self.requests)]
        self.cache.insert(tokens, pages)
        for prefix, mine in self._offers(tokens, pages):
            node = self.slow.setdefault(prefix, list(mine))
            if any(node[g] != mine[g] for g in self.whole):
                is_idle = not any(self._owners(g, node[g]) for g in self.whole)
                if not is_idle or len(self.whole) == len(self.groups):
                    break
                node[:] = [new or old for old, new in zip(node, mine, strict=True)]
            node[:] = [old or new for old, new in zip(node, mine, strict=True)]

    @precondition(lambda self: self.requests)
    @rule(pick=pick, n=st.integers(1, 3))
    def slide(self, pick: int, n: int) -> None:
        """Let the windows of a request pass its first pages."""
        _, pages = self.requests[pick % len(self.requests)]
        for g in set(self.groups) - set(self.whole):
            first = len(pages[g]) - sum(page != 0 for page in pages[g])
            stop = min(first + n, len(pages[g]) - 1)
            self.cache.let_go(g, pages[g][first:stop])
            pages[g][first:stop] = [0] * (stop - first)

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def leave(self, pick: int) -> None:
        tokens, pages = self.requests.pop(pick % len(self.requests))
        self.cache.release(tokens, pages)
        is_own = True
        for prefix, mine in self._offers(tokens, pages):
            is_alone = not any(self._owners(g, mine[g]) for g in self.whole)
            if prefix not in self.slow and not (is_own or is_alone):
                break
            node = self.slow.setdefault(prefix, list(mine))
            is_own = is_own and all(node[g] == mine[g] for g in self.whole)
            for g in self.groups:
                if not node[g] and (is_own or not self._owners(g, mine[g])):
                    node[g] = mine[g]

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.slow.clear()

    @rule(pick=pick, n=st.integers(0, 4))
    def make_room(self, pick: int, n: int) -> None:
        self.evict(pick % len(self.groups), n)

    def evict(self, group: int, n: int) -> None:
        pool = self.cache.groups[group].pool
        expected = min(max(n, 0), self.cache.num_evictable(group))
        before, others = pool.num_free, [self.cache.pages(g) for g in self.groups]
        assert self.cache.evict(group, n) == expected == pool.num_free - before
        if group not in self.whole:
            others[group] = self.cache.pages(group)
            assert others == [self.cache.pages(g) for g in self.groups]
        left = [set(self.cache.pages(g)) for g in self.groups]
        for node in self.slow.values():
            node[:] = [page if page in left[g] else 0 for g, page in enumerate(node)]
        self.slow = {
            prefix: node
            for prefix, node in self.slow.items()
            if any(any(n) for p, n in self.slow.items() if p[: len(prefix)] == prefix)
        }

    @invariant()
    def books_agree(self) -> None:
        self.cache.check()
        for g in self.groups:
            self.cache.groups[g].pool.check()
            cached = [node[g] for node in self.slow.values() if node[g]]
            assert sorted(cached) == sorted(self.cache.pages(g))
            idle = [page for page in cached if not self._owners(g, page)]
            assert self.cache.num_evictable(g) == len(set(idle)) == len(idle)
        for prefix, node in self.slow.items():
            for g in self.groups:
                assert not node[g] or self.memory[g, node[g]] == prefix
            assert all(node[g] for g in self.whole)
            # no prefix without the shorter one
            assert len(prefix) == SIZE or prefix[:-SIZE] in self.slow


TestSlowPrefixes = SlowPrefixes.TestCase
TestSlowPrefixes.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
