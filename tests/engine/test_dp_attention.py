"""Tests of DP attention through the engine: every request gets the answer of a single rank.

This holds whatever happens on the other DP ranks.
"""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import RequestError
from slotzero.sampling.params import SamplingParams

pytestmark = pytest.mark.slow

SETTINGS = {
    "model": "tiny:llama", "backend": "eager", "max_num_seqs": 3, "max_model_len": 96,
    "max_num_batched_tokens": 24, "show_progress": False,
}  # fmt: skip
Ask = tuple[list[int], SamplingParams]


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine(EngineConfig(**SETTINGS))


@pytest.fixture(scope="module")
def dp_engine() -> Iterator[Engine]:
    """Start an engine with DP attention, and fewer pages than three long requests need."""
    more = {"tensor_parallel_size": 2, "enable_dp_attention": True}
    # adaptive speculation depends on timing
    more |= {"speculative": "eagle3", "speculative_adaptive": False}
    page = Engine(EngineConfig(**SETTINGS)).worker.kv["full"]
    size = page["bytes"] // page["pages"]
    engine = Engine(EngineConfig(**SETTINGS, **more, kv_cache_memory=14 * size))
    yield engine
    engine.rank_group.close()


def asks_of(rng: random.Random, num: int) -> list[Ask]:
    common = [rng.randrange(250) for _ in range(40)]
    asks = []
    for _ in range(num):
        prompt = [rng.randrange(250) for _ in range(rng.choice([1, 2, 5, 20, 40]))]
        if rng.random() < 0.4:
            prompt = common[: rng.randrange(17, 40)] + prompt[:8]
        kind: dict[str, Any] = (
            {"structured_outputs": {"regex": "[a-f]{2,20}x"}}
            if rng.random() < 0.25
            else {"ignore_eos": True}
        )
        if rng.random() < 0.5:
            kind["logprobs"] = rng.choice([0, 1, 3])
        asks.append(
            (prompt, SamplingParams(temperature=0, max_tokens=rng.randrange(1, 40), **kind))
        )
    return asks


def drain(engine: Engine) -> None:
    while engine.has_work:
        engine.step()
        engine.check()


def test_random_traffic(alone: Engine, dp_engine: Engine) -> None:
    """Requests have grammars, log probabilities, common prefixes and drafts; some are cancelled or
    preempted."""
    rng = random.Random(5)
    asks, right, answers, cancelled = asks_of(rng, 40), [], list[RequestHandle](), set[int]()
    for i, ask in enumerate(asks):
        right.append(alone.add(f"{i}", *ask))
        drain(alone)
    while len(answers) < len(asks) or dp_engine.has_work:
        if len(answers) < len(asks) and rng.random() < 0.5:
            answers.append(dp_engine.add(f"{len(answers)}", *asks[len(answers)]))
        if answers and rng.random() < 0.03:
            i = rng.randrange(len(answers))
            if not answers[i].finished:
                dp_engine.cancel(f"{i}")
                cancelled.add(i)
        dp_engine.step()
        dp_engine.check()
    assert {answer.request.dp_rank for answer in answers} == {0, 1}
    assert cancelled and dp_engine.schedulers.num_preemptions > 0
    assert all(scheduler.ledger.cache.stats.num_hit_tokens for scheduler in dp_engine.schedulers)
    for i, (answer, expected) in enumerate(zip(answers, right, strict=True)):
        if i in cancelled:
            assert answer.token_ids == expected.token_ids[: len(answer.token_ids)]
            continue
        assert answer.token_ids == expected.token_ids
        assert answer.finish_reason == expected.finish_reason
        logprobs = zip(answer.logprobs, expected.logprobs, strict=True)
        assert all(abs(one.chosen - other.chosen) < 1e-3 for one, other in logprobs)


def test_samples_of_a_failed_step_reach_no_other_request(
    alone: Engine, dp_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    asks = asks_of(random.Random(6), 4)
    for i, ask in enumerate(asks):
        dp_engine.add(f"lost-{i}", *ask)
    with monkeypatch.context() as patch:
        patch.setattr(dp_engine.schedulers[0], "commit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            drain(dp_engine)
    drain(dp_engine)
    answers = [dp_engine.add(f"{i}", *ask) for i, ask in enumerate(asks)]
    drain(dp_engine)
    for i, ask in enumerate(asks):
        expected = alone.add(f"{i}", *ask)
        drain(alone)
        assert answers[i].token_ids == expected.token_ids


def test_an_id_is_unique_across_dp_ranks(dp_engine: Engine) -> None:
    dp_engine.add("same", [1, 2, 3], SamplingParams(max_tokens=3))
    with pytest.raises(RequestError, match="this id is in use"):
        dp_engine.add("same", [4, 5, 6], SamplingParams(max_tokens=3))
    drain(dp_engine)
