"""Tests of the page ledger against a model of the memory that knows what every page holds."""

from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotzero.errors import PoolError
from slotzero.pools.ledger import PageChange, PageLedger
from slotzero.pools.pages import KvPool, PagePool
from slotzero.request import Request
from slotzero.sampling.params import SamplingParams


def _ledger(
    windows: Sequence[int | None], num_pages: int = 40, page_size: int = 4, caching: bool = True
) -> PageLedger:
    groups = [KvPool(PagePool(num_pages), window) for window in windows]
    return PageLedger(groups, page_size, caching)


def _request(tokens: list[int], name: str = "r") -> Request:
    return Request(
        id=name,
        prompt_token_ids=tokens,
        params=SamplingParams(),
        seed=0,
        arrival=0,
        stop_ids=frozenset(),
        max_len=1 << 20,
    )


def _held(request: Request, group: int) -> list[int]:
    """Return the indices of the pages that the request owns."""
    return [i for i, page in enumerate(request.pages[group]) if page]


def _compute(ledger: PageLedger, request: Request, num_tokens: int) -> list[PageChange]:
    """Compute as the scheduler does, up to this position, and return the changes to pages."""
    changes: list[PageChange] | None = []
    if num_tokens > request.num_paged:
        changes = ledger.grow(request, num_tokens)
        assert changes is not None
    request.num_computed = num_tokens
    return changes


def test_a_whole_group_is_paged_at_admission_and_a_window_for_the_first_chunk() -> None:
    ledger = _ledger([None, 6])
    request = _request([1] * 30)
    assert ledger.admit(request, budget=10)
    assert [len(pages) for pages in request.pages] == [8, 3]
    assert (request.num_paged, request.num_computed) == (10, 0)
    assert ledger.num_used == (8, 3)
    assert ledger.num_pages == (39, 39)
    ledger.check([request])


def test_admission_leaves_the_spare_pages_of_every_group() -> None:
    for windows in ([None, 8], [8, None]):
        ledger = _ledger(windows, num_pages=11)
        request = _request([1] * 30)
        assert not ledger.admit(request, budget=10, spare=3)
        assert (request.pages, ledger.num_used) == ([], (0, 0))
        assert ledger.admit(request, budget=10, spare=2)
        ledger.check([request])
    ledger = _ledger([8], num_pages=4)
    assert not ledger.admit(_request([1] * 30), budget=10, spare=1)
    assert ledger.admit(_request([1] * 30), budget=10)


def _recurrent(num_rows: int = 20, interval: int = 8, num_pages: int = 40) -> PageLedger:
    groups = [KvPool(PagePool(num_pages)), KvPool(PagePool(num_rows), interval=interval)]
    return PageLedger(groups, 4)


def test_snapshots_are_named_chunk_by_chunk_and_the_last_passed_is_held() -> None:
    ledger = _recurrent()
    request = _request([*range(30)])
    assert ledger.admit(request, budget=10)
    assert _held(request, 1) == [1]  # after 8 tokens, two pages
    request.num_computed = 10
    assert ledger.grow(request, 30) == [PageChange(1, 3, [2, 0, 3, 0, 4])]
    # the last snapshot ends with its page, after 32 tokens
    assert _held(request, 1) == [1, 3, 5, 7]
    request.num_computed = 30
    changes = ledger.grow(request, 33)
    assert changes is not None and changes[1] == PageChange(1, 1, [0] * 4)
    assert _held(request, 1) == [5, 7]
    ledger.check([request])
    assert ledger.num_pages == (39,)  # snapshots do not count as pages


def test_a_hit_ends_at_the_deepest_snapshot_that_is_left() -> None:
    ledger = _recurrent()
    first = _request([*range(30)])
    ledger.admit(first, budget=99)
    _compute(ledger, first, 30)
    ledger.release(first)
    assert sum(map(bool, ledger.cache.pages(1))) == 3
    second = _request([*range(30), 7], "s")
    ledger.admit(second, budget=99)
    assert (second.num_cached, _held(second, 1)[:1]) == (24, [5])
    assert second.pages[1][5] in ledger.cache.pages(1)
    ledger.check([second])
    ledger.release(second)
    assert ledger.cache.evict(1, 99) == 3  # all snapshots, and no KV page
    third = _request([*range(30), 7], "t")
    ledger.admit(third, budget=99)
    assert third.num_cached == 0
    ledger.check([third])


