"""Tests of the whole engine: thousands of requests, cancellation, seeds, overlapped steps, mixes.

On a CPU a step is committed at once. Tests that use the fixture `overlaps` also run in the order
used on a GPU, where the engine launches a step before it commits the previous one.
"""

import gc
import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from engines import (
    EOS,
    PAGE,
    Ask,
    answer_all,
    answer_alone,
    check_nothing_leaked,
    drain,
    greedy,
    make,
    prompt_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import RequestError
from slotzero.executor.results import Results
from slotzero.executor.worker import Worker
from slotzero.request import RequestStatus
from slotzero.sampling.params import SamplingParams
from slotzero.step import Step

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reference() -> Engine:
    """Start the reference engine, which runs one request at a time with plenty of memory."""
    return make(max_num_seqs=1, enable_prefix_caching=False)


class Launches:
    """Records the rows that an engine launches; `sampled[request id]` counts tokens, kept or
    not."""

    def __init__(self, engine: Engine) -> None:
        self.sampled: Counter[str] = Counter()
        self.batches: list[int] = []
        run = engine.worker.run

        def counted(step: Step) -> Results:
            self.sampled.update(row.request.id for row in step.rows if row.samples)
            self.batches.append(step.num_rows)
            return run(step)

        engine.worker.run = counted  # type: ignore[method-assign]


# Many requests


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def random_ask(rng: random.Random) -> Ask:
    shared = prompt_of(32, seed=rng.randrange(3))[: rng.choice([0, 16, 32])]
    prompt = shared + [rng.randrange(256) for _ in range(rng.randint(1, 20))]
    max_tokens = rng.randint(1, 12)
    params = SamplingParams(
        temperature=rng.choice([0, 0.5, 1, 2]),
        top_k=rng.choice([0, 1, 40]),
        top_p=rng.choice([1, 0.9, 0.1]),
        min_p=rng.choice([0, 0.05]),
        repetition_penalty=rng.choice([1, 1.3]),
        presence_penalty=rng.choice([0, 0.5]),
        frequency_penalty=rng.choice([0, -0.5]),
        logit_bias=rng.choice([{}, {EOS: 4.0}, {EOS: 100.0}, {7: -100.0}]),
        seed=rng.getrandbits(62),
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens),
        stop_token_ids=rng.choice([[], [3, 4, 5], list(range(16))]),
        ignore_eos=rng.random() < 0.3,
        logprobs=rng.choice([None, None, 0, 5]),
    )
    return prompt, params


