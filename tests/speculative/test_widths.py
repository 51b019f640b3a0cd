"""Tests of the width policy of verify steps, in simulated worlds with known acceptance rates."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slotzero.errors import ConfigError
from slotzero.speculative.widths import (
    FIRST_TRIAL_STEPS,
    MEMORY,
    PATIENCE,
    SHARE,
    TRIAL_STEPS,
    Acceptance,
    FixedWidth,
    SpeculationStats,
    WidthPolicy,
)

WIDTHS = (1, 3, 5)
LATE = 2  # steps until results are learned, as the engine has steps in flight

rates = st.floats(0, 1)
drafts = st.integers(0, 4).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n)))
seeds = st.integers(0, 1 << 32)


@dataclass
class World:
    rates: list[float]  # acceptance rate at each position
    cost: Callable[[int, int], float]
    num_rows: int = 1

    def expected(self, width: int) -> float:
        tokens = chance = 1.0
        for rate in self.rates[: width - 1]:
            chance *= rate
            tokens += chance
        return tokens

    def speed(self, width: int) -> float:
        return self.expected(width) / self.cost(width, self.num_rows)

    def accepted(self, width: int, rng: random.Random) -> int:
        n = 0
        while n < width - 1 and rng.random() < self.rates[n]:
            n += 1
        return n


@st.composite
def worlds(draw: st.DrawFn, rates: st.SearchStrategy[float] = rates, dearest: float = 0.6) -> World:
    """Draw a world; `dearest` limits the cost of each draft, relative to a step."""
    once, each = draw(st.floats(0, 0.5)), draw(st.floats(0, dearest))
    return World(
        draw(
            st.one_of(rates.map(lambda rate: [rate] * 4), st.lists(rates, min_size=4, max_size=4))
        ),
        lambda width, num_rows: 1 + once * (width > 1) + each * (width - 1),
        draw(st.integers(1, 4)),
    )


@dataclass
class Run:
    """A policy in a world, which the test may change between two calls."""

    policy: WidthPolicy
    rng: random.Random
    chosen: list[int] = field(default_factory=list)
    settled: list[int] = field(default_factory=list)
    tokens: float = 0.0
    seconds: float = 0.0
    lost: float = 0.0  # seconds that trials cost if none of their drafts is accepted
    unlearned: list[list[tuple[int, int]]] = field(default_factory=list)

    def go(self, world: World, num_steps: int) -> "Run":
        for _ in range(num_steps):
            width = self.policy.choose(world.num_rows)
            self.chosen.append(width)
            self.settled.append(self.policy.width)
            cost = world.cost(width, world.num_rows)
            self.tokens += world.expected(width)
            self.seconds += cost
            self.lost += cost - world.cost(self.policy.width, world.num_rows)
            step = [(width - 1, world.accepted(width, self.rng)) for _ in range(world.num_rows)]
            self.unlearned.append(step)
            if len(self.unlearned) > LATE:
                for row in self.unlearned.pop(0):
                    self.policy.learn(*row)
        return self

    @property
    def speed(self) -> float:
        return self.tokens / self.seconds


def run(world: World, num_steps: int, seed: int) -> Run:
    return Run(WidthPolicy(WIDTHS, WIDTHS[-1] - 1, world.cost), random.Random(seed)).go(
        world, num_steps
    )


# Acceptance


@given(rows=st.lists(drafts, max_size=60), prior=rates, num_known=st.integers(0, 4))
def test_expected_tokens_grow_with_the_width_and_the_prior(
    rows: list[tuple[int, int]], prior: float, num_known: int
) -> None:
    acceptance = Acceptance(4, prior)
    for row in rows:
        acceptance.learn(*row)
    tokens = [acceptance.expected(width) for width in range(1, 6)]
    assert tokens[0] == 1
    assert all(a <= b for a, b in pairwise(tokens))
    for width, expected in enumerate(tokens, 1):
        assert expected <= acceptance.expected(width, num_known) <= width
        assert acceptance.expected(width, 4) == expected
        assert acceptance.expected(width, 0) == width


@given(prior=rates)
def test_a_position_never_seen_has_the_prior(prior: float) -> None:
    acceptance = Acceptance(3, prior)
    assert acceptance.expected(4) == pytest.approx(1 + prior + prior**2 + prior**3)
    for _ in range(20 * MEMORY):
        acceptance.learn(2, 1)  # there is no third draft, and the second is rejected
    assert acceptance.expected(2) == pytest.approx(2)
    assert acceptance.expected(3) == pytest.approx(acceptance.expected(4)) == pytest.approx(2)
    assert acceptance.expected(4, 1) == pytest.approx(4)


@settings(deadline=None, max_examples=25)
@given(truth=st.lists(rates, min_size=4, max_size=4), prior=rates, seed=seeds)
def test_the_estimate_converges(truth: list[float], prior: float, seed: int) -> None:
    acceptance, world, rng = Acceptance(4, prior), World(truth, lambda *_: 1.0), random.Random(seed)
    seen = []
    for i in range(8 * MEMORY):
        acceptance.learn(4, world.accepted(5, rng))
        if i >= 4 * MEMORY:
            seen.append(acceptance.expected(3))
    assert sum(seen) / len(seen) == pytest.approx(world.expected(3), abs=0.2)


@given(rate=rates, num_old=st.integers(0, 2000))
def test_new_results_soon_outweigh_doubtful_ones(rate: float, num_old: int) -> None:
    acceptance = Acceptance(2, rate)
    for _ in range(num_old):
        acceptance.learn(2, 0)
    acceptance.doubt(0)
    for _ in range(TRIAL_STEPS):
        acceptance.learn(2, 2)
    assert acceptance.expected(2) > 1.6


@pytest.mark.parametrize("row", [(1, 2), (3, 0), (2, -1)])
def test_impossible_counts_are_refused(row: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="drafts"):
        Acceptance(2).learn(*row)


# Choice of the width


@settings(deadline=None, max_examples=30)
@given(world=worlds(), seed=seeds)
def test_the_best_width_is_found(world: World, seed: int) -> None:
    *_, second, best = sorted(WIDTHS, key=world.speed)
    assume(world.speed(best) > 1.15 * world.speed(second))
    found = run(world, 2500, seed).settled[1500:]
    assert found.count(best) > 0.9 * len(found)


@settings(deadline=None, max_examples=30)
@given(world=worlds(), seed=seeds)
def test_little_is_lost_if_speculation_never_pays(world: World, seed: int) -> None:
    assume(max(world.speed(3), world.speed(5)) <= 1)
    assert run(world, 6000, seed).speed >= 0.97 * world.speed(1)


@settings(deadline=None, max_examples=30)
@given(world=worlds(st.floats(0.5, 1), dearest=0.2), seed=seeds)
def test_most_of_the_gain_is_reached_if_speculation_pays(world: World, seed: int) -> None:
    """It must pay clearly: near the margin, a few unlucky trials of 8 steps decide for a long
    time."""
    best = max(map(world.speed, WIDTHS))
    assume(best > 1.3)
    assert run(world, 4000, seed).speed >= 0.95 * best


@settings(deadline=None, max_examples=20)
@given(truth=st.lists(rates, min_size=4, max_size=4), num_rows=st.integers(1, 4), seed=seeds)
def test_the_width_does_not_flap_if_all_widths_are_equally_good(
    truth: list[float], num_rows: int, seed: int
) -> None:
    world = World(truth, lambda width, num_rows: world.expected(width), num_rows)
    settled = run(world, 4000, seed).settled
    assert sum(a != b for a, b in pairwise(settled)) <= 40


@settings(deadline=None, max_examples=20)
@given(world=worlds(), seed=seeds)
def test_trials_are_paid_in_advance(world: World, seed: int) -> None:
    world.rates = [0.0] * 4
    assume(world.cost(3, 1) > 1.1)  # otherwise no width settles
    ran = run(world, 3000, seed)
    price = world.cost(5, world.num_rows) - world.cost(1, world.num_rows)
    assert ran.lost <= (FIRST_TRIAL_STEPS + TRIAL_STEPS) * price + SHARE * ran.seconds


def crowded(width: int, num_rows: int) -> float:
    """Return the cost of a step on a device that is idle with few rows and busy with many."""
    return max(1.0, 0.05 * width * num_rows) + 0.1 * (width - 1)


@given(num_rows=st.integers(20, 1000))
def test_a_width_that_cannot_pay_is_not_tried(num_rows: int) -> None:
    """On a busy device three tokens take three times as long as one, and drafting adds to that."""
    policy = WidthPolicy(WIDTHS, WIDTHS[-1] - 1, crowded)
    chosen = [policy.choose(num_rows) for _ in range(FIRST_TRIAL_STEPS + 200)]
    assert set(chosen[FIRST_TRIAL_STEPS:]) == {1}


@settings(deadline=None, max_examples=10)
@given(seed=seeds)
def test_the_width_follows_the_load(seed: int) -> None:
    idle, busy = World([0.8] * 4, crowded, 1), World([0.8] * 4, crowded, 64)
    ran = run(idle, 300, seed)
    for _ in range(3):
        assert ran.policy.width == 5
        assert ran.go(busy, PATIENCE).policy.width == 1
        ran.go(busy, 500)
        assert ran.policy.width == 1
        assert ran.go(idle, PATIENCE).policy.width == 5
        ran.go(idle, 500)


@settings(deadline=None, max_examples=10)
@given(seed=seeds)
def test_a_short_burst_is_ignored(seed: int) -> None:
    idle, busy = World([0.8] * 4, crowded, 1), World([0.8] * 4, crowded, 64)
    ran = run(idle, 300, seed)
    for _ in range(20):
        ran.go(busy, PATIENCE - 1).go(idle, 1)
    assert set(ran.settled[200:]) == {5}


@settings(deadline=None, max_examples=10)
@given(seed=seeds)
def test_drafts_that_become_good_are_noticed(seed: int) -> None:
    bad, good = World([0.0] * 4, crowded), World([0.9] * 4, crowded)
    ran = run(bad, 2000, seed)
    assert ran.policy.width == 1
    assert ran.go(good, 2500).policy.width == 5
    assert ran.go(bad, 1000).policy.width == 1


@given(width=st.integers(1, 9), rows=st.lists(drafts, max_size=9), num_rows=st.integers(1, 300))
def test_a_fixed_width(width: int, rows: list[tuple[int, int]], num_rows: int) -> None:
    fixed = FixedWidth(width)
    for row in rows:
        fixed.learn(*row)
    assert (fixed.choose(num_rows),) == fixed.widths == (width,)


def test_a_single_width_is_always_chosen() -> None:
    policy = WidthPolicy([4], 3, crowded)
    assert {policy.choose(n) for n in range(1, 300)} == {4}


@pytest.mark.parametrize("widths", [(), (0, 1), (-1,), (3, 1), (2, 2)])
def test_widths_that_do_not_ascend_are_refused(widths: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        WidthPolicy(widths, 4, crowded)


def test_a_fixed_width_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError):
        FixedWidth(0)


# Statistics


@given(rows=st.lists(drafts, max_size=40), widths=st.lists(st.sampled_from(WIDTHS), max_size=20))
def test_stats_recount(rows: list[tuple[int, int]], widths: list[int]) -> None:
    stats = SpeculationStats(4)
    for row in rows:
        stats.add(*row)
    for width in widths:
        stats.add_step(width)
    drafted = [row for row in rows if row[0]]
    assert stats.num_drafts == len(drafted)
    assert stats.num_draft_tokens == sum(n for n, _ in rows)
    assert stats.num_accepted_tokens == sum(stats.accepted_per_pos) == sum(k for _, k in rows)
    assert len(stats.accepted_per_pos) == max((n for n, _ in rows), default=0)
    for i, n in enumerate(stats.accepted_per_pos):
        assert n == sum(k > i for _, k in rows)
    emitted = [1 + k for _, k in drafted]
    mean = sum(emitted) / len(emitted) if emitted else 1
    assert stats.mean_accepted_length == pytest.approx(mean)
    assert stats.num_steps_by_width == Counter(widths)
    assert stats.width == (widths[-1] if widths else 1)
