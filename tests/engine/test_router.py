"""Tests of the router: bounded memory, only ready engines, even load, and prefix affinity."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slotzero.engine import router
from slotzero.engine.router import CHUNK, CROWD, Prefixes, RouteLoad, Router, chunk_keys

IDLE = RouteLoad(life=0, running=0, waiting=0, slots=16)


def prompt_of(*chunks: int, rest: int = 0) -> list[int]:
    """Return a prompt of whole chunks, each of one repeated token, and `rest` more tokens."""
    return [chunk for chunk in chunks for _ in range(CHUNK)] + [7] * rest


def test_a_key_covers_a_whole_chunk_and_all_before_it() -> None:
    assert chunk_keys(prompt_of(rest=CHUNK - 1)) == []
    keys = chunk_keys(prompt_of(1, 2, 3, rest=5))
    assert len(set(keys)) == 3
    assert chunk_keys(prompt_of(1, 2, 9))[:2] == keys[:2]
    assert not set(chunk_keys(prompt_of(9, 2, 3))) & set(keys)
    assert len(chunk_keys([1] * 10**6)) == router.MAX_PROMPT_CHUNKS


def test_a_conversation_stays_where_it_began() -> None:
    made = Router(3)
    idle = dict.fromkeys(range(3), IDLE)
    homes = {talk: made.choose(prompt_of(talk), idle) for talk in (1, 2, 3)}
    assert sorted(homes.values()) == [0, 1, 2]
    for length in range(2, 6):
        for talk, home in homes.items():
            assert made.choose(prompt_of(talk, *range(100, 100 + length)), idle) == home


def test_the_engine_with_the_longest_prefix_is_preferred() -> None:
    made = Router(2)
    assert made.choose(prompt_of(1, 2), {0: IDLE}) == 0
    assert made.choose(prompt_of(1, 2, 3, 4), {1: IDLE}) == 1
    both = {0: IDLE, 1: IDLE}
    assert made.choose(prompt_of(1, 2, 3, 5), both) == 1
    assert made.choose(prompt_of(6), both) == 0, (
        "no engine knows the prefix: take the least recently chosen"
    )


def test_a_crowded_engine_is_avoided() -> None:
    made = Router(2)
    made.choose(prompt_of(1), {0: IDLE})
    for load, chosen in (
        (RouteLoad(0, CROWD, 0, 64), 0),
        (RouteLoad(0, CROWD + 1, 0, 64), 1),  # more than twice the other's load of 0, plus 16
        (RouteLoad(0, 0, CROWD // 4 + 1, 64), 1),  # a waiting request counts as four running ones
        (RouteLoad(0, 4, 0, 4), 1),  # no free slot
    ):
        fresh = Router(2)
        fresh.choose(prompt_of(1), {0: IDLE})
        assert fresh.choose(prompt_of(1), {0: load, 1: IDLE}) == chosen
    # if all engines are full, free slots do not matter
    full = {0: RouteLoad(0, 4, 1, 4), 1: RouteLoad(0, 4, 0, 4)}
    assert made.choose(prompt_of(1), full) == 0


def test_the_next_best_engine_with_room_is_chosen() -> None:
    made = Router(3)
    made.choose(prompt_of(1, 2), {0: IDLE})
    made.choose(prompt_of(1), {1: IDLE})
    loads = {0: RouteLoad(0, 60, 0, 64), 1: RouteLoad(0, 3, 0, 64), 2: IDLE}
    assert made.choose(prompt_of(1, 2), loads) == 1


def test_the_prefixes_of_a_dead_process_are_forgotten() -> None:
    made = Router(2)
    made.choose(prompt_of(1), {0: IDLE})
    reborn = {0: IDLE._replace(life=1), 1: IDLE}
    assert made.choose(prompt_of(1), reborn) == 1


def test_the_beginning_of_a_prompt_is_forgotten_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "MAX_CHUNKS", 4)
    known = Prefixes()
    first, second = chunk_keys(prompt_of(1, 2, 3)), chunk_keys(prompt_of(7, 8))
    known.remember(first)
    known.remember(second)
    assert (known.num_known(first), known.num_known(second)) == (2, 2)


CHUNKS = st.lists(st.integers(0, 3), max_size=6)


@st.composite
def fleets(draw: st.DrawFn) -> dict[int, RouteLoad]:
    """Draw the loads of those of three engines that are ready."""
    ready = draw(st.sets(st.integers(0, 2), min_size=1))
    count = st.integers(0, 40)
    return {i: RouteLoad(draw(st.integers(0, 1)), draw(count), draw(count), 16) for i in ready}


@settings(max_examples=100)
@given(st.lists(st.tuples(CHUNKS, fleets()), max_size=30), st.integers(1, 8))
def test_the_router_is_bounded_and_chooses_only_ready_uncrowded_engines(
    turns: list[tuple[list[int], dict[int, RouteLoad]]], most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(router, "MAX_CHUNKS", most)
        made = Router(3)
        for chunks, loads in turns:
            chosen = made.choose(prompt_of(*chunks), loads)
            assert chosen in loads
            assert not any(loads[chosen].is_crowded(load) for load in _least(loads))
            assert all(len(prefixes) <= most for prefixes in made.prefixes)


def _least(loads: dict[int, RouteLoad]) -> list[RouteLoad]:
    return [min(loads.values(), key=lambda load: (load.is_full, load.score))]


@given(st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_load_is_even_without_shared_prefixes(size: int, num: int, are_kept: bool) -> None:
    """This holds whether requests keep running or end before the next one arrives."""
    made, counts = Router(size), Counter[int]()
    for i in range(num):
        loads = {r: IDLE._replace(running=counts[r] if are_kept else 0) for r in range(size)}
        counts[made.choose(prompt_of(1000 + i), loads)] += 1
    assert max(counts.values()) - min(counts[r] for r in range(size)) <= 1


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_conversations_with_shared_prefixes_stay_on_one_engine(talks: list[int]) -> None:
    """Each conversation stays on one engine, in whatever order the conversations alternate."""
    made, homes = Router(3), dict[int, int]()
    for turn, talk in enumerate(talks):
        chosen = made.choose(prompt_of(talk, 500 + turn), dict.fromkeys(range(3), IDLE))
        assert homes.setdefault(talk, chosen) == chosen


@given(st.lists(st.integers(0, 2), min_size=1, max_size=200))
def test_one_shared_prefix_spreads_when_an_engine_is_crowded(talks: list[int]) -> None:
    """All requests keep running and share a prefix: no engine gets more than the crowd limit."""
    made, counts = Router(3), Counter[int]()
    for talk in talks:
        loads = {r: RouteLoad(0, counts[r], 0, 1000) for r in range(3)}
        counts[made.choose(prompt_of(9, talk), loads)] += 1
    least = min(counts[r] for r in range(3))
    assert max(counts.values()) <= 2 * least + CROWD + 1
