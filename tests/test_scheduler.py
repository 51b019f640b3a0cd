"""The scheduler against a simulated device, and the device against a run without any batching.

The device below obeys table writes and steps and nothing else. Its KV is a chain of hashes: the
entry of a position depends on every token up to it, so a page that was shared, freed, reused or
recomputed wrongly cannot read like the right one. The next token is taken from the last entry. So
if each request gets the tokens that it gets alone, no decision of the scheduler changed an answer.
"""

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from slotzero.errors import CapacityError, ConfigError, PoolError, RequestError
from slotzero.pools.pages import PagePool
from slotzero.pools.slots import SlotPool
from slotzero.request import Request, Status
from slotzero.sampling.params import SamplingParams
from slotzero.scheduler.scheduler import Scheduler, SchedulerConfig
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

    def advance(self, token: int) -> bool:
        self.num_taken += 1
        return True

    def can_go_on(self, banned: frozenset[int]) -> bool:
        return self.num_taken < self.num_tokens


@dataclass
class SlotRow:
    tokens: list[int]
    length: int
    target: int
    pages: list[int]
    num_constrained: int = -1
    """How many tokens were known when it was last said what may follow them."""


@dataclass
class Device:
    """Tables and KV as the device sees them. Writes wait until the next step, as staged ones do."""

    page_size: int
    staged: list[tuple] = field(default_factory=list)
    table: dict[int, SlotRow] = field(default_factory=dict)
    kv: dict[tuple[int, int], int] = field(default_factory=dict)

    def admitted(self, request: Request, tokens, num_computed: int, pages) -> None:
        row = SlotRow(tokens, num_computed, request.target, pages)
        self.staged.append(("admitted", request.slot, row))

    def pages_added(self, request: Request, first_index: int, pages) -> None:
        assert pages
        self.staged.append(("pages", request.slot, first_index, pages))

    def constrained(self, request: Request) -> None:
        assert request.grammar.num_taken == len(request.output_token_ids)
        self.staged.append(("constrained", request.slot, request.num_tokens))

    def released(self, slot: int) -> None:
        self.staged.append(("released", slot))

    def launch(self, step: Step) -> list[int]:
        self._apply()
        slots = [row.slot for row in step.rows]
        assert len(set(slots)) == len(slots)
        # every row reads before any row writes: a step must not lean on its own neighbours
        contexts = [self._read(row) for row in step.rows]
        return [self._run(row, last) for row, last in zip(step.rows, contexts, strict=True)]

    def _apply(self) -> None:
        for kind, slot, *rest in self.staged:
            if kind == "admitted":
                assert slot not in self.table, "the slot still belongs to another"
                self.table[slot] = rest[0]
            elif kind == "pages":
                assert rest[0] == len(self.table[slot].pages)
                self.table[slot].pages += rest[1]
            elif kind == "constrained":
                self.table[slot].num_constrained = rest[0]
            else:
                del self.table[slot]
        self.staged.clear()

    def _place(self, slot: int, position: int) -> tuple[int, int]:
        page = self.table[slot].pages[position // self.page_size]
        assert page != 0
        return page, position % self.page_size

    def _read(self, row: Row) -> int:
        assert row.start == self.table[row.slot].length
        _, truth = _alone(row.request.prompt_token_ids, row.request.max_len)
        entries = [self.kv.get(self._place(row.slot, i)) for i in range(row.start)]
        assert entries == truth[: row.start], f"{row.request.id} reads KV that is not its own"
        return entries[-1] if entries else 0

    def _run(self, row: Row, entry: int) -> int:
        own = self.table[row.slot]
        for position in range(row.start, row.start + row.count):
            entry = hash((entry, own.tokens[position]))
            self.kv[self._place(row.slot, position)] = entry
        own.length += row.count
        assert row.samples == (own.length >= own.target)
        if row.samples:
            assert len(own.tokens) == own.length
            if row.request.grammar is not None:
                assert own.num_constrained == own.length
            own.tokens.append(_next_token(entry))
        return _next_token(entry) if row.samples else -1


class World:
    """An engine without a model: plans, launches, and commits late."""

    def __init__(self, num_pages: int, **config) -> None:
        self.config = SchedulerConfig(**config)
        self.device = Device(self.config.page_size)
        self.pages = PagePool(num_pages)
        slots = SlotPool(self.config.max_num_seqs)
        self.scheduler = Scheduler(self.config, slots, self.pages, self.device)
        self.pending: deque[tuple[Step, list[int]]] = deque()
        self.requests: list[Request] = []

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
        preemptions = {request: request.num_preemptions for request in self.alive}
        step = self.scheduler.plan()
        self.scheduler.check()
        if can_advance:
            assert step is not None
            assert step.rows[0].request is oldest, "the oldest did not advance"
        if step is not None:
            self._inspect(step)
            for row in step.rows:
                assert row.request.num_preemptions == preemptions[row.request]
            self.pending.append((step, self.device.launch(step)))
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

    def commit(self) -> None:
        step, sampled = self.pending.popleft()
        expected = [row.request for row in step.rows if row.samples and row.request in self.alive]
        counts = [len(request.output_token_ids) for request in expected]
        assert self.scheduler.commit(step, sampled) == expected
        assert [len(r.output_token_ids) for r in expected] == [n + 1 for n in counts]
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
        cache = self.scheduler.ledger.cache
        assert self.scheduler.slots.num_free == self.config.max_num_seqs
        assert self.pages.num_free + cache.num_pages == self.pages.max_free
        assert cache.num_evictable == cache.num_pages
        assert cache.num_pages == 0 or self.config.enable_prefix_caching
        cache.clear()
        assert self.pages.num_free == self.pages.max_free


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


class Traffic(RuleBasedStateMachine):
    @initialize(
        page_size=st.integers(1, 4),
        spare_pages=st.integers(0, 6),
        max_num_seqs=st.integers(1, 4),
        spare_tokens=st.integers(0, 8),
        caching=st.booleans(),
    )
    def start(self, page_size, spare_pages, max_num_seqs, spare_tokens, caching) -> None:
        self.world = World(
            num_pages=1 + -(-14 // page_size) + spare_pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + spare_tokens,
            max_model_len=14,
            page_size=page_size,
            enable_prefix_caching=caching,
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
TestTraffic.settings = settings(max_examples=400, stateful_step_count=40, deadline=None)


def _soak(rng: random.Random, caching: bool) -> World:
    world = _world(num_pages=rng.randint(7, 12), enable_prefix_caching=caching)
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


@pytest.mark.parametrize("caching", [True, False])
def test_soak_meets_everything(caching: bool) -> None:
    """The same property, with proof that the hard paths were walked."""
    worlds = [_soak(random.Random(seed), caching) for seed in range(25)]
    stats = [world.scheduler.ledger.cache.stats for world in worlds]
    reasons = {request.finish_reason for world in worlds for request in world.requests}
    assert reasons == {"stop", "length", "abort"}
    assert sum(world.scheduler.num_preemptions for world in worlds) > 50
    assert (sum(s.num_hit_tokens for s in stats) > 500) == caching
    assert (sum(s.num_evicted_pages for s in stats) > 100) == caching


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
    assert late.pages[0] == first.pages[0] != twin.pages[0]
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
    step, sampled = world.pending.popleft()
    assert world.scheduler.commit(step, sampled) == []
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


def _share_a_page_to_be_written(world: World) -> None:
    old, young = world.requests
    world.pages.release(young.pages[-1])
    young.pages[-1] = old.pages[-1]
    world.pages.share(old.pages[-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda world: setattr(world.requests[0], "slot", world.requests[1].slot),
        lambda world: world.scheduler.slots.take(),
        lambda world: world.requests[0].pages.pop(),
        lambda world: world.pages.share(world.requests[0].pages[0]),
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
