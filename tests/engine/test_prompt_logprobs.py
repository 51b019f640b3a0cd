"""Tests of log probabilities of prompts: they are those that the same tokens get as an answer."""

from collections.abc import Sequence
from typing import Any

import pytest
from engines import Ask, answer_all, check_nothing_leaked, drain, greedy, make, prompt_of

from slotzero import LLM, SamplingParams
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import RequestError

pytestmark = pytest.mark.slow

LENGTHS = (1, 2, 17, 40, 70)
NUM_NEW = 12


def scored(answer: RequestHandle, num_top: int = 4) -> tuple[list[int], SamplingParams]:
    """Return a request whose prompt is the prompt and answer of another."""
    tokens = answer.request.prompt_token_ids + answer.token_ids
    return tokens, greedy(2, prompt_logprobs=num_top)


def run(engine: Engine, asks: Sequence[Ask]) -> list[RequestHandle]:
    handles = [engine.add(f"{i}", *asked) for i, asked in enumerate(asks)]
    while engine.has_work:
        engine.step()
    engine.check()
    return handles


def check_scores(handle: RequestHandle, answer: RequestHandle) -> None:
    """Check that the end of a scored prompt has the log probabilities that the answer had."""
    prompt_len = len(answer.request.prompt_token_ids)
    assert len(handle.prompt_logprobs) == len(handle.request.prompt_token_ids) - 1
    num_top = handle.request.params.prompt_logprobs
    for found, wanted in zip(
        handle.prompt_logprobs[prompt_len - 1 :], answer.logprobs, strict=True
    ):
        assert found.chosen == wanted.chosen
        assert found.top_ids == wanted.top_ids[:num_top]
        assert found.top_values == wanted.top_values[:num_top]


@pytest.mark.parametrize(
    ("model", "settings"),
    [
        ("llama", {"backend": "cpu", "lazy_recording": True}),
        ("llama", {"max_num_batched_tokens": 16}),  # prompts in chunks
        ("llama", {"kv_cache_dtype": "fp8", "quantization": "int4"}),
        ("gemma2", {"max_num_batched_tokens": 50}),  # logits with a soft cap
        ("granite", {}),  # logits with a factor
        ("qwen3-next", {"max_num_batched_tokens": 32}),  # recurrent layers
        ("deepseek-v3", {"speculative": "mtp"}),
        ("llama", {"speculative": "ngram"}),
        ("llama", {"sanitize": "full"}),
    ],
)
def test_a_prompt_has_the_scores_of_an_answer(
    model: str, settings: dict[str, Any], overlaps: bool
) -> None:
    engine = start(f"tiny:{model}", settings)
    prompts = [prompt_of(length) for length in LENGTHS]
    wanted = greedy(NUM_NEW, logprobs=4, speculative=False)
    answers = run(engine, [(prompt, wanted) for prompt in prompts])
    asks = [scored(answer, num_top) for num_top, answer in enumerate(answers)]
    plain = greedy(20, logprobs=2)
    handles = run(engine, [*asks, (prompt_of(30, 1), plain)])
    for handle, answer in zip(handles, answers, strict=False):
        check_scores(handle, answer)
        (alone,) = run(engine, [(handle.request.prompt_token_ids, greedy(2))])
        assert handle.token_ids == alone.token_ids
    assert not handles[-1].prompt_logprobs
    assert engine.sanitizer is None or engine.sanitizer.violations == 0


def start(model: str, settings: dict[str, Any]) -> Engine:
    if "sanitize" not in settings:
        return make(model=model, max_num_seqs=6, **settings)
    named: dict[str, Any] = {"backend": "eager", "show_progress": False, "max_num_seqs": 6}
    return LLM(model, skip_tokenizer_init=True, **named, **settings).engine


def test_a_preempted_prompt_is_scored_again(overlaps: bool) -> None:
    engine = make(max_num_seqs=3, max_num_batched_tokens=16, max_model_len=200)
    (answer,) = answer_all(engine, [(prompt_of(60), greedy(NUM_NEW, logprobs=4))])
    for num_steps in range(6):
        handle = engine.add(f"{num_steps}", *scored(answer))
        for _ in range(num_steps):
            engine.step()
        with engine.lock:
            engine._stop_running("hold")
        drain(engine)
        check_scores(handle, answer)
        assert handle.request.num_preemptions == (num_steps > 0)
        assert handle.request.output_token_ids[:1] == handle.token_ids[:1]


def test_a_scored_prompt_begins_at_its_first_token_and_serves_the_cache() -> None:
    engine = make()
    prompt = prompt_of(64)
    (first,) = answer_all(engine, [(prompt, greedy(1))])
    (again,) = answer_all(engine, [(prompt, greedy(1, prompt_logprobs=0))])
    assert (first.request.num_found, again.request.num_found) == (0, 0)
    assert len(again.prompt_logprobs) == 63
    engine.reset_prefix_cache()
    answer_all(engine, [(prompt, greedy(1, prompt_logprobs=0))])
    (last,) = answer_all(engine, [(prompt, greedy(1))])
    assert last.request.num_found > 0


def test_only_steps_with_scored_prompts_compute_scores() -> None:
    engine = make()
    (runner,) = engine.worker.scored_prefills
    answer_all(engine, [(prompt_of(9), greedy(3)), (prompt_of(1), greedy(3, prompt_logprobs=3))])
    assert not runner.records
    answer_all(engine, [(prompt_of(2), greedy(3, prompt_logprobs=3))])
    assert runner.records


def test_a_cancelled_request_leaves_no_scores(overlaps: bool) -> None:
    engine = make(max_num_batched_tokens=16)
    for num_steps in range(5):
        gone = engine.add("gone", prompt_of(50), greedy(4, prompt_logprobs=2))
        for _ in range(num_steps):
            engine.step()
        engine.cancel("gone")
        other = engine.add("gone", prompt_of(3), greedy(4))  # the same id
        drain(engine)
        assert not other.prompt_logprobs and len(gone.prompt_logprobs) <= 49
    check_nothing_leaked(engine)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny:llama", backend="eager", show_progress=False)


def test_an_output_has_the_scores_of_its_prompt(llm: LLM) -> None:
    ids = prompt_of(10)
    for num_top in (0, 3):
        params = SamplingParams(max_tokens=1, n=2, prompt_logprobs=num_top)
        (output,) = llm.generate([ids], params, use_tqdm=False)
        scores = output.prompt_logprobs
        assert scores is not None and scores[0] is None and len(scores) == 10
        for token, by_id in zip(ids[1:], scores[1:], strict=True):
            assert by_id is not None and token in by_id
            assert num_top <= len(by_id) <= num_top + 1
            ranks = [entry.rank for entry in by_id.values() if entry.rank is not None]
            assert sorted(ranks) == list(range(1, num_top + 1))
            assert by_id[token].decoded_token == llm.get_tokenizer().decode([token])
    (output,) = llm.generate([ids], SamplingParams(max_tokens=1), use_tqdm=False)
    assert output.prompt_logprobs is None
    (output,) = llm.generate([[5]], SamplingParams(prompt_logprobs=1), use_tqdm=False)
    assert output.prompt_logprobs == [None]


@pytest.mark.parametrize("value", [-1, 21, True, 1.5])
def test_wrong_values_are_refused(value: object) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        SamplingParams(prompt_logprobs=value)  # type: ignore[arg-type]