def test_a_request_continues_without_snapshots_if_none_is_free() -> None:
    ledger = _recurrent(num_rows=3)
    first, second = _request([*range(30)]), _request([*range(50, 80)], "s")
    ledger.admit(first, budget=99)
    assert _held(first, 1) == [1, 3]  # there are only two rows
    ledger.admit(second, budget=99)
    assert _held(second, 1) == []
    ledger.check([first, second])
    _compute(ledger, second, 30)
    ledger.release(first)  # its rows, never computed, become free
    third = _request([*range(80, 110)], "t")
    ledger.admit(third, budget=99)
    assert _held(third, 1) == [1, 3]
    ledger.check([second, third])


def test_a_recount_finds_a_snapshot_where_none_is_due() -> None:
    ledger = _recurrent()
    request = _request([*range(30)])
    ledger.admit(request, budget=99)
    rows = request.pages[1]
    rows[0], rows[1] = rows[1], rows[0]
    with pytest.raises(PoolError, match="a snapshot after 4 tokens"):
        ledger.check([request])


def test_a_refused_admission_gives_back_what_it_found() -> None:
    ledger = _ledger([None, 6], num_pages=8)
    first = _request([1] * 16)
    ledger.admit(first, budget=99)
    _compute(ledger, first, 16)
    ledger.release(first)
    assert ledger.num_cached == (4, 4)
    assert not ledger.admit(_request([1] * 40), budget=4)
    assert (ledger.num_cached, ledger.num_used) == ((4, 4), (0, 0))
    ledger.check([])


def test_growing_returns_released_pages_and_then_new_ones() -> None:
    ledger = _ledger([None, 6], caching=False)
    request = _request([1] * 16)
    ledger.admit(request, budget=99)
    _compute(ledger, request, 16)
    gone = request.pages[1][:2]
    changes = ledger.grow(request, 17)
    assert (
        changes
        == [
            PageChange(0, 4, request.pages[0][4:]),
            PageChange(1, 0, [0, 0]),  # position 16 reads from 11
            PageChange(1, 4, request.pages[1][4:]),
        ]
    )
    # the page freed last is reused first, so its release had to be reported
    assert request.pages[1][4] in gone
    assert request.num_paged == 20
    ledger.check([request])


def test_growing_where_nothing_is_needed_changes_nothing() -> None:
    ledger = _ledger([None, 6])
    request = _request([1] * 7)
    ledger.admit(request, budget=99)
    request.num_computed = 7
    assert (request.num_paged, ledger.grow(request, 8)) == (7, [])
    assert request.num_paged == 8


@pytest.mark.parametrize("windows", [[None, 9], [9, None], [9]])
def test_too_few_pages_change_nothing(windows) -> None:
    ledger = _ledger(windows, num_pages=6, caching=False)
    request = _request([1] * 8)
    assert ledger.grow(request, 40) is None
    assert (request.pages, request.num_paged) == ([], 0)
    ledger.admit(request, budget=99)
    _compute(ledger, request, 8)
    group = windows.index(9)
    held = ledger.groups[group].pool.take(4 - 2)
    before = ([list(pages) for pages in request.pages], request.num_paged)
    for num_tokens in (40, 17):
        assert ledger.grow(request, num_tokens) is None
        assert (request.pages, request.num_paged) == before
    assert ledger.grow(request, 12) is not None
    for page in held:
        ledger.groups[group].pool.release(page)
    ledger.check([request])


@pytest.mark.parametrize("caching", [True, False])
def test_pages_about_to_be_released_count_as_free(caching: bool) -> None:
    """A pool of three pages is enough for a window of two, since the oldest page makes room."""
    ledger = _ledger([8], num_pages=4, caching=caching)
    request = _request([1] * 4)
    assert ledger.admit(request, budget=99)
    for num_tokens in range(4, 40):
        _compute(ledger, request, num_tokens)
        if num_tokens <= 4:
            ledger.remember(request)
        ledger.check([request])
    assert _held(request, 0) == [7, 8, 9]
    assert ledger.num_pages == (3,)


def test_a_released_page_that_another_request_reads_is_not_free() -> None:
    ledger = _ledger([None, 3], num_pages=9)
    first, second = _request([1] * 8), _request([1] * 7 + [2] * 5, "second")
    ledger.admit(first, budget=99)
    first.num_computed = 8
    ledger.remember(first)
    ledger.admit(second, budget=99)
    assert second.num_cached == 4
    shared = first.pages[1][0]
    assert second.pages[1][0] == shared
    assert ledger.grow(first, 9) is not None
    assert _held(first, 1) == [1, 2]
    assert ledger.groups[1].pool.references(shared) == 2  # the cache and the second
    ledger.check([first, second])


