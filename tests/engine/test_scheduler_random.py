"""Property tests of the scheduler: in random traffic, a request gets the tokens it gets alone."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from simulated_device import VOCAB, Counting, World, make_world

from slotzero.engine.dp_schedulers import DpSchedulers
from slotzero.pools.pages import reach


def _smallest(window: int | None, max_len: int, batch: int, page_size: int) -> int:
    """Return the pages of the smallest pool that is accepted, including page 0."""
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
        has_priorities=st.booleans(),
    )
    def start(
        self, windows, page_size, spare_pages, max_num_seqs, spare_tokens, caching, ahead,
        most_behind, has_priorities,
    ) -> None:  # fmt: skip
        self.has_priorities = has_priorities
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
        priority = data.draw(st.integers(-1, 1)) if self.has_priorities else 0
        self.world.add(head + tail, max_tokens, stop_ids, min_tokens, grammar, priority)

    @precondition(lambda self: self.world.alive)
    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        request = self.world.alive[pick % len(self.world.alive)]
        self.world.scheduler.cancel(request)
        self.world.scheduler.cancel(request)  # a second time has no effect
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


def _soak(
    rng: random.Random, caching: bool, windows: Sequence[int | None], priorities: Sequence[int]
) -> World:
    batch, ahead = rng.choice([5, 16]), rng.choice([0, 2])
    behind = rng.choice([1, 3]) if ahead else None
    span = reach(batch, ahead, behind or 0)
    world = make_world(
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
            most, least = rng.randint(1, 20), rng.randint(0, 1)
            priority = priorities[len(world.requests) % len(priorities)]
            world.add(head + tail, most, stop_ids, least, grammar, priority)
        if world.alive and rng.random() < 0.03:
            world.scheduler.cancel(rng.choice(world.alive))
        world.turn()
    world.drain()
    return world


@pytest.mark.parametrize(  # every pair of values occurs
    ("windows", "caching", "priorities"),
    [
        ((None,), True, (0,)),
        ((None,), False, (-1, 0, 3)),
        ((None, 6), True, (-1, 0, 3)),
        ((None, 6), False, (0,)),
        ((6,), True, (0,)),
        ((6,), False, (-1, 0, 3)),
        ((1, None), True, (-1, 0, 3)),
        ((1, None), False, (0,)),
    ],
)
def test_long_random_traffic_reaches_every_hard_path(windows, caching: bool, priorities) -> None:
    """The same property holds, and the test asserts that the hard paths were taken."""
    worlds = [_soak(random.Random(seed), caching, windows, priorities) for seed in range(25)]
    stats = [world.scheduler.ledger.cache.stats for world in worlds]
    reasons = {request.finish_reason for world in worlds for request in world.requests}
    assert reasons == {"stop", "length", "abort"}
    assert sum(world.num_right for world in worlds) > 400
    assert sum(world.device.num_caught_up for world in worlds) > 200
    assert sum(world.scheduler.num_preemptions for world in worlds) > 40
    num_by_priority = sum(world.num_preempted_by_priority for world in worlds)
    assert (num_by_priority > 5) == (len(priorities) > 1)
    assert (sum(world.num_sat_out for world in worlds) > 50) == (6 in windows)
    assert (sum(s.num_hit_tokens for s in stats) > 500) == caching
    assert (sum(s.num_evicted_pages for s in stats) > 100) == caching


@pytest.mark.parametrize("ahead", [0, 2])
def test_dp_ranks_do_not_affect_each_other(ahead: int) -> None:
    """With uneven and empty ranks, every request gets the tokens that it gets alone."""
    rng, num_mixed, num_empty = random.Random(ahead), 0, 0
    for _ in range(12):
        behind = 2 if ahead else None
        worlds = [
            make_world(num_pages=14, max_num_batched_tokens=5, ahead=ahead, most_behind=behind)
            for _ in range(3)
        ]
        schedulers = DpSchedulers([world.scheduler for world in worlds])
        for turn in range(400):
            world = worlds[rng.choice([0, 0, 0, 1, 1, 2])]
            if turn < 60 and rng.random() < 0.5:
                world.add([rng.randrange(2) for _ in range(rng.randint(1, 9))], rng.randint(1, 12))
            if world.alive and rng.random() < 0.02:
                world.scheduler.cancel(rng.choice(world.alive))
            step = schedulers.plan(rng.randint(1, 1 + ahead))
            if step is not None:
                assert step.num_rows == max(len(rows) for rows in step.rows_by_dp_rank)
                kinds = {
                    all(row.count == 1 and row.samples for row in rows)
                    for rows in step.rows_by_dp_rank if rows
                }  # fmt: skip
                num_mixed += len(kinds) == 2
                num_empty += () in step.rows_by_dp_rank
                assert step.width == 1 or kinds == {True}
                assert step.is_decode == (step.width == 1 and kinds == {True})
            for dp_rank, world in enumerate(worlds):
                if step is not None:
                    world.pending.append(
                        (step.rows_by_dp_rank[dp_rank], world.device.launch(step, dp_rank))
                    )
                if world.pending and (step is None or len(world.pending) > 1):
                    world.commit()
        for world in worlds:
            world.verify()
    assert num_mixed > 50 and num_empty > 50