class Crowd:
    """Sends requests through one engine, about fifty at once, and cancels some of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rng = random.Random(11)
        self.num_added = self.num_cancelled = 0
        self.alive: dict[str, RequestHandle] = {}
        self.ends: Counter[str | None] = Counter()
        self.kept: list[tuple[Ask, list[int]]] = []  # a few, to be repeated alone

    def grow_to(self, total: int) -> None:
        for _ in range(20 * total):
            if self.num_added == total and not self.engine.has_work:
                return
            while self.num_added < total and len(self.alive) < 50 and self.rng.random() < 0.95:
                self.alive[f"{self.num_added}"] = self.engine.add(
                    f"{self.num_added}", *random_ask(self.rng)
                )
                self.num_added += 1
            if self.alive and self.rng.random() < 0.15:
                self._cancel(self.rng.choice(list(self.alive)))
            for answer in self.engine.step():
                if answer.finished:
                    self._close(answer)
        raise AssertionError(f"{len(self.alive)} requests did not end")

    def _cancel(self, request_id: str) -> None:
        answer = self.alive.pop(request_id)
        self.engine.cancel(request_id)
        assert answer.finish_reason == "abort"
        self.num_cancelled += 1

    def _close(self, answer: RequestHandle) -> None:
        request = answer.request
        assert self.alive.pop(request.id) is answer
        self.ends[answer.finish_reason] += 1
        wanted = request.params
        assert wanted.min_tokens <= len(answer.token_ids) <= wanted.max_tokens
        assert len(answer.logprobs) == (0 if wanted.logprobs is None else len(answer.token_ids))
        ended = answer.token_ids[-1] in request.stop_ids
        assert answer.finish_reason == ("stop" if ended else "length")
        if len(self.kept) < 60 and self.rng.random() < 0.05:
            self.kept.append(((request.prompt_token_ids, wanted), list(answer.token_ids)))


def test_two_thousand_requests_leave_nothing_behind(
    reference: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Worker, "overlaps", True)  # the order in which more can go wrong
    engine = make(
        max_num_seqs=16, max_num_batched_tokens=100, max_model_len=64, page_size=2,
        kv_cache_memory=100 * PAGE // 8,
    )  # fmt: skip
    crowd = Crowd(engine)
    sizes = []
    for total in (500, 2000):
        crowd.grow_to(total)
        check_nothing_leaked(engine)
        sizes.append((resident_bytes(), num_tensors()))
    assert crowd.num_cancelled > 50
    assert sum(crowd.ends.values()) + crowd.num_cancelled == crowd.num_added == 2000
    assert crowd.ends["stop"] > 100
    assert crowd.ends["length"] > 100
    assert engine.schedulers.num_preemptions > 3
    assert engine.schedulers[0].ledger.cache.stats.num_hit_tokens > 1000
    (early_bytes, early_tensors), (late_bytes, late_tensors) = sizes
    assert late_bytes - early_bytes < 8 << 20
    assert abs(late_tensors - early_tensors) <= 8
    assert len(crowd.kept) > 20
    for (prompt, params), tokens in crowd.kept:
        assert answer_alone(reference, prompt, params) == tokens


# Cancelling


def state_of(answer: RequestHandle) -> str:
    request = answer.request
    if request.status is not RequestStatus.RUNNING:
        return request.status.name
    if request.num_computed < request.target:
        return "PREFILLING"
    return "IN FLIGHT" if request.num_in_flight else "DECODING"


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
def test_cancelling_at_any_moment_disturbs_no_other_request(
    reference: Engine, overlaps: bool, victim: int
) -> None:
    engine = make(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=80)
    asks = [(prompt_of(n, seed=9), greedy(6)) for n in (20, 50, 37, 3)]
    expected = [answer_alone(reference, *ask) for ask in asks]
    seen = set()
    for moment in range(20):
        answers = [engine.add(f"{i}", *ask) for i, ask in enumerate(asks)]
        for _ in range(moment):
            engine.step()
        cancelled = answers[victim]
        seen.add(state_of(cancelled))
        had = list(cancelled.token_ids)
        was_finished = cancelled.finished
        engine.cancel(f"{victim}")
        engine.check()
        engine.cancel(f"{victim}")  # a second time has no effect
        assert cancelled.finish_reason == ("length" if was_finished else "abort")
        assert cancelled not in drain(engine)
        assert cancelled.token_ids == had == expected[victim][: len(had)]
        assert cancelled.request.num_in_flight == 0
        for i, answer in enumerate(answers):
            if i != victim:
                assert (answer.token_ids, answer.finish_reason) == (expected[i], "length")
    assert seen >= {"WAITING", "IN FLIGHT" if overlaps else "DECODING", "FINISHED"}
    assert ("PREFILLING" in seen) == (victim != 3)  # three tokens are one chunk


def test_cancelling_an_unknown_or_finished_request_has_no_effect(reference: Engine) -> None:
    engine = make(max_num_seqs=2)
    engine.cancel("nobody")
    answer = engine.add("a", prompt_of(5), greedy(3))
    engine.cancel("A")
    drain(engine)
    engine.cancel("a")
    assert answer.finish_reason == "length"
    assert answer.token_ids == answer_alone(reference, prompt_of(5), greedy(3))


@pytest.mark.usefixtures("overlaps")
def test_an_id_can_be_reused_while_the_cancelled_step_is_in_flight(reference: Engine) -> None:
    engine = make(max_num_seqs=1)
    for num_steps in range(6):
        old = engine.add("same", prompt_of(9), greedy(8, logprobs=1))
        for _ in range(num_steps):
            engine.step()
        engine.cancel("same")
        new = engine.add("same", prompt_of(20), greedy(5, logprobs=1))
        drain(engine)
        assert old.finish_reason == "abort"
        assert new.token_ids == answer_alone(reference, prompt_of(20), greedy(5))
        assert len(new.logprobs) == 5


def test_an_id_in_use_is_refused_and_its_owner_continues(reference: Engine) -> None:
    engine = make(max_num_seqs=2)
    first = engine.add("same", prompt_of(9), greedy(8))
    engine.step()
    with pytest.raises(RequestError, match="request same: this id is in use"):
        engine.add("same", prompt_of(4), greedy(8))
    drain(engine)
    assert first.token_ids == answer_alone(reference, prompt_of(9), greedy(8))


@pytest.mark.usefixtures("overlaps")
def test_cancelling_everything_empties_the_engine(reference: Engine) -> None:
    engine = make(max_num_seqs=2, max_num_batched_tokens=8)
    for i in range(5):
        engine.add(f"{i}", prompt_of(20 + i), greedy())
    for _ in range(4):
        engine.step()
    for i in range(5):
        engine.cancel(f"{i}")
    assert drain(engine) == []
    assert engine.step() == []
    tokens = answer_alone(engine, prompt_of(20), greedy())
    assert tokens == answer_alone(reference, prompt_of(20), greedy())


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("failing", range(8))
def test_a_failed_step_ends_only_its_own_rows(
    reference: Engine, failing: int, has_run: bool
) -> None:
    """Two requests run and two wait; the device fails once, before or after it computes the
    step."""
    engine = make(max_num_seqs=2, max_num_batched_tokens=16, max_model_len=64)
    asks = [(prompt_of(n, seed=4), greedy(5)) for n in (20, 9, 33, 4)]
    expected = [answer_alone(reference, *ask) for ask in asks]
    answers = [engine.add(f"{i}", *ask) for i, ask in enumerate(asks)]
    run, calls, lost = engine.worker.run, iter(range(1000)), []

    def fragile(step: Step) -> Results:
        if next(calls) != failing:
            return run(step)
        lost.extend(row.request for row in step.rows)
        if has_run:
            run(step)
        raise MemoryError("the device")

    engine.worker.run = fragile  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="the device"):
        drain(engine)
    engine.check()
    drain(engine)
    assert lost
    for answer, tokens in zip(answers, expected, strict=True):
        if answer.request in lost:
            assert answer.finish_reason == "abort"
            assert answer.token_ids == tokens[: len(answer.token_ids)]
        else:
            assert (answer.finish_reason, answer.token_ids) == ("length", tokens)
    for i, ask in enumerate(asks):  # the prefix cache kept nothing wrong
        assert answer_alone(engine, *ask) == expected[i]


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("place", ["prepare", "put"])
def test_a_slot_forgets_its_last_owner_even_if_a_step_fails(
    reference: Engine, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """The step that fails is the one that resets the slot."""
    engine = make(max_num_seqs=1, max_model_len=64)
    worker = engine.worker
    strange = greedy(5, logit_bias={42: 100.0, 9: 2.0}, stop_token_ids=[3, 4], top_k=5)
    before = engine.add("strange", prompt_of(9), strange)
    while engine.has_work:
        engine.step()
    assert before.token_ids == [42] * 5
    engine.add("lost", prompt_of(20), greedy(5))

    def fragile(*_: object) -> None:
        raise MemoryError("the device")

    with monkeypatch.context() as patch:
        patch.setattr(worker.tables if place == "put" else worker.prefills[0], place, fragile)
        with pytest.raises(MemoryError, match="the device"):
            engine.step()
    ask = prompt_of(11), greedy(5)
    assert answer_alone(engine, *ask) == answer_alone(reference, *ask)


@pytest.mark.usefixtures("overlaps")
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_failed_planning_leaves_no_request_waiting(reference: Engine, failing: int) -> None:
    """One row cannot be written; all requests planned beside it end, complete or aborted."""
    engine = make(max_num_seqs=2, max_model_len=64)
    asks = [(prompt_of(n, seed=4), greedy(5)) for n in (20, 9, 33)]
    answers = [engine.add(f"{i}", *ask) for i, ask in enumerate(asks)]
    admitted, calls = engine.worker.writers[0].admitted, iter(range(1000))

    def fragile(*args: object) -> None:
        if next(calls) == failing:
            raise TypeError("no such row")
        admitted(*args)

    engine.worker.writers[0].admitted = fragile  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="no such row"):
        drain(engine)
    drain(engine)
    for answer, ask in zip(answers, asks, strict=True):
        assert answer.finish_reason in ("abort", "length")
        if answer.finish_reason == "length":
            assert answer.token_ids == answer_alone(reference, *ask)


# Seeds

SEEDED = SamplingParams(
    temperature=0.9, top_k=100, top_p=0.97, seed=1234, max_tokens=24, ignore_eos=True
)
PROMPT = prompt_of(40, seed=11)


@pytest.fixture(scope="module")
def seeded_tokens(reference: Engine) -> list[int]:
    tokens = answer_alone(reference, PROMPT, SEEDED)
    assert tokens != answer_alone(reference, PROMPT, replace(SEEDED, temperature=0))
    return tokens


def neighbours(count: int) -> list[Ask]:
    lengths = [3, 30, 17, 44, 8, 21]
    return [
        (prompt_of(lengths[i], seed=i), replace(SEEDED, seed=i, max_tokens=6 + 5 * i))
        for i in range(count)
    ]


def among(engine: Engine, asks: list[Ask], place: int) -> RequestHandle:
    return answer_all(engine, [*asks[:place], (PROMPT, SEEDED), *asks[place:]])[place]


def alone_again(backend: str) -> list[int]:
    engine = make(backend=backend, max_num_seqs=1, lazy_recording=True)
    tokens = answer_alone(engine, PROMPT, SEEDED)
    assert answer_alone(engine, PROMPT, SEEDED) == tokens
    return tokens


def among_others(backend: str) -> list[int]:
    return among(make(backend=backend, max_num_seqs=4), neighbours(3), 1).token_ids


def in_another_order(backend: str) -> list[int]:
    engine = make(backend=backend, max_num_seqs=4)
    orders = [among(engine, neighbours(6)[::-1], place).token_ids for place in (0, 3, 6)]
    assert orders[0] == orders[1] == orders[2]
    return orders[0]


def in_another_bucket(backend: str) -> list[int]:
    engine = make(backend=backend, max_num_seqs=7, lazy_recording=True)
    launches = Launches(engine)
    answer = among(engine, neighbours(6), 6)
    assert max(launches.batches) == 7
    return answer.token_ids


def prefilled_in_chunks(backend: str) -> list[int]:
    engine = make(backend=backend, max_num_seqs=4, max_num_batched_tokens=7)
    return among(engine, neighbours(2), 2).token_ids


def preempted(backend: str, **more: bool) -> list[int]:
    """Return the tokens of a request that is preempted: with six pages in all, an older request
    takes its third page when this one has four."""
    engine = make(
        backend=backend, max_num_seqs=2, max_model_len=80, kv_cache_memory=7 * PAGE, **more
    )
    answer = among(engine, [(prompt_of(20), replace(SEEDED, max_tokens=50))], 1)
    assert answer.request.num_preemptions > 0
    assert (answer.request.num_cached > 0) == engine.limits.enable_prefix_caching
    assert answer.request.num_found == 0  # it found only pages that it had stored itself
    return answer.token_ids


def preempted_and_computed_again(backend: str) -> list[int]:
    return preempted(backend, enable_prefix_caching=False)


def with_a_cached_prefix(backend: str) -> list[int]:
    engine = make(backend=backend, max_num_seqs=4)
    answer_alone(engine, [*PROMPT[:33], 1, 2, 3], greedy(4))
    answer = among(engine, neighbours(2), 2)
    assert answer.request.num_cached == answer.request.num_found == 32
    return answer.token_ids


@pytest.mark.parametrize("backend", ["eager", "cpu"])
@pytest.mark.parametrize(
    "how",
    [
        alone_again,
        among_others,
        in_another_order,
        in_another_bucket,
        prefilled_in_chunks,
        preempted,
        preempted_and_computed_again,
        with_a_cached_prefix,
    ],
)
def test_a_seed_gives_the_same_tokens(
    seeded_tokens: list[int], how: Callable[[str], list[int]], backend: str
) -> None:
    assert how(backend) == seeded_tokens


def test_other_seeds_give_other_tokens(reference: Engine) -> None:
    """Seeds include the ends of the range, and words that differ only in their low or high half."""
    seeds = [0, 1, -1, 2**32, 2**32 + 1, 2**62, 2**63 - 1, -(2**63)]
    tokens = {
        seed: tuple(answer_alone(reference, PROMPT, replace(SEEDED, seed=seed))) for seed in seeds
    }
    assert len(set(tokens.values())) == len(seeds)
    for seed in seeds:
        assert tuple(answer_alone(reference, PROMPT, replace(SEEDED, seed=seed))) == tokens[seed]


def test_without_a_seed_the_engine_draws_one() -> None:
    """Two equal requests differ; engines with equal seeds agree, and with different seeds do
    not."""
    asks = [(PROMPT, replace(SEEDED, seed=None))] * 2
    runs = {}
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        answers = answer_all(make(max_num_seqs=2, seed=seed), asks)
        runs[name] = [answer.token_ids for answer in answers]
    assert runs["one"] == runs["same"]
    assert len({tuple(tokens) for tokens in runs["one"] + runs["other"]}) == 4


def test_two_engines_without_a_seed_draw_different_tokens() -> None:
    asks = [(PROMPT, replace(SEEDED, seed=None))] * 2
    tokens = [
        tuple(answer.token_ids)
        for _ in range(2)
        for answer in answer_all(make(max_num_seqs=2), asks)
    ]
    assert len(set(tokens)) == 4


def test_dummy_weights_are_the_same_without_a_seed() -> None:
    """Ranks, engines and runs each build them separately."""
    config = EngineConfig(model="tiny:llama", load_format="dummy", show_progress=False)
    without, zero, one = (
        answer_alone(Engine(replace(config, seed=seed)), PROMPT, greedy(8)) for seed in (None, 0, 1)
    )
    assert without == zero != one


def test_stop_strings_without_an_output_text_are_refused() -> None:
    with pytest.raises(RequestError, match="stop strings need an OutputText"):
        make().add("a", PROMPT, SamplingParams(stop="x"))


def test_a_commit_that_fails_midway_ends_the_answers_before_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first answer has its last token but was not returned yet: it must not be lost."""
    engine, heard = make(max_num_seqs=2), []
    answers = [engine.add(f"{i}", PROMPT, greedy(3 + i)) for i in range(2)]
    for answer in answers:
        answer.listener = heard.append
    extend = engine._extend_output

    def fail(answer: RequestHandle, num_new: int) -> int:
        if answer is answers[1] and answers[0].finished:
            raise MemoryError("no room")
        return extend(answer, num_new)

    monkeypatch.setattr(engine, "_extend_output", fail)
    with pytest.raises(MemoryError):
        while True:
            engine.step()
    assert all(isinstance(answer.error, MemoryError) for answer in answers)
    assert {*heard[-2:]} == {*answers}
    assert not engine.has_work