def test_a_stand_in_request_owns_the_window_before_its_position() -> None:
    ledger = _ledger([None, 6, 1])
    request = _request([1] * 21)
    changes = ledger.grow(request, 21, num_stored=20)
    assert [_held(request, g) for g in range(3)] == [[0, 1, 2, 3, 4, 5], [3, 4, 5], [5]]
    assert changes == [
        PageChange(g, first, request.pages[g][first:]) for g, first in enumerate([0, 3, 5])
    ]
    ledger.release(request)
    assert (request.pages, request.num_paged, ledger.num_used) == ([], 0, (0, 0, 0))
    ledger.check([])


@pytest.mark.parametrize("window", [1, 2, 3, 4, 5, 8, 9, 31, 99])
def test_a_decoding_request_holds_the_pages_of_its_window(window: int) -> None:
    ledger = _ledger([window], num_pages=99)
    request = _request([1] * 23)
    ledger.admit(request, budget=9)
    for end in (9, 18, 23):
        _compute(ledger, request, end)
    bound = (window - 1 + 4 - 1) // 4 + 1
    most = 0
    for num_tokens in range(24, 200):
        _compute(ledger, request, num_tokens)
        most = max(most, len(_held(request, 0)))
    assert most == min(bound, 50)


def test_five_sliding_layers_in_six_use_little_more_than_the_minimum() -> None:
    """The layers are like Gemma 3's, at 16k tokens; bytes are pages times layers."""
    window, page_size, context, layers = 1024, 16, 16 << 10, (1, 5)
    ledger = _ledger([None, window], num_pages=2000, page_size=page_size)
    request = _request([1] * context)
    budget = 2048
    assert ledger.admit(request, budget)
    cost = []

    def count() -> None:
        cost.append(sum(n * len(_held(request, g)) for g, n in enumerate(layers)))

    for end in range(budget, context + 1, budget):
        _compute(ledger, request, end)
        ledger.remember(request)
        count()
    peak, cost = max(cost), []
    for end in range(context + 1, context + 100):
        request.output_token_ids.append(1)
        _compute(ledger, request, end)
        count()
    everywhere = sum(layers) * context / page_size
    theory = (context + 5 * window) / page_size
    assert max(cost) <= 1.15 * theory
    assert everywhere / max(cost) >= 3
    assert everywhere / peak >= 3  # also while the prompt is computed, chunk by chunk
    ledger.check([request])


def _lose(request: Request, ledger: PageLedger, index: int) -> None:
    ledger.cache.let_go(1, [request.pages[1][index]])
    request.pages[1][index] = 0


def _swap_whole(requests: list[Request]) -> None:
    """Exchange the pages of two requests: the counts stay right, but the owners are wrong."""
    a, b = (request.pages[0] for request in requests)
    a[0], b[0] = b[0], a[0]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda ledger, rs: _lose(rs[0], ledger, 2), "released a page of group 1 that it reads"),
        (lambda ledger, rs: _lose(rs[0], ledger, 1), "released a page of group 1 that it reads"),
        (lambda ledger, rs: _swap_whole(rs), "but not page .* which the cache keeps in the"),
        (lambda ledger, rs: setattr(rs[0], "num_paged", 5), "computed more than the 5"),
        (lambda ledger, rs: setattr(rs[0], "num_paged", 99), "has 3 pages of group 0"),
        (lambda ledger, rs: setattr(rs[0], "num_computed", 3), "is shared, but request r"),
        (lambda ledger, rs: ledger.groups[1].pool.take(1), "1 owners, but a recount finds 0"),
    ],
)
def test_check_finds_damage(damage, message: str) -> None:
    ledger = _ledger([None, 3])
    requests = [_request([n] * 10, f"r{n}") for n in range(2)]
    for request in requests:
        ledger.admit(request, budget=99)
        request.num_computed = 10
        ledger.remember(request)
    ledger.check(requests)
    damage(ledger, requests)
    with pytest.raises(PoolError, match=message):
        ledger.check(requests)


