"""The scheduler against a simulated device, and the device against a run without any batching.

The device below obeys table writes and steps and nothing else. Its KV is a chain of hashes: the
entry of a position depends on every token up to it, so a page that was shared, freed, reused or
recomputed wrongly cannot read like the right one. In every KV group each row reads all that its
tokens may read, before and after the rows write. The next token is taken from the last entry. So
if each request gets the tokens that it gets alone, no decision of the scheduler changed an answer.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotzero.engine.dp_schedulers import DpSchedulers
from slotzero.engine.scheduler import Scheduler, SchedulerConfig
from slotzero.errors import CapacityError, ConfigError, PoolError, RequestError
from slotzero.pools.pages import KvPool, PagePool, reach
from slotzero.pools.slots import SlotPool
from slotzero.request import Request, Status
from slotzero.sampling.params import SamplingParams
from slotzero.step import Row, Step

VOCAB = 5


def _next_token(entry: int) -> int:
    return entry % VOCAB


def _alone(prompt: list[int], max_len: int) -> tuple[list[int], list[int]]:
    """All tokens up to max_len, blind to stop ids, and the KV entry of each position."""
    tokens, entries = list(prompt), []
    while len(entries) < max_len:
        entries.append(hash((entries[-1] if entries else 0, tokens[len(entries)])))
        if len(entries) == len(tokens) < max_len:
            tokens.append(_next_token(entries[-1]))
    return tokens, entries


def _answer(request: Request) -> tuple[list[int], str]:
    output = _alone(request.prompt_token_ids, request.max_len)[0][len(request.prompt_token_ids) :]
    for i, token in enumerate(output, 1):
        if token in request.stop_ids and i >= request.params.min_tokens:
            return output[:i], "stop"
        if request.grammar is not None and i == request.grammar.num_tokens:
            return output[:i], "stop"
    return output, "length"


@dataclass
class Counting:
    """A grammar of any tokens, but only so many."""

    num_tokens: int
    num_taken: int = 0
    is_ready: bool = True
    failure: str = ""

    def advance(self, token: int) -> bool:
        self.num_taken += 1
        return True

    def can_go_on(self, banned: frozenset[int]) -> bool:
        return self.num_taken < self.num_tokens

    def release(self) -> None: ...


@dataclass
class SlotRow:
    tokens: list[int]
    length: int
    target: int
    pages: list[list[int]]
    drafter_len: int
    """By a drafter, if there is one."""
    num_constrained: int = -1
    """How many tokens were known when it was last said what may follow them."""


@dataclass
class Device:
    """Tables and KV as the device sees them. Writes wait until the next step, as staged ones do."""

    page_size: int
    windows: Sequence[int | None]
    most_behind: int | None = None
    """If there is a drafter: then the last group is its own."""
    num_caught_up: int = 0
    staged: list[tuple] = field(default_factory=list)
    table: dict[int, SlotRow] = field(default_factory=dict)
    kv: dict[tuple[int, int, int], int] = field(default_factory=dict)
    """By group, page and place in it."""

    def admitted(self, request: Request, tokens, num_computed: int, pages) -> None:
        row = SlotRow(tokens, num_computed, request.target, pages, num_computed)
        self.staged.append(("admitted", request.slot, row))

    def pages_changed(self, request: Request, group: int, first_index: int, pages) -> None:
        assert pages
        self.staged.append(("pages", request.slot, group, first_index, pages))

    def constrained(self, request: Request) -> None:
        assert request.grammar.num_taken == len(request.output_token_ids)
        self.staged.append(("constrained", request.slot, request.num_tokens))

    def released(self, slot: int) -> None:
        self.staged.append(("released", slot))

    def launch(self, step: Step, lane: int = 0) -> list[list[int]]:
        self._apply()
        rows = step.lanes[lane]
        slots = [row.slot for row in rows]
        assert len(set(slots)) == len(slots)
        assert step.catches_up <= (self.most_behind is not None)
        if step.catches_up:
            self.num_caught_up += 1
            self._follow(rows)
        starts = [self.table[slot].length for slot in slots]
        for row, start in zip(rows, starts, strict=True):
            assert row.start <= start if row.start >= row.request.target else row.start == start
            assert row.request.pages == self.table[row.slot].pages, "a change was not told"
            # every row reads before any row writes: a step must not lean on its own neighbours
            self._read(row, start, start)
        sampled = [self._run(row, step.width) for row in rows]
        for row, start in zip(rows, starts, strict=True):  # nor may it be hurt by them
            self._read(row, start, self.table[row.slot].length)
        if self.most_behind is not None:
            if not step.is_decode:
                assert all(
                    self.table[s].drafter_len == n for s, n in zip(slots, starts, strict=True)
                )
                self._follow(rows)
            behind = [self.table[slot].length - self.table[slot].drafter_len for slot in slots]
            assert max(behind, default=0) <= (self.most_behind if step.is_decode else 0)
        return sampled

    @property
    def _own_groups(self) -> range:
        """Those of the model."""
        return range(len(self.windows) - (self.most_behind is not None))

    def _follow(self, rows: Sequence[Row]) -> None:
        """The drafter computes what is new, from what it has computed before."""
        group = len(self.windows) - 1
        for row in rows:
            own = self.table[row.slot]
            self._read_group(row, group, own.drafter_len, own.drafter_len)
            _, truth = _alone(row.request.prompt_token_ids, row.request.max_len)
            for position in range(own.drafter_len, own.length):
                self.kv[self._place(row.slot, group, position)] = truth[position]
            own.drafter_len = own.length

    def _apply(self) -> None:
        for kind, slot, *rest in self.staged:
            if kind == "admitted":
                assert slot not in self.table, "the slot still belongs to another"
                self.table[slot] = rest[0]
            elif kind == "pages":
                self._write_pages(self.table[slot].pages[rest[0]], rest[1], rest[2])
            elif kind == "constrained":
                self.table[slot].num_constrained = rest[0]
            else:
                del self.table[slot]
        self.staged.clear()

    def _write_pages(self, table: list[int], first: int, pages: list[int]) -> None:
        if any(pages):
            assert first == len(table) and all(pages)
            table += pages
        else:
            assert all(table[first : first + len(pages)]), "let go twice"
            assert not any(table[:first]), "let go in the middle"
            table[first : first + len(pages)] = pages

    def _place(self, slot: int, group: int, position: int) -> tuple[int, int, int]:
        page = self.table[slot].pages[group][position // self.page_size]
        assert page != 0
        return group, page, position % self.page_size

    def _read(self, row: Row, start: int, end: int) -> None:
        for group in self._own_groups:
            self._read_group(row, group, start, end)

    def _read_group(self, row: Row, group: int, start: int, end: int) -> None:
        _, truth = _alone(row.request.prompt_token_ids, row.request.max_len)
        window = self.windows[group]
        first = 0 if window is None else max(0, start - window + 1)
        places = [self._place(row.slot, group, position) for position in range(first, end)]
        entries = [self.kv.get(place) for place in places]
        assert entries == truth[first:end], f"{row.request.id} reads KV that is not its own"

    def _run(self, row: Row, width: int) -> list[int]:
        """With a width above 1, drafts: some of them are right."""
        own = self.table[row.slot]
        if width == 1:
            return self._compute(row, own, row.count)
        room = row.request.max_len - own.length - 1
        num_tried = min(width, room) if row.request.grammar is None else min(1, room)
        sampled: list[int] = []
        for i in range(num_tried):
            for group in range(len(self.windows)):  # wrong ones are stored too
                self.kv[self._place(row.slot, group, own.length + num_tried - 1 - i)] = -1
        while len(sampled) < num_tried:
            sampled += self._compute(row, own, 1)
            if hash((own.length, sampled[-1])) % 3 == 0:
                break
        return sampled

    def _compute(self, row: Row, own: SlotRow, count: int) -> list[int]:
        _, truth = _alone(row.request.prompt_token_ids, row.request.max_len)
        start = own.length
        entry = truth[start - 1] if start else 0
        for position in range(start, start + count):
            entry = hash((entry, own.tokens[position]))
            for group in self._own_groups:
                self.kv[self._place(row.slot, group, position)] = entry
        own.length += count
        assert row.samples == (own.length >= own.target)
        if row.samples:
            assert len(own.tokens) == own.length
            if row.request.grammar is not None:
                assert own.num_constrained == own.length
            own.tokens.append(_next_token(entry))
        return [_next_token(entry)] if row.samples else [-1]


class World:
    """An engine without a model: plans, launches, and commits late."""

    def __init__(
        self, num_pages: int | Sequence[int], windows: Sequence[int | None] = (None,), **config
    ) -> None:
        self.config = SchedulerConfig(**config)
        self.device = Device(self.config.page_size, windows, self.config.most_behind)
        counts = [num_pages] * len(windows) if isinstance(num_pages, int) else num_pages
        pools = zip(counts, windows, strict=True)
        self.groups = [KvPool(PagePool(count), window) for count, window in pools]
        slots = SlotPool(self.config.max_num_seqs)
        self.scheduler = Scheduler(self.config, slots, self.groups, self.device)
        self.lanes = DpSchedulers([self.scheduler])
        self.pending: deque[tuple[Sequence[Row], list[list[int]]]] = deque()
        self.requests: list[Request] = []
        self.widths = random.Random(len(self.groups))
        self.num_right = 0
        """Drafts that were."""
        self.num_sat_out = 0
        """Chunks that found too few pages of a window."""

    def add(
        self, prompt: list[int], max_tokens: int = 99, stop_ids=(), min_tokens=0, grammar=None
    ) -> Request:
        arrival = len(self.requests)
        request = Request(
            id=f"r{arrival}",
            prompt_token_ids=prompt,
            params=SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens),
            seed=0,
            arrival=arrival,
            stop_ids=frozenset(stop_ids),
            max_len=min(len(prompt) + max_tokens, self.config.max_model_len),
            grammar=grammar,
        )
        self.scheduler.add(request)
        self.requests.append(request)
        return request

    @property
    def alive(self) -> list[Request]:
        return [r for r in self.requests if r.status is not Status.FINISHED]

    def launch(self) -> Step | None:
        oldest = next(iter(self.alive), None)
        can_advance = oldest is not None and oldest.num_known < oldest.max_len
        waits = oldest is not None and (oldest.status is Status.WAITING or oldest.grammar)
        if waits and oldest.num_in_flight:
            can_advance = False  # it waits for the commit of its own sample
        if oldest is not None and oldest.most_known >= oldest.max_len:
            can_advance = False  # its drafts may have been right to the end
        preemptions = {request: request.num_preemptions for request in self.alive}
        step = self.lanes.plan(self.widths.randint(1, 1 + self.config.ahead))
        self.scheduler.check()
        if can_advance:
            assert step is not None
            assert step.rows[0].request is oldest, "the oldest did not advance"
        rows = {row.request for row in step.rows} if step else set()
        for request in self.alive:
            is_chunk = request.status is Status.RUNNING and request.num_computed < request.target
            self.num_sat_out += is_chunk and request not in rows
        if step is not None:
            self._inspect(step)
            for row in step.rows:
                assert row.request.num_preemptions == preemptions[row.request]
            self.pending.append((step.rows, self.device.launch(step)))
        return step

    def _inspect(self, step: Step) -> None:
        assert step.num_tokens <= self.config.max_num_batched_tokens
        arrivals = [row.request.arrival for row in step.rows]
        assert arrivals == sorted(set(arrivals))
        for row in step.rows:
            assert row.request.status is Status.RUNNING
            assert row.count >= 1
            assert row.slot == row.request.slot != 0
            assert row.start + row.count < row.request.max_len
            self._inspect_pages(row)

    def _inspect_pages(self, row: Row) -> None:
        size = self.config.page_size
        for (_, window, _), pages in zip(self.groups, row.request.pages, strict=True):
            num_held = sum(page != 0 for page in pages)
            if window is None:
                assert num_held == len(pages)
            else:  # a window and a chunk, wherever they begin, and drafts of some steps
                more = row.count + 5 * self.config.ahead + (self.config.most_behind or 0)
                assert num_held <= (window - 1 + more - 1 + size - 1) // size + 1

    def commit(self) -> None:
        rows, sampled = self.pending.popleft()
        alive = [row.samples and row.request in self.alive for row in rows]
        expected = [row.request for row, is_alive in zip(rows, alive, strict=True) if is_alive]
        tokens = [new for new, is_alive in zip(sampled, alive, strict=True) if is_alive]
        counts = [len(request.output_token_ids) for request in expected]
        received = self.scheduler.commit(rows, sampled)
        assert [request for request, _ in received] == expected
        for (request, num_new), before, new in zip(received, counts, tokens, strict=True):
            assert request.output_token_ids[before:] == new[:num_new]
            assert num_new == len(new) or request.status is Status.FINISHED
            self.num_right += num_new - 1
        self.scheduler.check()

    def turn(self) -> Step | None:
        """One turn of the engine: plan and launch N + 1, then commit N."""
        step = self.launch()
        if self.pending and (step is None or len(self.pending) > 1):
            self.commit()
        return step

    def drain(self) -> None:
        self.run_out()
        self.verify()

    def run_out(self) -> None:
        for _ in range(5000):
            if not (self.scheduler.has_work or self.pending):
                return
            could_commit = bool(self.pending)
            assert self.turn() is not None or could_commit, "nothing runs and nothing will"
        raise AssertionError("the work does not end")

    def verify(self) -> None:
        for request in self.requests:
            output, reason = _answer(request)
            assert request.status is Status.FINISHED
            assert request.num_in_flight == 0
            if request.finish_reason == "abort":
                assert request.output_token_ids == output[: len(request.output_token_ids)]
            else:
                assert (request.output_token_ids, request.finish_reason) == (output, reason)
        ledger, cache = self.scheduler.ledger, self.scheduler.ledger.cache
        assert self.scheduler.slots.num_free == self.config.max_num_seqs
        assert ledger.num_used == (0,) * len(self.groups)
        assert ledger.num_cached == tuple(len(cache.pages(g)) for g in range(len(self.groups)))
        assert cache.num_pages == sum(ledger.num_cached)
        assert cache.num_pages == 0 or self.config.enable_prefix_caching
        cache.clear()
        assert ledger.num_pages == tuple(group.pool.num_free for group in self.groups)


def _world(**changes) -> World:
    config = {
        "num_pages": 40,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "max_model_len": 24,
        "page_size": 4,
    }
    return World(**{**config, **changes})


def _shape(step: Step | None) -> list[tuple[str, int, int, bool]]:
    return [(r.request.id, r.start, r.count, r.samples) for r in step.rows] if step else []


# -- whole lives, at random ---------------------------------------------------------------------


def _smallest(window: int | None, max_len: int, batch: int, page_size: int) -> int:
    """Pages of the smallest pool that is not refused, with page 0."""
    if window is None:
        return 1 + -(-max_len // page_size)
    return 2 + -(-min(max_len, window - 1 + batch) // page_size)


window = st.integers(1, 9) | st.just(99)


class Traffic(RuleBasedStateMachine):
    @initialize(
        windows=st.just((None,))
        | st.tuples(st.none(), window)
        | st.tuples(window)
        | st.lists(st.none() | window, min_size=2, max_size=3),
        page_size=st.integers(1, 4),
        spare_pages=st.integers(0, 6),
        max_num_seqs=st.integers(1, 4),
        spare_tokens=st.integers(0, 8),
        caching=st.booleans(),
        ahead=st.sampled_from([0, 0, 1, 3]),
        most_behind=st.integers(1, 4),
    )
    def start(
        self, windows, page_size, spare_pages, max_num_seqs, spare_tokens, caching, ahead,
        most_behind,
    ) -> None:  # fmt: skip
        batch = max_num_seqs + spare_tokens
        behind = most_behind if ahead else None
        span = reach(batch, ahead, behind or 0)
        self.world = World(
            num_pages=[_smallest(w, 14, span, page_size) + spare_pages for w in windows],
            windows=windows,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=batch,
            max_model_len=14,
            page_size=page_size,
            enable_prefix_caching=caching,
            ahead=ahead,
            most_behind=behind,
        )

    @rule(
        head=st.sampled_from([[], [1, 2, 3, 4], [1, 2, 3, 4, 1, 2, 3, 4]]),
        tail=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        max_tokens=st.integers(1, 9),
        stop_ids=st.sets(st.integers(0, VOCAB - 1), max_size=1),
        grammar=st.none() | st.builds(Counting, st.integers(1, 9)),
        data=st.data(),
    )
    def add(self, head, tail, max_tokens, stop_ids, grammar, data) -> None:
        min_tokens = data.draw(st.integers(0, min(3, max_tokens)))
        self.world.add(head + tail, max_tokens, stop_ids, min_tokens, grammar)

    @precondition(lambda self: self.world.alive)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        request = self.world.alive[pick % len(self.world.alive)]
        self.world.scheduler.cancel(request)
        self.world.scheduler.cancel(request)  # twice is as good as once
        assert request.finish_reason == "abort"

    @rule(times=st.integers(1, 6))
    def turn(self, times: int) -> None:
        for _ in range(times):
            self.world.turn()

    @precondition(lambda self: len(self.world.pending) < 3)
    @rule()
    def launch(self) -> None:
        self.world.launch()

    @precondition(lambda self: self.world.pending)
    @rule()
    def commit(self) -> None:
        self.world.commit()

    @rule()
    def clear_cache(self) -> None:
        self.world.scheduler.ledger.cache.clear()

    @invariant()
    def books_agree(self) -> None:
        self.world.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestTraffic = Traffic.TestCase
TestTraffic.settings = settings(max_examples=300, stateful_step_count=40, deadline=None)


def _soak(rng: random.Random, caching: bool, windows: Sequence[int | None]) -> World:
    batch, ahead = rng.choice([5, 16]), rng.choice([0, 2])
    behind = rng.choice([1, 3]) if ahead else None
    span = reach(batch, ahead, behind or 0)
    world = _world(
        num_pages=[
            _smallest(window, 24, span, 4) + rng.randint(0, 5 if window is None else 2)
            for window in windows
        ],
        windows=windows,
        max_num_batched_tokens=batch,
        enable_prefix_caching=caching,
        ahead=ahead,
        most_behind=behind,
    )
    while len(world.requests) < 30 or world.scheduler.has_work:
        if len(world.requests) < 30 and rng.random() < 0.4:
            head = [1, 2, 3, 4] * rng.randint(0, 2)
            tail = [rng.randrange(2) for _ in range(rng.randint(1, 5))]
            stop_ids = {rng.randrange(VOCAB)} if rng.random() < 0.3 else ()
            grammar = Counting(rng.randint(1, 20)) if rng.random() < 0.3 else None
            world.add(head + tail, rng.randint(1, 20), stop_ids, rng.randint(0, 1), grammar)
        if world.alive and rng.random() < 0.03:
            world.scheduler.cancel(rng.choice(world.alive))
        world.turn()
    world.drain()
    return world


def test_what_a_drafter_has_not_followed_is_not_found() -> None:
    """A prompt of one token is decoded, which a drafter does not follow."""
    world = _world(page_size=1, windows=(None, None), ahead=1, most_behind=1)
    world.add([1], max_tokens=1)
    assert world.launch().is_decode
    world.commit()
    later = world.add([1, 2, 3], max_tokens=3)
    world.turn()
    assert later.num_cached == 0
    world.run_out()
    again = world.add([1, 2, 3], max_tokens=1)
    world.drain()
    assert again.num_cached == 2


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("windows", [(None,), (None, 6), (6,), (1, None)])
def test_soak_meets_everything(windows, caching: bool) -> None:
    """The same property, with proof that the hard paths were walked."""
    worlds = [_soak(random.Random(seed), caching, windows) for seed in range(25)]
    stats = [world.scheduler.ledger.cache.stats for world in worlds]
    reasons = {request.finish_reason for world in worlds for request in world.requests}
    assert reasons == {"stop", "length", "abort"}
    assert sum(world.num_right for world in worlds) > 400
    assert sum(world.device.num_caught_up for world in worlds) > 200
    assert sum(world.scheduler.num_preemptions for world in worlds) > 50
    assert (sum(world.num_sat_out for world in worlds) > 50) == (6 in windows)
    assert (sum(s.num_hit_tokens for s in stats) > 500) == caching
    assert (sum(s.num_evicted_pages for s in stats) > 100) == caching


@pytest.mark.parametrize("ahead", [0, 2])
def test_lanes_do_not_hurt_each_other(ahead: int) -> None:
    """Uneven ones, and empty ones: every request gets the tokens that it gets alone."""
    rng, num_mixed, num_empty = random.Random(ahead), 0, 0
    for _ in range(12):
        behind = 2 if ahead else None
        worlds = [
            _world(num_pages=14, max_num_batched_tokens=5, ahead=ahead, most_behind=behind)
            for _ in range(3)
        ]
        lanes = DpSchedulers([world.scheduler for world in worlds])
        for turn in range(400):
            world = worlds[rng.choice([0, 0, 0, 1, 1, 2])]
            if turn < 60 and rng.random() < 0.5:
                world.add([rng.randrange(2) for _ in range(rng.randint(1, 9))], rng.randint(1, 12))
            if world.alive and rng.random() < 0.02:
                world.scheduler.cancel(rng.choice(world.alive))
            step = lanes.plan(rng.randint(1, 1 + ahead))
            if step is not None:
                assert step.num_rows == max(len(rows) for rows in step.lanes)
                kinds = {
                    all(row.count == 1 and row.samples for row in rows)
                    for rows in step.lanes if rows
                }  # fmt: skip
                num_mixed += len(kinds) == 2
                num_empty += () in step.lanes
                assert step.width == 1 or kinds == {True}
                assert step.is_decode == (step.width == 1 and kinds == {True})
            for lane, world in enumerate(worlds):
                if step is not None:
                    world.pending.append((step.lanes[lane], world.device.launch(step, lane)))
                if world.pending and (step is None or len(world.pending) > 1):
                    world.commit()
        for world in worlds:
            world.verify()
    assert num_mixed > 50 and num_empty > 50


def test_a_request_goes_where_its_prompt_is_known() -> None:
    worlds = [_world(), _world()]
    lanes = DpSchedulers([world.scheduler for world in worlds])
    texts = [[7] * 200, [8] * 200, [7] * 200, [8] * 200, [9] * 200]
    requests = [
        Request(f"r{i}", text, SamplingParams(), 0, i, frozenset(), 201)
        for i, text in enumerate(texts)
    ]
    for lane in lanes:
        lane.config = replace(lane.config, max_model_len=300)
    for request in requests:
        lanes.add(request)
    first, second, *again, _ = [request.lane for request in requests]
    assert {first, second} == {0, 1} and again == [first, second]
    assert lanes.num_waiting == 5


# -- one rule at a time -------------------------------------------------------------------------


def test_a_lone_request_prefills_then_decodes_ahead_of_its_commits() -> None:
    world = _world()
    request = world.add([1, 2, 3], max_tokens=3)
    step = world.launch()
    assert _shape(step) == [("r0", 0, 3, True)]
    assert not step.is_decode
    assert (request.output_token_ids, request.num_in_flight, request.num_known) == ([], 1, 4)
    assert _shape(world.launch()) == [("r0", 3, 1, True)]
    assert _shape(world.launch()) == [("r0", 4, 1, True)]
    assert world.launch() is None  # all that it may say is in flight
    world.drain()
    assert request.finish_reason == "length"


def test_a_grammar_waits_for_its_own_sample_and_for_no_other() -> None:
    world = _world(max_num_batched_tokens=8)
    world.add([1, 2], max_tokens=9, grammar=Counting(3))
    world.add([1], max_tokens=9)
    rows = [_shape(world.turn()) for _ in range(4)]
    assert rows == [
        [("r0", 0, 2, True), ("r1", 0, 1, True)],
        [("r1", 1, 1, True)],
        [("r0", 2, 1, True), ("r1", 2, 1, True)],
        [("r1", 3, 1, True)],
    ]
    world.drain()


def test_a_long_prompt_is_chunked_behind_the_decodes() -> None:
    world = _world(max_num_batched_tokens=6)
    world.add([1, 2])
    assert _shape(world.turn()) == [("r0", 0, 2, True)]
    world.add([1] * 10)
    world.add([2])
    first, second, third = world.turn(), world.turn(), world.turn()
    assert _shape(first) == [("r0", 2, 1, True), ("r1", 0, 5, False)]
    assert _shape(second) == [("r0", 3, 1, True), ("r1", 5, 5, True)]
    assert _shape(third) == [("r0", 4, 1, True), ("r1", 10, 1, True), ("r2", 0, 1, True)]
    assert not first.is_decode
    assert third.is_decode  # the whole prompt of r2 is one token, which feeds like any other
    assert (first.num_rows, first.num_tokens) == (2, 6)
    world.drain()


def test_one_token_inside_a_prompt_is_not_a_decode() -> None:
    world = _world(max_num_seqs=2, max_num_batched_tokens=2)
    world.add([1])
    world.turn()
    world.add([1, 2, 3])
    step = world.turn()
    assert _shape(step) == [("r0", 1, 1, True), ("r1", 0, 1, False)]
    assert not step.is_decode
    world.drain()


def test_requests_wait_for_a_slot_in_order() -> None:
    world = _world(max_num_seqs=2)
    for _ in range(4):
        world.add([1, 2], max_tokens=2)
    assert [shape[0] for shape in _shape(world.turn())] == ["r0", "r1"]
    assert (world.scheduler.num_running, world.scheduler.num_waiting) == (2, 2)
    world.drain()


def test_the_second_of_two_equal_prompts_shares_only_in_a_later_step() -> None:
    world = _world(max_num_batched_tokens=32)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first, twin = world.add(prompt), world.add(prompt)
    world.turn()
    assert (first.num_cached, twin.num_cached) == (0, 0)
    late = world.add(prompt)
    step = world.turn()
    assert late.num_cached == 4  # of 8, at least one token is computed
    assert _shape(step)[-1] == ("r2", 4, 4, True)
    assert late.pages[0][0] == first.pages[0][0] != twin.pages[0][0]
    world.drain()


def test_an_answer_is_found_by_the_next_turn_of_a_conversation() -> None:
    world = _world()
    first = world.add([1, 2, 3], max_tokens=7)
    world.run_out()
    follow_up = world.add([*first.all_token_ids, 1, 2])
    world.turn()
    assert follow_up.num_cached == 8  # 9 of its 10 tokens were computed: two full pages
    world.drain()


def test_preemption_takes_the_youngest() -> None:
    world = _world(num_pages=8, max_model_len=24, enable_prefix_caching=False)
    old, middle, young = (world.add([n, n, n], max_tokens=14) for n in range(3))
    while not world.scheduler.num_preemptions:
        world.turn()
    assert [r.status for r in (old, middle)] == [Status.RUNNING] * 2
    assert (young.status, young.slot, young.pages) == (Status.WAITING, 0, [])
    world.drain()
    assert old.num_preemptions == 0


def _preempt_youngest(world: World) -> Request:
    while not world.scheduler.num_preemptions:
        world.launch()
        if len(world.pending) > 1 and not world.scheduler.num_preemptions:
            world.commit()
    return next(request for request in world.requests if request.num_preemptions)


def test_a_preempted_request_waits_for_its_sample_in_flight() -> None:
    world = _world(num_pages=7, max_model_len=20, enable_prefix_caching=False)
    old, young = world.add([1, 2, 3], max_tokens=17), world.add([2, 2], max_tokens=17)
    assert _preempt_youngest(world) is young
    assert young.num_in_flight == 1
    num_outputs = len(young.output_token_ids)
    world.scheduler.cancel(old)  # all pages are free now, yet:
    assert world.launch() is None
    while world.pending:
        world.commit()
    assert len(young.output_token_ids) == num_outputs + 1
    assert _shape(world.launch()) == [("r1", 0, young.target, True)]
    assert young.target == 2 + num_outputs + 1
    world.drain()


def test_a_preempted_request_can_finish_while_it_waits() -> None:
    world = _world(num_pages=7, max_model_len=20, enable_prefix_caching=False)
    world.add([1, 2, 3], max_tokens=17)
    young = world.add([2, 2], max_tokens=17)
    _preempt_youngest(world)
    young.max_len = young.num_known  # as if this had been its last token
    while world.pending:
        world.commit()
    assert (young.status, young.finish_reason) == (Status.FINISHED, "length")
    assert world.scheduler.num_waiting == 0
    world.drain()


def test_a_newcomer_leaves_one_page_for_each_who_runs() -> None:
    world = _world(num_pages=7, enable_prefix_caching=False)
    world.add([1, 2], max_tokens=1)
    world.add([1] * 17, max_tokens=1)
    assert [shape[0] for shape in _shape(world.launch())] == ["r0"]  # 5 + 1 spare > 5 free
    world.commit()
    assert [shape[0] for shape in _shape(world.launch())] == ["r1"]
    world.drain()


def test_tokens_after_the_end_are_discarded() -> None:
    world = _world()
    request = world.add([1, 2], stop_ids=range(VOCAB))
    world.launch()
    world.launch()
    world.commit()
    assert (request.finish_reason, request.stop_reason) == ("stop", None)
    assert world.scheduler.slots.num_free == world.config.max_num_seqs
    rows, sampled = world.pending.popleft()
    assert world.scheduler.commit(rows, sampled) == []
    assert len(request.output_token_ids) == 1
    assert request.num_in_flight == 0


def test_a_stop_token_asked_for_is_the_stop_reason() -> None:
    world = _world()
    request = world.add([1, 2], stop_ids=range(VOCAB))
    request.params = SamplingParams(stop_token_ids=list(range(VOCAB)))
    world.drain()
    assert request.stop_reason == request.output_token_ids[-1]


def test_stop_ids_wait_for_min_tokens() -> None:
    world = _world()
    request = world.add([1, 2], max_tokens=9, stop_ids=range(VOCAB), min_tokens=4)
    world.drain()
    assert len(request.output_token_ids) == 4


def test_a_stop_string_ends_a_request_and_outranks_its_length() -> None:
    world = _world()
    ended, full = world.add([1, 2]), world.add([1], max_tokens=1)
    world.turn()
    world.turn()
    assert full.finish_reason == "length"
    world.scheduler.finish(full, "stop", "END")
    world.scheduler.finish(ended, "stop", "END")
    assert (full.finish_reason, full.stop_reason) == ("stop", "END")
    assert (ended.finish_reason, ended.slot, ended.pages) == ("stop", 0, [])
    assert not world.scheduler.has_work
    world.scheduler.check()


def test_cancelling_reaches_a_request_in_every_state() -> None:
    world = _world(max_num_seqs=1)
    running, waiting = world.add([1, 2]), world.add([1, 2])
    world.launch()
    world.scheduler.cancel(waiting)
    world.scheduler.cancel(running)  # its first sample is in flight
    assert not world.scheduler.has_work
    world.commit()
    assert running.output_token_ids == waiting.output_token_ids == []
    world.drain()


def test_what_cannot_be_served_is_refused() -> None:
    with pytest.raises(CapacityError, match="max_model_len=24 needs 6 pages of KV, there are 5"):
        _world(num_pages=6)
    with pytest.raises(CapacityError, match="max_num_batched_tokens=16 needs 6 pages of KV, there"):
        _world(num_pages=[7, 6], windows=[None, 5])
    with pytest.raises(CapacityError, match="there are 6; lower max_num_batched_tokens or"):
        _world(num_pages=7, windows=[99])  # the window is longer than any request
    with pytest.raises(ConfigError, match="max_num_batched_tokens=3"):
        _world(max_num_batched_tokens=3)
    with pytest.raises(ConfigError, match="page_size=0"):
        _world(page_size=0)
    world = _world()
    for prompt in ([], [1] * 24, [1] * 30):
        with pytest.raises(RequestError, match="does not fit max_model_len=24"):
            world.add(prompt)
    first = world.add([1])
    with pytest.raises(RequestError, match="r0: this id is in use"):
        world.scheduler.add(first)
    world.scheduler.cancel(first)
    with pytest.raises(RequestError, match="arrival 0 is not after 0"):
        world.scheduler.add(first)


def test_a_single_request_fits_the_smallest_pool() -> None:
    world = _world(num_pages=7)
    request = world.add([1, 2, 3])
    world.add([1, 2, 3])
    world.drain()
    assert len(request.all_token_ids) == 24


@pytest.mark.parametrize("windows", [(None,), (None, 12)])
def test_a_prompt_that_waits_for_pages_is_not_looked_up_again(
    windows, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hundred pages of it are found, and the last ones evicted while it waits."""
    world = _world(
        windows=windows, num_pages=161, max_num_seqs=2, max_num_batched_tokens=600,
        max_model_len=600,
    )  # fmt: skip
    world.add([1] * 400, max_tokens=1)
    world.run_out()
    running = world.add([2] * 200, max_tokens=80)
    world.turn()
    ledger, num_keys = world.scheduler.ledger, [0]
    admit, make_keys = ledger.admit, ledger.cache._keys

    def counted_admit(*args, **more) -> bool:
        num_keys.append(0)
        return admit(*args, **more)

    def counted_keys(*args):
        for key in make_keys(*args):
            num_keys[-1] += 1
            yield key

    monkeypatch.setattr(ledger, "admit", counted_admit)
    monkeypatch.setattr(ledger.cache, "_keys", counted_keys)
    waiting = world.add([1] * 400 + [3] * 120, max_tokens=1)
    while running.status is Status.RUNNING:
        world.turn()
        assert waiting.status is Status.WAITING
    _, first, *later = num_keys
    assert first == 101  # the last one is not found
    assert len(later) > 60 and sum(later[:-1]) == 0  # the last one counts what its leaving offers
    assert ledger.cache.stats.num_evicted_pages > 5
    world.turn()
    assert 0 < waiting.num_cached < 400
    world.drain()