# Steps in order, and one step in flight


@pytest.mark.usefixtures("overlaps")
def test_no_step_is_wasted_on_an_answer_of_known_length(reference: Engine) -> None:
    whole = answer_alone(reference, PROMPT, greedy(20))
    engine = make(max_num_seqs=1, enable_prefix_caching=False)
    launches = Launches(engine)
    for max_tokens in range(1, 21):
        launches.sampled.clear()
        before = engine.num_steps
        (answer,) = answer_all(engine, [(PROMPT, greedy(max_tokens))])
        assert answer.token_ids == whole[:max_tokens]
        assert answer.finish_reason == "length"
        assert engine.num_steps - before == launches.sampled["0"] == max_tokens


def test_a_token_is_returned_by_the_call_that_computed_it_unless_steps_overlap(
    overlaps: bool,
) -> None:
    engine = make(max_num_seqs=1)
    answer = engine.add("a", prompt_of(5), greedy(4))
    grown = []
    while engine.has_work:
        grown.append(len(engine.step()))
    assert grown == ([0, 1, 1, 1, 1] if overlaps else [1, 1, 1, 1])
    assert answer.finished
    assert engine.num_steps == 4


@pytest.mark.parametrize("index", [0, 1, 7, 18, 19])
def test_a_token_after_the_end_is_computed_only_in_overlapped_steps(
    reference: Engine, monkeypatch: pytest.MonkeyPatch, overlaps: bool, index: int
) -> None:
    """End-of-sequence comes at every place of the answer; at the last one, the reason is "stop"."""
    whole = answer_alone(reference, PROMPT, greedy(20))
    assert len(set(whole)) == len(whole)
    engine = make(max_num_seqs=1)
    monkeypatch.setattr(engine.request_factory, "eos_token_ids", (whole[index],))
    launches = Launches(engine)
    (answer,) = answer_all(engine, [(PROMPT, greedy(20, ignore_eos=False))])
    assert answer.token_ids == whole[: index + 1]
    assert (answer.finish_reason, answer.request.stop_reason) == ("stop", None)
    assert launches.sampled["0"] == min(index + 1 + overlaps, 20)
    assert answer.request.num_in_flight == 0