class Memory(RuleBasedStateMachine):
    """State machine that runs requests in any order, even ones that no scheduler would choose.

    Every token of every chunk reads its window, and must find what it would have written itself.
    """

    window = st.integers(1, 9) | st.just(99)

    @initialize(
        windows=st.just([None])
        | st.tuples(st.none(), window)
        | st.tuples(window)
        | st.lists(st.none() | window, min_size=2, max_size=3),
        page_size=st.integers(1, 4),
        num_pages=st.integers(8, 24),
        caching=st.sampled_from([True, True, False]),
    )
    def start(self, windows, page_size: int, num_pages: int, caching: bool) -> None:
        self.ledger = _ledger(windows, num_pages, page_size, caching)
        self.requests: list[Request] = []
        self.memory: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """For each group, page and offset: all tokens up to the one whose KV is stored there."""

    pick = st.integers(0, 99)

    def _pick(self, pick: int) -> Request:
        return self.requests[pick % len(self.requests)]

    def _place(self, request: Request, group: int, position: int) -> tuple[int, int, int]:
        page = request.pages[group][position // self.ledger.page_size]
        assert page != 0
        return group, page, position % self.ledger.page_size

    def _run(self, request: Request, end: int) -> None:
        tokens, start = request.all_token_ids, request.num_computed
        for group, (pool, window, _) in enumerate(self.ledger.groups):
            for position in range(start, end):
                place = self._place(request, group, position)
                assert pool.references(place[1]) == 1, "a page that is written has another owner"
                self.memory[place] = tuple(tokens[: position + 1])
            first = 0 if window is None else max(0, start - window + 1)
            for position in range(first, end):
                read = self.memory.get(self._place(request, group, position))
                assert read == tuple(tokens[: position + 1])
            self._bound(request, group, window, end - start)
        request.num_computed = end

    def _bound(self, request: Request, group: int, window: int | None, count: int) -> None:
        size, held = self.ledger.page_size, _held(request, group)
        if window is None:
            assert held == list(range(len(request.pages[group])))
        else:
            assert len(held) <= (window - 1 + count - 1 + size - 1) // size + 1

    @rule(
        head=st.sampled_from([[], [1, 0, 1, 1], [1, 0, 1, 1, 0, 0, 0, 1]]),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=8),
        budget=st.integers(1, 12),
        spare=st.integers(0, 2),
    )
    def admit(self, head, tail, budget: int, spare: int) -> None:
        request = _request(head + tail, f"r{len(self.memory)}")
        before = self.ledger.num_available
        if not self.ledger.admit(request, budget, spare):
            assert request.pages == []
            assert self.ledger.num_available == before
            return
        self.requests.append(request)
        assert min(self.ledger.num_available) >= spare
        assert request.num_computed < request.num_tokens
        self._run(request, min(request.num_computed + budget, request.num_tokens))

    @precondition(lambda self: self.requests)
    @rule(pick=pick, token=st.integers(0, 1), count=st.integers(1, 9))
    def advance(self, pick: int, token: int, count: int) -> None:
        request = self._pick(pick)
        if request.num_computed == request.num_tokens:
            request.output_token_ids.append(token)
        end = min(request.num_computed + count, request.num_tokens)
        if end > request.num_paged:
            before = [list(pages) for pages in request.pages]
            changes = self.ledger.grow(request, end)
            for group, first, pages in changes or []:
                before[group][first : first + len(pages)] = pages
            assert request.pages == before
            if changes is None:
                return
        self._run(request, end)

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def remember(self, pick: int) -> None:
        self.ledger.remember(self._pick(pick))

    @precondition(lambda self: self.requests)
    @rule(pick=pick)
    def release(self, pick: int) -> None:
        request = self._pick(pick)
        self.requests.remove(request)
        self.ledger.release(request)

    @rule()
    def clear(self) -> None:
        self.ledger.cache.clear()

    @rule(pick=pick, n=st.integers(1, 3))
    def evict(self, pick: int, n: int) -> None:
        self.ledger.cache.evict(pick % len(self.ledger.groups), n)

    @invariant()
    def books_agree(self) -> None:
        self.ledger.check(self.requests)
        ledger = self.ledger
        for g, (pool, *_) in enumerate(ledger.groups):
            owned = {page for request in self.requests for page in request.pages[g] if page}
            assert ledger.num_used[g] == len(owned)
            assert ledger.num_used[g] + ledger.num_cached[g] + pool.num_free == ledger.num_pages[g]

    def teardown(self) -> None:
        if not hasattr(self, "ledger"):
            return
        for request in self.requests:
            self.ledger.release(request)
        self.ledger.check([])
        assert not any(self.ledger.num_used)
        self.ledger.cache.clear()
        assert self.ledger.num_pages == tuple(group.pool.num_free for group in self.ledger.groups)


TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)