# -- windows ------------------------------------------------------------------------------------


def _held(request: Request, group: int) -> list[int]:
    """Indices of the pages it owns."""
    return [i for i, page in enumerate(request.pages[group]) if page]


def test_a_window_lets_go_of_the_pages_it_has_passed() -> None:
    world = _world(windows=[None, 6])
    request = world.add([1, 2], max_tokens=20)
    held = {}
    while world.turn() is not None:
        start = request.num_computed - 1
        held[start] = _held(request, 1)
        assert _held(request, 0) == list(range(start // 4 + 1))
    # the next page is when the window is looked at: it reads from start - 5
    assert held[7] == [0, 1]
    assert held[8] == held[11] == [0, 1, 2]
    assert held[12] == held[15] == [1, 2, 3]
    assert held[16] == [2, 3, 4]
    world.drain()


def test_a_window_is_paged_chunk_by_chunk() -> None:
    world = _world(windows=[None, 3], max_num_batched_tokens=9, num_pages=[40, 5])
    request = world.add([1] * 22, max_tokens=2)
    held = []
    while world.turn() is not None:
        held.append((request.num_computed, len(request.pages[0]), _held(request, 1)))
    assert held == [(9, 6, [0, 1, 2]), (18, 6, [1, 2, 3, 4]), (22, 6, [4, 5]), (23, 6, [5])]
    world.drain()


def test_after_its_prompt_a_request_keeps_a_window() -> None:
    world = _world(windows=[5], max_num_batched_tokens=24, max_model_len=40)
    request = world.add([1] * 18, max_tokens=9)
    world.turn()
    assert _held(request, 0) == [0, 1, 2, 3, 4]
    world.turn()  # the fifth page has room, yet the first three are not kept until it is full
    assert _held(request, 0) == [3, 4]
    world.drain()


def test_a_chunk_without_pages_sits_out_and_nobody_passes_it() -> None:
    world = _world(windows=[8], num_pages=8, max_model_len=40, enable_prefix_caching=False)
    world.add([1] * 14, max_tokens=3)
    chunked, last = world.add([2] * 30, max_tokens=2), world.add([3], max_tokens=2)
    assert _shape(world.turn()) == [("r0", 0, 14, True), ("r1", 0, 2, False)]
    # three pages are free: one would do for the last and two to spare, the chunk needs four
    assert _shape(world.turn()) == [("r0", 14, 1, True)]
    assert world.scheduler.ledger.num_available == (3,)
    assert (chunked.status, last.status) == (Status.RUNNING, Status.WAITING)
    assert _shape(world.turn()) == [("r0", 15, 1, True)]
    while chunked.num_computed == 2:
        world.turn()
    assert (chunked.num_computed, chunked.num_preemptions) == (18, 0)
    world.drain()


def test_a_prompt_is_found_at_every_page_after_its_window_has_passed() -> None:
    world = _world(windows=[None, 6], max_num_batched_tokens=32, max_model_len=40)
    world.add([1] * 17, max_tokens=12)
    world.run_out()
    for num_same, num_cached in [(6, 4), (11, 8), (17, 16)]:
        branch = world.add([1] * num_same + [3] * 4, max_tokens=1)
        world.turn()
        assert branch.num_cached == num_cached
        world.run_out()
    world.drain()


def test_a_prefix_is_found_only_where_its_window_is() -> None:
    world = _world(windows=[None, 6], max_num_batched_tokens=32, max_model_len=40)
    first = world.add([1] * 17, max_tokens=12)
    world.run_out()
    cache = world.scheduler.ledger.cache
    assert cache.num_evictable(0) == cache.num_evictable(1) == 7
    cache.evict(1, 5)  # the window of the whole conversation is the youngest
    follow_up = world.add([*first.all_token_ids, 3], max_tokens=1)
    world.turn()
    assert follow_up.num_cached == 28
    world.run_out()
    branch = world.add([1] * 17 + [3], max_tokens=1)
    world.turn()
    assert branch.num_cached == 0
    world.run_out()
    again = world.add([1] * 17 + [4], max_tokens=1)  # the branch has filled what was missing
    world.turn()
    assert again.num_cached == 16
    world.drain()


def test_both_halves_of_a_hybrid_can_run_out_first() -> None:
    """The whole group preempts as ever; so does the window, when rows grow into theirs."""
    for num_pages in ([8, 40], [40, 10]):
        world = _world(
            windows=[None, 12], num_pages=num_pages, max_num_batched_tokens=16,
            enable_prefix_caching=False,
        )  # fmt: skip
        old = world.add([0, 0, 0], max_tokens=14)
        for n in range(1, 4):
            world.add([n, n, n], max_tokens=14)
        world.drain()
        assert world.scheduler.num_preemptions > 0
        assert old.num_preemptions == 0


def test_a_failed_step_leaves_no_page_behind() -> None:
    world = _world(windows=[None, 3], max_num_batched_tokens=8)
    world.add([1] * 20)
    world.launch()
    world.launch()
    world.scheduler.abandon()
    ledger = world.scheduler.ledger
    assert (ledger.num_used, ledger.num_cached) == ((0, 0), (0, 0))
    while world.pending:
        world.commit()
    world.drain()


def _share_a_page_to_be_written(world: World) -> None:
    (pool, *_), *_ = world.groups
    (old,), (young,) = (request.pages for request in world.requests)
    pool.release(young[-1])
    young[-1] = old[-1]
    pool.share(old[-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda world: setattr(world.requests[0], "slot", world.requests[1].slot),
        lambda world: world.scheduler.slots.take(),
        lambda world: world.requests[0].pages[0].pop(),
        lambda world: world.groups[0].pool.share(world.requests[0].pages[0][0]),
        lambda world: setattr(world.requests[0], "num_paged", 4),
        lambda world: setattr(world.requests[0], "num_paged", 99),
        lambda world: setattr(world.requests[0], "num_computed", 23),
        lambda world: setattr(world.requests[0], "target", 23),
        lambda world: setattr(world.requests[0], "arrival", 23),
        lambda world: setattr(world.requests[0], "status", Status.WAITING),
        lambda world: world.scheduler._waiting.update(r1=world.scheduler._running.pop("r1")),
        _share_a_page_to_be_written,
    ],
)
def test_check_finds_damage(damage) -> None:
    world = _world()
    world.add([1, 2, 3, 4, 5])
    world.add([2, 2])
    world.turn()
    world.scheduler.check()
    damage(world)
    with pytest.raises(PoolError):
        world.scheduler.check()
