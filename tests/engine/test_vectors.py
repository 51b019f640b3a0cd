"""Tests of vectors in the engine: batches, preemption, the cache, and the end of requests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from engines import Ask, check_nothing_leaked, drain, greedy, make, prompt_of

from slotzero import LLM, PoolingParams, SamplingParams
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import ConfigError, RequestError, SlotzeroError
from slotzero.models.pooling import Pooling
from slotzero.sampling.params import POOLED

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 17, 40, 70)
KINDS = ("last", "mean")


def run(engine: Engine, asks: Sequence[Ask]) -> list[RequestHandle]:
    handles = [engine.add(f"{i}", *asked) for i, asked in enumerate(asks)]
    while engine.has_work:
        engine.step()
    engine.check()
    return handles


def alone(engine: Engine, prompt: list[int]) -> np.ndarray:
    """Return the vector of a prompt that has the engine and no cached prefix for itself."""
    engine.reset_prefix_cache()
    (handle,) = run(engine, [(prompt, POOLED)])
    assert handle.vector is not None
    return handle.vector


@pytest.mark.parametrize(
    ("kind", "model", "settings"),
    [
        ("last", "llama", {}),
        ("mean", "llama", {}),
        ("last", "gemma3", {}),
        ("mean", "deepseek-v3", {"speculative": "mtp"}),
        ("last", "mixtral", {}),
        ("last", "qwen3-next", {}),
        ("mean", "qwen3-next", {}),
        ("mean", "llama", {"speculative": "ngram"}),
        ("mean", "llama", {"kv_cache_dtype": "fp8"}),
    ],
)
def test_a_vector_has_the_same_bits_in_any_batch(
    kind: str, model: str, settings: dict[str, Any], overlaps: bool
) -> None:
    """On a CPU: in chunks, beside answers and scored prompts, after a cached prefix, preempted."""
    settings = {"backend": "cpu", "lazy_recording": True, "pooling": kind, **settings}
    engine = make(model=f"tiny:{model}", max_num_seqs=8, max_num_batched_tokens=24, **settings)
    assert engine.limits.is_deterministic
    prompts = [prompt_of(length) for length in LENGTHS]
    wanted = [alone(engine, prompt) for prompt in prompts]
    pooled = [(prompt, POOLED) for prompt in prompts]
    others: list[Ask] = [
        (prompt_of(30, 1), greedy(20, logprobs=2)),
        (prompt_of(33, 2), greedy(2, prompt_logprobs=2)),
    ]
    engine.reset_prefix_cache()
    for asks in ([*others, *pooled], [*pooled, *others], pooled):
        found = [h for h in run(engine, asks) if h.request.params.pooled]
        for handle, vector in zip(found, wanted, strict=True):
            assert np.array_equal(handle.vector, vector)
    again = make(model=f"tiny:{model}", max_num_seqs=8, **settings)  # whole prompts in a step
    for handle, vector in zip(run(again, pooled), wanted, strict=True):
        assert np.array_equal(handle.vector, vector)


@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_prompt_is_computed_again(kind: str, overlaps: bool) -> None:
    engine = make(pooling=kind, max_num_seqs=3, max_num_batched_tokens=16, backend="cpu",
                  lazy_recording=True)  # fmt: skip
    prompt = prompt_of(70)
    wanted = alone(engine, prompt)
    for num_steps in range(7):
        handle = engine.add(f"{num_steps}", prompt, POOLED)
        other = engine.add("other", prompt_of(5), greedy(6))
        for _ in range(num_steps):
            engine.step()
        with engine.lock:
            engine._stop_running("hold")
        drain(engine)
        assert np.array_equal(handle.vector, wanted) and len(other.token_ids) == 6


def test_a_mean_reads_no_cached_prefix_and_the_last_token_does() -> None:
    prompt = prompt_of(64)
    for kind, num_found in (("last", 48), ("mean", 0)):
        engine = make(pooling=kind)
        first, second = (run(engine, [(prompt, POOLED)])[0] for _ in range(2))
        assert (first.request.num_found, second.request.num_found) == (0, num_found)
        (answer,) = run(engine, [(prompt, greedy(1))])
        assert answer.request.num_found == 48  # what a mean computes, answers find


def test_only_steps_with_vectors_compute_them() -> None:
    engine = make()
    (runner,) = engine.worker.pooled_prefills
    run(engine, [(prompt_of(9), greedy(3)), (prompt_of(1), greedy(3, prompt_logprobs=3))])
    assert not runner.records
    run(engine, [(prompt_of(1), POOLED)])
    assert runner.records and engine.worker.decode.counts.replays == 0


def test_a_pooled_request_ends_after_its_prompt(overlaps: bool) -> None:
    engine = make(max_model_len=64)
    longest = prompt_of(64)  # no token is left for an answer
    (handle,) = run(engine, [(longest, POOLED)])
    assert (handle.finish_reason, handle.token_ids) == ("stop", [])
    assert handle.vector is not None and handle.vector.shape == (engine.pooling.size,)
    (answer,) = run(engine, [(longest[:60], greedy(4))])
    assert answer.vector is None
    for bad, words in ((prompt_of(65), "65 tokens"), ([], "empty"), ([300], "vocabulary")):
        with pytest.raises(RequestError, match=words):
            engine.add("bad", bad, POOLED)
    with_drafts = make(max_model_len=64, speculative="ngram")
    with pytest.raises(RequestError, match="64 tokens"):
        with_drafts.add("bad", longest, POOLED)
    run(with_drafts, [(longest[:63], POOLED)])


def test_a_cancelled_request_leaves_nothing(overlaps: bool) -> None:
    engine = make(max_num_batched_tokens=16, pooling="mean")
    wanted = alone(engine, prompt_of(50))
    for num_steps in range(4):
        gone = engine.add("gone", prompt_of(60), POOLED)
        for _ in range(num_steps):
            engine.step()
        engine.cancel("gone")
        handle = engine.add("gone", prompt_of(50), POOLED)  # the same id, maybe the same slot
        drain(engine)
        assert gone.vector is None and np.abs(handle.vector - wanted).max() < 1e-5
    check_nothing_leaked(engine)


@pytest.mark.parametrize("settings", [{"pooling": "mean"}, {"score_tokens": "n,y"}])
def test_a_watched_engine_has_no_violations(settings: dict[str, Any]) -> None:
    named: dict[str, Any] = {"backend": "eager", "show_progress": False, "sanitize": "full"}
    llm = LLM("tiny:llama", max_num_batched_tokens=32, max_num_seqs=4, **named, **settings)
    engine = llm.engine
    run(engine, [*((prompt_of(n), POOLED) for n in LENGTHS), (prompt_of(9), greedy(9))])
    assert engine.sanitizer is not None
    assert engine.sanitizer.steps_watched > 3 and engine.sanitizer.violations == 0


def test_weights_change_between_vectors() -> None:
    engine = make(pooling="mean", max_num_batched_tokens=16)
    before = alone(engine, prompt_of(50))
    handle = engine.add("held", prompt_of(50), POOLED)
    engine.step()
    engine.update_weights("tiny:llama")  # in the middle of the prompt, which begins again
    drain(engine)
    assert np.abs(handle.vector - before).max() < 1e-5 and handle.request.num_preemptions == 1


@pytest.mark.parametrize("more", [{"n": 2}, {"logprobs": 1}, {"prompt_logprobs": 1}, {"stop": "a"}])
def test_parameters_of_an_answer_are_refused(more: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="pooled"):
        SamplingParams(pooled=True, **more)


def test_settings_that_contradict() -> None:
    for settings, words in (
        ({"score_template": "x {{ query }}"}, "score_tokens"),
        ({"score_tokens": "n,y", "pooling": "mean"}, "drop one"),
        ({"pooling": "max"}, "auto, last, mean"),
        ({"score_tokens": "y"}, "two tokens"),
        ({"score_tokens": "y,y"}, "two different"),
        ({"score_tokens": "no,yes"}, "2 tokens of this model"),
    ):
        with pytest.raises(ConfigError, match=words):
            make(**settings)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny:llama", backend="eager", show_progress=False)


def test_embeddings_offline(llm: LLM) -> None:
    outputs = llm.embed(["a", [1, 2], {"prompt": "b"}], False)
    assert [output.prompt_token_ids for output in outputs] == [[256, 97], [1, 2], [256, 98]]
    for output in outputs:
        assert np.linalg.norm(output.outputs.embedding) == pytest.approx(1)
        assert output.outputs.hidden_size == llm.engine.pooling.size
    with pytest.raises(RequestError, match=r"use LLM\.embed"):
        llm.generate("a", POOLED)
    with pytest.raises(RequestError, match="Matryoshka"):
        llm.embed("a", pooling_params=PoolingParams(dimensions=3))
    with pytest.raises(RequestError, match="dimensions"):
        PoolingParams(dimensions="3")  # type: ignore[arg-type]


def test_scores_offline(llm: LLM) -> None:
    (same, other) = llm.score("a text", ["a text", "another"], use_tqdm=False)
    assert same.outputs.score == pytest.approx(1) and other.outputs.score < 0.999
    for bad, words in (
        (("a", []), "empty"),
        ((["a", "b"], ["c"] * 3), "2 texts cannot be paired with 3"),
        (("a", [1]), "strings"),
    ):
        with pytest.raises(RequestError, match=words):
            llm.score(*bad)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="instruction: only with --score-tokens"):
        llm.score("a", "b", instruction="c")


def test_numbers_that_are_not_finite_are_reported() -> None:
    pooling = Pooling(size=2)
    for bad in (np.nan, np.inf):
        with pytest.raises(SlotzeroError, match="not finite"):
            pooling.embedding(np.array([1, bad], np.float32))