def test_at_most_one_token_per_request_is_wasted(
    reference: Engine, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    asks = [(prompt_of(5 + 3 * i, seed=i), greedy(4 + i)) for i in range(12)]
    whole = [answer_alone(reference, *ask) for ask in asks]
    ends = tuple(whole[i][i // 2] for i in range(0, 12, 2))
    engine = make(max_num_seqs=5, max_num_batched_tokens=24)
    monkeypatch.setattr(engine.request_factory, "eos_token_ids", ends)
    launches = Launches(engine)
    asks = [(prompt, replace(params, ignore_eos=False)) for prompt, params in asks]
    answers = answer_all(engine, asks)
    for answer, tokens in zip(answers, whole, strict=True):
        end = next((i for i, token in enumerate(tokens) if token in ends), None)
        expected = tokens if end is None else tokens[: end + 1]
        assert answer.token_ids == expected
        assert answer.finish_reason == ("length" if end is None else "stop")
        wasted = launches.sampled[answer.request.id] - len(expected)
        assert wasted == (overlaps and len(expected) < len(tokens))
    assert {answer.finish_reason for answer in answers} == {"stop", "length"}


@pytest.mark.usefixtures("overlaps")
def test_the_next_turn_finds_no_discarded_tokens(
    reference: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache holds what was computed; a prompt that continues after the end finds no stale
    KV."""
    whole = answer_alone(reference, PROMPT, greedy(20))
    engine = make(max_num_seqs=1, page_size=4)
    monkeypatch.setattr(engine.request_factory, "eos_token_ids", (whole[10],))
    answer_alone(engine, PROMPT, greedy(20, ignore_eos=False))
    monkeypatch.undo()
    for tail in ([1, 2, 3, 4, 5], whole[11:15]):
        turn = PROMPT + whole[:11] + tail
        (answer,) = answer_all(engine, [(turn, greedy(8))])
        assert answer.token_ids == answer_alone(reference, turn, greedy(8))
        assert answer.request.num_cached >= 48


def test_stop_ids_end_the_answer_and_are_the_stop_reason(reference: Engine) -> None:
    whole = answer_alone(reference, PROMPT, greedy(20))
    engine = make(max_num_seqs=1)
    params = greedy(20, stop_token_ids=[whole[9], whole[4], 0])
    (answer,) = answer_all(engine, [(PROMPT, params)])
    assert answer.token_ids == whole[:5]
    assert (answer.finish_reason, answer.request.stop_reason) == ("stop", whole[4])


def test_ignore_eos_continues_but_stop_ids_still_apply(
    reference: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = answer_alone(reference, PROMPT, greedy(20))
    engine = make(max_num_seqs=1)
    monkeypatch.setattr(engine.request_factory, "eos_token_ids", (whole[3],))
    assert answer_alone(engine, PROMPT, greedy(20)) == whole
    assert answer_alone(engine, PROMPT, greedy(20, stop_token_ids=[whole[6]])) == whole[:7]


@pytest.mark.parametrize("kind", ["eos", "stop ids"])
@pytest.mark.parametrize("min_tokens", [0, 1, 4, 5, 6, 12])
def test_min_tokens_bans_the_end_until_then(
    oracles, monkeypatch: pytest.MonkeyPatch, min_tokens: int, kind: str
) -> None:
    """The reference is a plain loop over transformers' logits."""
    oracle = oracles("llama")
    prompt = [token % oracle.vocab_size for token in PROMPT]
    end = oracle.generate(prompt, 5)[0][4]
    expected: list[int] = []
    while len(expected) < 12 and end not in expected:
        logits = oracle.generate(prompt + expected, 1)[1][0]
        if len(expected) < min_tokens:
            logits[end] = -torch.inf
        expected.append(int(logits.argmax()))
    engine = make(model=oracle.path, max_num_seqs=1)
    monkeypatch.setattr(engine.request_factory, "eos_token_ids", (end,) if kind == "eos" else ())
    stop_ids = [end] if kind == "stop ids" else []
    params = greedy(12, ignore_eos=False, min_tokens=min_tokens, stop_token_ids=stop_ids)
    assert answer_alone(engine, prompt, params) == expected
    assert (end in expected[:5]) == (min_tokens < 5)


def test_the_context_is_filled_to_its_last_token(reference: Engine) -> None:
    engine = make(max_num_seqs=3, max_model_len=50)
    prompts = [prompt_of(n) for n in (49, 47, 10)]
    asks = list(zip(prompts, [greedy(9), greedy(9), greedy(None)], strict=True))
    answers = answer_all(engine, asks)
    assert [len(answer.token_ids) for answer in answers] == [1, 3, 40]
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.finish_reason == "length"
        assert answer.token_ids == answer_alone(reference, prompt, greedy(len(answer.token_ids)))


# Mixes

ASKS = st.lists(
    st.tuples(
        st.integers(1, 60),  # length of the prompt
        st.integers(0, 2),  # which of three texts it starts with
        st.integers(1, 14),  # max_tokens
        st.sampled_from(
            [
                {},
                {"repetition_penalty": 1.4},
                {"presence_penalty": 1.5, "frequency_penalty": 0.5},
                {"logit_bias": {10: 3.0, 20: -50.0}},
                {"stop_token_ids": list(range(0, 256, 16)), "min_tokens": 1},
                {"logprobs": 3},
                {"temperature": 1.0, "top_k": 1, "seed": 3},
            ]
        ),
        st.integers(0, 6),  # steps before it arrives
    ),
    min_size=1,
    max_size=8,
)


@pytest.fixture(scope="module", params=[False, True], ids=["in order", "overlapped"])
def tight(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """Start an engine with small limits, which causes chunks, preemption, waiting and cache
    hits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Worker, "overlaps", request.param)
        yield make(
            max_num_seqs=3, max_num_batched_tokens=20, max_model_len=80, kv_cache_memory=9 * PAGE
        )


@settings(max_examples=30, deadline=None)
@given(asks=ASKS)
def test_any_mix_equals_one_by_one(reference: Engine, tight: Engine, asks: list[tuple]) -> None:
    answers = []
    for i, (length, text, max_tokens, more, wait) in enumerate(asks):
        for _ in range(wait):
            tight.step()
        params = greedy(max_tokens, **{"ignore_eos": False, **more, "min_tokens": 0})
        if "min_tokens" in more:
            params = replace(params, min_tokens=min(max_tokens, 2))
        answers.append(tight.add(f"{i}", prompt_of(60, seed=text)[:length], params))
    drain(tight)
    for answer in answers:
        request = answer.request
        expected = answer_alone(reference, request.prompt_token_ids, request.params)
        assert answer.token_ids == expected
        assert answer.finished
