"""Tests of `LLM`: prompts and parameters, outputs, streams, stop strings, threads, interrupts."""

import json
import random
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

import slotzero
from slotzero import LLM, SamplingParams
from slotzero.engine.request_handle import RequestHandle
from slotzero.errors import (
    CapacityError,
    ConfigError,
    RequestError,
    StepFailedError,
    TokenizerMissingError,
)
from slotzero.executor.results import Results, RowLogprobs
from slotzero.llm import CompletionOutput, StreamChunk
from slotzero.step import Step
from slotzero.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

SHORT = SamplingParams(temperature=0, max_tokens=12)
SEEDED = SamplingParams(temperature=1, seed=7, max_tokens=12)


def make(model: str = "tiny:llama", **settings: object) -> LLM:
    return LLM(model, **{"backend": "eager", "show_progress": False, **settings})


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make()


@pytest.fixture(autouse=True)
def _nothing_is_left(llm: LLM):
    yield
    left = list(llm.engine._handles)
    for request_id in left:  # otherwise every later test would fail as well
        llm.engine.cancel(request_id)
    assert not left
    assert not llm.engine.schedulers.has_work
    llm.engine.check()


def first(llm: LLM, prompt, params: SamplingParams) -> CompletionOutput:
    return llm.generate(prompt, params, use_tqdm=False)[0].outputs[0]


# Prompts and parameters


def test_a_text_a_list_and_token_ids_are_the_same_prompt(llm: LLM) -> None:
    tokens = llm.get_tokenizer().encode("hello")
    assert tokens == [256, *b"hello"]
    shapes = [
        "hello",
        ["hello"],
        {"prompt": "hello"},
        {"prompt_token_ids": tokens},
        tokens,
        [tokens],
        [{"prompt_token_ids": tuple(tokens)}],
        {"prompt": "hello", "prompt_token_ids": tokens},
    ]
    for prompts in shapes:
        (output,) = llm.generate(prompts, SHORT, use_tqdm=False)
        assert output.prompt_token_ids == tokens
        assert output.prompt == (None if "hello" not in str(prompts) else "hello")
        assert output.outputs == llm.generate("hello", SHORT, use_tqdm=False)[0].outputs


def test_answers_come_in_order_each_with_its_own_parameters(llm: LLM) -> None:
    """There are more prompts than rows, so that they end in another order than they arrive."""
    prompts = [f"prompt {i}" for i in range(20)]
    params = [
        SamplingParams(temperature=i % 3, seed=i, max_tokens=1 + 7 * i % 11) for i in range(20)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [output.prompt for output in outputs] == prompts
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        assert output.outputs[0] == first(llm, prompt, wanted)
        assert len(output.outputs[0].token_ids) <= wanted.max_tokens
    assert len({output.request_id for output in outputs}) == 20


def test_the_fields_of_an_output(llm: LLM) -> None:
    (output,) = llm.generate(["hello"], SHORT, use_tqdm=False)
    (answer,) = output.outputs
    assert output.finished
    assert output.num_cached_tokens == 0
    assert (answer.index, answer.finish_reason, answer.stop_reason) == (0, "length", None)
    assert len(answer.token_ids) == 12
    assert answer.text == llm.get_tokenizer().decode(answer.token_ids)
    assert answer.logprobs is None
    assert answer.cumulative_logprob is None


def test_the_default_parameters_are_those_of_vllm(llm: LLM) -> None:
    (output,) = llm.generate("hello", use_tqdm=False)
    assert len(output.outputs[0].token_ids) <= SamplingParams().max_tokens == 16


def test_no_prompts_give_no_answers(llm: LLM) -> None:
    assert llm.generate([], SHORT, use_tqdm=False) == []
    assert list(llm.stream([], SHORT)) == []


def test_cached_tokens_are_counted() -> None:
    llm = make()
    prompt = {"prompt_token_ids": list(range(50))}
    counts = [llm.generate(prompt, SHORT, use_tqdm=False)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 48]


def test_the_number_of_parameters_must_equal_that_of_prompts(llm: LLM) -> None:
    with pytest.raises(RequestError, match="2 prompts with 1 sampling parameters"):
        llm.generate(["a", "b"], [SHORT], use_tqdm=False)


@pytest.mark.parametrize("given", [{"max_tokens": 2}, [{"max_tokens": 2}], "short", [SHORT, 5]])
def test_parameters_of_another_type_are_refused(llm: LLM, given: Any) -> None:
    with pytest.raises(RequestError, match=r"^sampling_params: must be a SamplingParams or a list"):
        llm.generate(["a"] * len(given), given, use_tqdm=False)


def test_a_bad_prompt_is_named_by_its_index_and_nothing_runs(llm: LLM) -> None:
    steps = llm.engine.num_steps
    with pytest.raises(RequestError, match=r"^prompt 2: the prompt has 601 tokens"):
        llm.generate(["a", "b", "c" * 600], SHORT, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^prompt 1: 'prompt' or 'prompt_token_ids' is"):
        llm.generate(["a", {}], SHORT, use_tqdm=False)
    with pytest.raises(RequestError, match=r"^prompt 0: the prompt is empty"):
        next(llm.stream({"prompt_token_ids": []}, SHORT))
    assert llm.engine.num_steps == steps


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"no setting 'max_seqs'; did you mean .*max_num_seqs"
    ) as info:
        LLM("tiny:llama", max_seqs=3)
    assert "\n" not in str(info.value)


# Several answers


def test_n_answers_use_consecutive_seeds(llm: LLM) -> None:
    params = replace(SEEDED, n=4)
    outputs = llm.generate(["one", "two"], params, use_tqdm=False)
    for prompt, output in zip(("one", "two"), outputs, strict=True):
        assert [answer.index for answer in output.outputs] == [0, 1, 2, 3]
        assert len({tuple(answer.token_ids) for answer in output.outputs}) == 4
        for i, answer in enumerate(output.outputs):
            alone = first(llm, prompt, replace(SEEDED, seed=7 + i))
            assert answer == replace(alone, index=i)


def test_n_answers_without_a_seed_differ_and_greedy_ones_do_not(llm: LLM) -> None:
    params = SamplingParams(n=3, temperature=1, max_tokens=12)
    (output,) = llm.generate("one", params, use_tqdm=False)
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    (output,) = llm.generate("one", replace(params, temperature=0), use_tqdm=False)
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 1


def test_consecutive_seeds_after_the_largest_one(llm: LLM) -> None:
    """They give answers, or a refusal with nothing left in the queue."""
    params = replace(SEEDED, seed=2**63 - 1, n=3)
    try:
        outputs = llm.generate(["one", "two"], params, use_tqdm=False)
    except RequestError as error:
        assert "seed" in str(error)
    else:
        answers = [answer for output in outputs for answer in output.outputs]
        assert len({tuple(answer.token_ids) for answer in answers}) == 6
    assert llm.engine._handles == {}


# Log probabilities, penalties and filters, against transformers


def tokens_of(length: int, vocab: int, seed: int = 3) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


@pytest.fixture(scope="module")
def twin(oracles):
    """Return transformers' model, and our engine with the same weights."""
    oracle = oracles("smollm2")
    return oracle, make(oracle.path, skip_tokenizer_init=True, max_num_seqs=4)


@pytest.mark.parametrize("wanted", [0, 1, 5, 20])
def test_logprobs_are_the_log_softmax_of_transformers(twin, wanted: int) -> None:
    oracle, llm = twin
    prompts = [tokens_of(n, oracle.vocab_size, seed=n) for n in (4, 17, 30)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logprobs=wanted)
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        tokens, logits = oracle.generate(prompt, 20)
        expected = logits.double().log_softmax(-1)
        assert answer.token_ids == tokens
        assert len(answer.logprobs) == 20
        for token, row, by_id in zip(tokens, expected, answer.logprobs, strict=True):
            top = row.topk(max(wanted, 1)).indices.tolist()[:wanted]
            assert set(by_id) == {token, *top}
            for rank, other in enumerate(top, start=1):
                assert by_id[other].rank == rank
            for other, entry in by_id.items():
                assert entry.logprob == pytest.approx(row[other].item(), abs=1e-4)
                assert entry.decoded_token is None  # no tokenizer
        total = sum(row[token].item() for token, row in zip(tokens, expected, strict=True))
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)


def test_a_sampled_token_outside_the_top_is_reported_too(twin) -> None:
    """Penalties and temperature affect the choice; the reported distribution is the model's own."""
    oracle, llm = twin
    prompt = tokens_of(9, oracle.vocab_size)
    params = SamplingParams(
        temperature=3, seed=5, max_tokens=15, ignore_eos=True, logprobs=2, presence_penalty=1
    )
    answer = first(llm, {"prompt_token_ids": prompt}, params)
    sizes = set()
    for i, (token, by_id) in enumerate(zip(answer.token_ids, answer.logprobs, strict=True)):
        row = oracle.generate(prompt + answer.token_ids[:i], 1)[1][0].double().log_softmax(-1)
        assert by_id[token].logprob == pytest.approx(row[token].item(), abs=1e-4)
        top = row.topk(2).indices.tolist()
        assert {other for other, entry in by_id.items() if entry.rank} == set(top)
        assert by_id[token].rank == (top.index(token) + 1 if token in top else None)
        sizes.add(len(by_id))
    assert sizes == {2, 3}


def test_logprobs_carry_the_text_of_their_tokens(llm: LLM) -> None:
    params = replace(SHORT, logprobs=2, logit_bias={ord("x"): 100.0})
    answer = first(llm, "hello", params)
    assert answer.text == "x" * 12
    assert {by_id[ord("x")].decoded_token for by_id in answer.logprobs} == {"x"}
    eos = first(llm, "hello", replace(params, logit_bias={257: 100.0}))
    assert eos.logprobs[0][257].decoded_token == "<eos>"
    assert eos.text == ""


def plain_answer(oracle, prompt: list[int], params: SamplingParams) -> list[int]:
    """Decode greedily with penalties as the fields' docstrings define them, one number at a
    time."""
    output: list[int] = []
    for _ in range(params.max_tokens):
        logits = oracle.generate(prompt + output, 1)[1][0].tolist()
        for token in set(prompt + output):
            factor = params.repetition_penalty
            logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
        for token in set(output):
            logits[token] -= params.frequency_penalty * output.count(token)
            logits[token] -= params.presence_penalty
        for token, value in params.logit_bias.items():
            logits[token] += value
        output.append(max(range(len(logits)), key=lambda i: (logits[i], -i)))
    return output


PENALTIES = {
    "none": {},
    "repetition": {"repetition_penalty": 1.8},
    "less than 1": {"repetition_penalty": 0.8},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.5},
    "negative": {"presence_penalty": -1.0, "frequency_penalty": -0.5},
    "bias": {"logit_bias": {5: 4.0, 9: 3.0, 77: -100.0}},
    "all": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
        "logit_bias": {i: (i % 7) / 2 - 1.5 for i in range(0, 250, 3)},
    },
}


def test_penalties_equal_a_plain_loop(twin) -> None:
    """All requests are in one batch, so that penalties of one must not affect another."""
    oracle, llm = twin
    prompts = [tokens_of(12, oracle.vocab_size, seed=i) * 2 for i in range(len(PENALTIES))]
    params = [
        SamplingParams(temperature=0, max_tokens=18, ignore_eos=True, **penalty)
        for penalty in PENALTIES.values()
    ]
    jobs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(jobs, params, use_tqdm=False)
    differing = 0
    for name, prompt, wanted, output in zip(PENALTIES, prompts, params, outputs, strict=True):
        assert output.outputs[0].token_ids == plain_answer(oracle, prompt, wanted), name
        differing += output.outputs[0].token_ids != oracle.generate(prompt, 18)[0]
    assert differing == len(PENALTIES) - 1


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}])
def test_a_filter_that_keeps_one_token_is_greedy(twin, filters: dict) -> None:
    oracle, llm = twin
    prompt = tokens_of(20, oracle.vocab_size)
    params = SamplingParams(
        temperature=2, seed=1, max_tokens=16, ignore_eos=True, repetition_penalty=1.3, **filters
    )
    expected = plain_answer(oracle, prompt, params)
    assert first(llm, {"prompt_token_ids": prompt}, params).token_ids == expected


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_filters_keep_what_a_plain_loop_keeps(twin, filters: dict) -> None:
    oracle, llm = twin
    prompt = tokens_of(20, oracle.vocab_size)
    kept_all = True
    for seed in range(6):
        params = SamplingParams(temperature=1.5, seed=seed, max_tokens=6, ignore_eos=True)
        kept_all &= within(oracle, prompt, first_tokens(llm, prompt, params), filters)
        tokens = first_tokens(llm, prompt, replace(params, **filters))
        assert within(oracle, prompt, tokens, filters)
    assert not kept_all  # without the filter, other tokens appear


def first_tokens(llm: LLM, prompt: list[int], params: SamplingParams) -> list[int]:
    return first(llm, {"prompt_token_ids": prompt}, params).token_ids


def within(oracle, prompt: list[int], tokens: list[int], filters: dict) -> bool:
    for i, token in enumerate(tokens):
        logits = oracle.generate(prompt + tokens[:i], 1)[1][0] / 1.5
        probabilities = logits.double().softmax(-1)
        mine = probabilities[token]
        above = probabilities[probabilities > mine + 1e-9]
        if len(above) >= filters.get("top_k", 1000) or above.sum() > filters.get("top_p", 1) + 1e-6:
            return False
        if mine < filters.get("min_p", 0) * probabilities.max() - 1e-9:
            return False
    return True


# Conversations

HELLO = [{"role": "user", "content": "hello"}]
TURNS = [
    {"role": "system", "content": "be brief"},
    *HELLO,
    {"role": "assistant", "content": "hi"},
    {"role": "user", "content": "and now?"},
]


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    (alone,) = llm.chat(HELLO, SHORT, use_tqdm=False)
    assert alone.prompt == "<bos>user: hello<eos>assistant: "
    assert alone.prompt_token_ids == [256, *b"user: hello", 257, *b"assistant: "]
    together = llm.chat([HELLO, TURNS], SHORT, use_tqdm=False)
    assert together[0].outputs == alone.outputs
    assert together[1].outputs == llm.chat(TURNS, SHORT, use_tqdm=False)[0].outputs
    assert together[1].prompt.startswith("<bos>system: be brief<eos>user: hello<eos>")
    tokens = {"prompt_token_ids": alone.prompt_token_ids}
    assert alone.outputs == llm.generate(tokens, SHORT, use_tqdm=False)[0].outputs


def test_chat_without_the_generation_prompt(llm: LLM) -> None:
    (output,) = llm.chat(HELLO, SHORT, use_tqdm=False, add_generation_prompt=False)
    assert output.prompt == "<bos>user: hello<eos>"


def test_chat_joins_the_parts_of_a_text(llm: LLM) -> None:
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    (prompt,) = llm.chat_prompts([{"role": "user", "content": parts}])
    assert prompt["prompt"] == "<bos>user: hello\nyou<eos>assistant: "
    (prompt,) = llm.chat_prompts([{"role": "developer", "content": "be brief"}])
    assert prompt["prompt"] == "<bos>system: be brief<eos>assistant: "


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"content": "hello"}, r"messages\[1\]\.role: must be a string such as 'user', got None"),
        ({"role": "user"}, r"messages\[1\]\.content: is missing"),
        ({"role": "user", "content": 5}, r"messages\[1\]\.content: must be a string or"),
        (
            {"role": "user", "content": ["hello"]},
            r"content\[0\]: type 'str' is not supported, only text",
        ),
        (
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]},
            r"messages\[1\]\.content\[0\]: type 'image_url' is not supported, only text",
        ),
    ],
)
def test_chat_refuses_invalid_messages(llm: LLM, message: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        llm.chat([*HELLO, message], SHORT, use_tqdm=False)


def test_chat_passes_tools_and_variables_to_the_template(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = [{"type": "function", "function": {"name": "weather"}}]
    with pytest.raises(RequestError, match="tools: this model's chat template does not support"):
        llm.chat(HELLO, SHORT, use_tqdm=False, tools=tools)
    template = "{{ tools[0].function.name if tools else 'none' }} {{ mood }}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)
    asked = {"tools": tools, "chat_template_kwargs": {"mood": "calm"}}
    (output,) = llm.chat(HELLO, SHORT, use_tqdm=False, **asked)
    assert output.prompt == "weather calm"
    template = "{{ messages[1].tool_calls[0].function.arguments | tojson }}"
    monkeypatch.setattr(llm.get_tokenizer(), "chat_template", template)
    call = {"id": "1", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    (prompt,) = llm.chat_prompts([*HELLO, {"role": "assistant", "tool_calls": [call]}])
    assert prompt["prompt"] == '{"city": "Oslo"}'
    with pytest.raises(
        RequestError, match=r"tool_calls\[0\]\.function: must have a name and arguments"
    ):
        llm.chat_prompts([*HELLO, {"role": "assistant", "tool_calls": [{"id": "1"}]}])
    with pytest.raises(RequestError, match="chat_template_kwargs: 'messages' is set by the engine"):
        llm.chat(HELLO, SHORT, use_tqdm=False, chat_template_kwargs={"messages": []})


def test_an_empty_conversation_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="the conversation is empty"):
        llm.chat([], SHORT, use_tqdm=False)


# Without a tokenizer


def test_token_ids_in_token_ids_out(llm: LLM) -> None:
    bare = make(skip_tokenizer_init=True)
    prompt = {"prompt_token_ids": llm.get_tokenizer().encode("hello")}
    answer = first(bare, prompt, SHORT)
    assert answer.token_ids == first(llm, "hello", SHORT).token_ids
    assert answer.text == ""
    chunks = list(bare.stream(prompt, SHORT))
    assert [token for chunk in chunks for token in chunk.token_ids] == answer.token_ids
    for use in (
        lambda: bare.generate("hello", SHORT),
        lambda: bare.chat(HELLO, SHORT),
        lambda: bare.get_tokenizer(),
        lambda: bare.generate(prompt, replace(SHORT, stop="x")),
    ):
        with pytest.raises(TokenizerMissingError, match="tokenizer"):
            use()


def test_detokenisation_can_be_disabled(llm: LLM) -> None:
    answer = first(llm, "hello", replace(SHORT, detokenize=False))
    assert answer.text == ""
    assert answer.token_ids == first(llm, "hello", SHORT).token_ids


# Streams


def text_by_place(chunks: Sequence[StreamChunk]) -> dict[tuple[int, int], str]:
    texts: dict[tuple[int, int], str] = {}
    for chunk in chunks:
        place = (chunk.prompt_index, chunk.index)
        texts[place] = texts.get(place, "") + chunk.text
    return texts


def test_the_joined_stream_equals_the_answer(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(6)]
    params = SamplingParams(temperature=1, seed=3, n=2, max_tokens=30)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    chunks = list(llm.stream(prompts, params))
    places = [(i, j) for i in range(6) for j in range(2)]
    texts = text_by_place(chunks)
    for i, j in places:
        answer = outputs[i].outputs[j]
        own = [chunk for chunk in chunks if (chunk.prompt_index, chunk.index) == (i, j)]
        assert texts[i, j] == answer.text
        assert [token for chunk in own for token in chunk.token_ids] == answer.token_ids
        assert [chunk.finish_reason for chunk in own[:-1]] == [None] * (len(own) - 1)
        assert own[-1].finish_reason == answer.finish_reason


def test_closing_a_stream_early_cancels_it(llm: LLM) -> None:
    expected = first(llm, "hello", replace(SHORT, max_tokens=200, ignore_eos=True)).token_ids
    for num_read in (1, 2, 5):
        stream = llm.stream(["hello", "other"], replace(SHORT, max_tokens=200, ignore_eos=True))
        read = [chunk for chunk, _ in zip(stream, range(2 * num_read), strict=False)]
        stream.close()
        assert llm.engine._handles == {}
        assert not llm.engine.schedulers.has_work
        assert llm.engine.step() == []  # the step that was in flight
        assert not llm.engine.has_work
        llm.engine.check()
        tokens = [t for chunk in read if chunk.prompt_index == 0 for t in chunk.token_ids]
        assert tokens == expected[: len(tokens)]


def test_a_stream_that_is_never_read_adds_no_request(llm: LLM) -> None:
    steps = llm.engine.num_steps
    llm.stream("hello", SHORT).close()
    assert llm.engine.num_steps == steps


def test_two_streams_side_by_side_lose_nothing(llm: LLM) -> None:
    """A step of one stream also carries the other's tokens."""
    lengths = {"one": 5, "two": 40}
    expected = {p: first(llm, p, replace(SHORT, max_tokens=n)) for p, n in lengths.items()}
    streams = {p: llm.stream(p, replace(SHORT, max_tokens=n)) for p, n in lengths.items()}
    chunks: dict[str, list[StreamChunk]] = {prompt: [] for prompt in streams}
    for _ in range(60):
        for prompt, stream in streams.items():
            chunks[prompt] += [chunk for chunk in [next(stream, None)] if chunk]
    for prompt, answer in expected.items():
        assert "".join(chunk.text for chunk in chunks[prompt]) == answer.text
        assert [t for chunk in chunks[prompt] for t in chunk.token_ids] == answer.token_ids
        assert chunks[prompt][-1].finish_reason == answer.finish_reason


@pytest.mark.parametrize("meanwhile", ["generate", "close another"])
def test_a_stream_continues_after_another_call(llm: LLM, meanwhile: str) -> None:
    answer = first(llm, "one", SHORT)
    stream = llm.stream("one", SHORT)
    chunks = [next(stream)]
    if meanwhile == "generate":
        assert first(llm, "two", SHORT) == first(make(), "two", SHORT)
    else:
        other = llm.stream("two", SHORT)
        next(other)
        other.close()
    chunks += stream
    assert "".join(chunk.text for chunk in chunks) == answer.text
    assert [t for chunk in chunks for t in chunk.token_ids] == answer.token_ids
    assert chunks[-1].finish_reason == "length"


# Text, with a scripted model


class ScriptedResults:
    """Results in which the script's tokens replace the sampled ones."""

    def __init__(self, step: Step, scripts: list[list[int]], results: Results) -> None:
        self._step, self._scripts, self._results = step, scripts, results

    def tokens(self) -> list[list[int]]:
        return [[self._next(row.request) if row.samples else 0] for row in self._step.rows]

    def logprobs(self, row: int) -> list[RowLogprobs]:
        return self._results.logprobs(row)

    def _next(self, request) -> int:
        script = self._scripts[request.prompt_token_ids[0]]
        place = len(request.output_token_ids)
        return script[place] if place < len(script) else 257


def scripted(llm: LLM, *scripts: list[int]) -> LLM:
    """Make the model answer prompt [i] with script i, then end-of-sequence."""
    worker = llm.engine.worker
    run = worker.run
    # type: ignore[assignment, method-assign, return-value]
    worker.run = lambda step: [ScriptedResults(step, list(scripts), run(step)[0])]
    return llm


def saying(*answers: Sequence[str]) -> LLM:
    """Return an LLM with scripted answers; each is a list of pieces, one token each."""
    pieces = sorted({piece for answer in answers for piece in answer})
    backend = Backend(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "?"))
    backend.decoder = decoders.Fuse()
    llm = make(max_num_seqs=4)
    llm.engine.tokenizer = Tokenizer(backend, {}, None)
    return scripted(llm, *([pieces.index(piece) for piece in answer] for answer in answers))


def saying_bytes(*answers: bytes) -> LLM:
    return scripted(make(max_num_seqs=4), *(list(answer) for answer in answers))


ASK = {"prompt_token_ids": [0]}
PIECES = ["Hello", " wor", "ld. ", "And", " so", " on"]


@pytest.mark.parametrize(
    ("stop", "text", "num_tokens", "reason"),
    [
        ("d.", "Hello worl", 3, "d."),  # inside a token
        ("ld. ", "Hello wor", 3, "ld. "),  # a whole token
        ("H", "", 1, "H"),  # the very beginning
        ("o w", "Hell", 2, "o w"),  # across two tokens
        ("o world. A", "Hell", 4, "o world. A"),  # across four
        (["zzz", "ld", "wor"], "Hello ", 2, "wor"),  # the one that appears first
        (["ld", "d."], "Hello wor", 3, "ld"),  # both in one token: the earlier place
        (["d.", "ld"], "Hello wor", 3, "ld"),
        (["lo wo", "Hello"], "", 1, "Hello"),
        ("l", "He", 1, "l"),  # twice in one token: the first
        ("Hello there", "Hello world. And so on", 7, None),  # begins but never completes
        (" on!", "Hello world. And so on", 7, None),  # held back until the end
        (["x", "y"], "Hello world. And so on", 7, None),
    ],
)
def test_a_stop_string_ends_the_text(stop, text: str, num_tokens: int, reason) -> None:
    llm = saying(PIECES)
    params = SamplingParams(stop=stop, max_tokens=30)
    answer = first(llm, ASK, params)
    assert (answer.text, answer.finish_reason) == (text, "stop")
    assert (answer.stop_reason, len(answer.token_ids)) == (reason, num_tokens)
    assert "".join(chunk.text for chunk in llm.stream(ASK, params)) == text
    shown = first(llm, ASK, replace(params, include_stop_str_in_output=True))
    assert shown.text == text + (reason or "")
    assert len(shown.token_ids) == num_tokens


def test_a_stop_string_in_the_last_token_allowed_is_a_stop() -> None:
    llm = saying(PIECES)
    answer = first(llm, ASK, SamplingParams(stop="d.", max_tokens=3))
    assert (answer.finish_reason, answer.stop_reason, answer.text) == ("stop", "d.", "Hello worl")
    answer = first(llm, ASK, SamplingParams(stop="d. A", max_tokens=3))
    assert (answer.finish_reason, answer.stop_reason) == ("length", None)
    assert answer.text == "Hello world. "


def test_stop_strings_apply_to_one_request() -> None:
    llm = saying(PIECES, PIECES, PIECES)
    params = [SamplingParams(stop=s, max_tokens=30) for s in ("wor", "so", ())]
    jobs = [{"prompt_token_ids": [i]} for i in range(3)]
    outputs = llm.generate(jobs, params, use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert texts == ["Hello ", "Hello world. And ", "Hello world. And so on"]


def test_a_possible_stop_string_is_held_back() -> None:
    """No other text is held back: it is shown as soon as it cannot become a stop string."""
    llm = saying(["a", "a", "a", "b", "a", "x", "a", "a", "b", "c"])
    chunks = list(llm.stream(ASK, SamplingParams(stop="aabc", max_tokens=30)))
    assert [chunk.text for chunk in chunks] == ["", "", "a", "", "aab", "ax", "", "", "", ""]
    assert chunks[-1].finish_reason == "stop"
    chunks = list(llm.stream(ASK, SamplingParams(stop="aabc", max_tokens=9)))
    # at the end, the held text is shown
    assert [chunk.text for chunk in chunks[6:]] == ["", "", "aab"]
    assert chunks[-1].finish_reason == "length"


def test_a_real_answer_stops_at_its_stop_string(llm: LLM) -> None:
    params = SamplingParams(temperature=1, seed=8, max_tokens=40, ignore_eos=True)
    whole = first(llm, "hello", params)
    for start, end in ((0, 1), (5, 6), (11, 14), (20, 25)):
        stop = whole.text[start:end]
        if "\N{REPLACEMENT CHARACTER}" in stop:
            continue
        stopped = first(llm, "hello", replace(params, stop=stop))
        assert stopped.text == whole.text[: whole.text.index(stop)]
        assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)


def test_min_tokens_applies_to_stop_strings_too() -> None:
    """Before min_tokens, a stop string is text like any other."""
    llm = saying(["a", "b", "c", "b", "d"])
    for min_tokens, text, num_tokens in ((0, "a", 2), (2, "a", 2), (3, "abc", 4), (5, "abcbd", 6)):
        answer = first(llm, ASK, SamplingParams(stop="b", min_tokens=min_tokens, max_tokens=9))
        assert (answer.text, len(answer.token_ids)) == (text, num_tokens), min_tokens


TEXT = "naïve 日本語 😀👍🏽 e\N{COMBINING ACUTE ACCENT} end"


def test_a_stream_never_shows_half_a_character() -> None:
    llm = saying_bytes(TEXT.encode(), TEXT.encode())
    params = SamplingParams(max_tokens=200)
    chunks = list(llm.stream([ASK, {"prompt_token_ids": [1]}], params))
    assert text_by_place(chunks) == {(0, 0): TEXT, (1, 0): TEXT}
    assert not any("\N{REPLACEMENT CHARACTER}" in chunk.text for chunk in chunks)
    own = [chunk for chunk in chunks if chunk.prompt_index == 0]
    assert max(len(chunk.text) for chunk in own) == 1  # complete characters are not held back
    assert first(llm, ASK, params).text == TEXT


def test_an_answer_cut_inside_a_character_ends_with_a_replacement() -> None:
    llm = saying_bytes("x😀".encode())
    for max_tokens in (2, 3, 4):
        params = SamplingParams(max_tokens=max_tokens)
        text = first(llm, ASK, params).text
        assert text == "x\N{REPLACEMENT CHARACTER}"
        assert "".join(chunk.text for chunk in llm.stream(ASK, params)) == text


def test_a_stop_string_of_several_bytes() -> None:
    llm = saying_bytes(TEXT.encode())
    answer = first(llm, ASK, SamplingParams(max_tokens=200, stop=["👍", "語 "]))
    assert answer.text == "naïve 日本"
    assert answer.token_ids == list("naïve 日本語 ".encode())


def test_special_tokens_are_shown_only_on_request() -> None:
    llm = saying_bytes(b"a", b"")
    llm.engine.request_factory.eos_token_ids = (257,)
    hidden, shown = (
        first(llm, ASK, SamplingParams(skip_special_tokens=skip, include_stop_str_in_output=True))
        for skip in (True, False)
    )
    assert (hidden.text, shown.text) == ("a", "a<eos>")
    assert first(llm, ASK, SamplingParams(skip_special_tokens=False)).text == "a"
    assert first(llm, {"prompt_token_ids": [1]}, SamplingParams()).text == ""


def spm_tokenizer() -> Tokenizer:
    """Return a tokenizer in which bytes without a token are <0x..>, as in Llama 2 and Mistral."""
    vocab = {"<unk>": 0, "a": 1, "b": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(254)}
    backend = Backend(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    return Tokenizer(backend, {}, None)


def test_a_newline_that_is_a_byte_token_stops_even_at_the_end() -> None:
    """Byte tokens are held until the next token, or the end, decides how they are decoded."""
    llm = make(max_num_seqs=4)
    llm.engine.tokenizer = spm_tokenizer()
    newline = 3 + ord("\n")
    scripted(llm, [1, 2, newline, 1, newline, 2])
    answer = first(llm, ASK, SamplingParams(stop="\n", max_tokens=20))
    assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "\n")
    for max_tokens in (3, 6):
        answer = first(llm, ASK, SamplingParams(stop=["\n", "x"], max_tokens=max_tokens))
        assert (answer.text, answer.finish_reason, answer.stop_reason) == ("ab", "stop", "\n")


# Many prompts, and several threads


@pytest.mark.parametrize("how", ["generate", "stream"])
def test_a_step_visits_only_the_answers_that_grew_in_it(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """It does not visit those that wait or have finished, however many there are."""
    llm = make(max_num_seqs=2)
    prompts, params = ["hello"] * 60, replace(SHORT, max_tokens=3)
    num_grown, num_looks, states = 0, 0, RequestHandle.finished.fget
    step = llm.engine.step

    def counted_step() -> list[RequestHandle]:
        nonlocal num_grown
        grown = step()
        num_grown += len(grown)
        return grown

    def counted_look(answer: RequestHandle) -> bool:
        nonlocal num_looks
        num_looks += sys._getframe(1).f_globals["__name__"] == "slotzero.llm"
        return states(answer)

    monkeypatch.setattr(llm.engine, "step", counted_step)
    monkeypatch.setattr(RequestHandle, "finished", property(counted_look))
    if how == "generate":
        llm.generate(prompts, params, use_tqdm=False)
    else:
        assert sum(len(chunk.token_ids) for chunk in llm.stream(prompts, params)) == 180
    assert num_grown == 180
    assert num_looks <= num_grown + 2 * len(prompts)  # plus once or twice for each at the end


@pytest.mark.parametrize("failure", ["the device", "no room"])
def test_a_step_that_fails_raises_in_every_thread_that_lost_requests(
    monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    """Two threads have requests in the step; a third waits for a slot and gets all its answers."""
    llm = make(max_num_seqs=3)
    engine = llm.engine
    expected = first(llm, "c", SHORT)
    step, add, all_added = engine.step, engine.add, threading.Event()
    added: list[RequestHandle] = []

    def add_all(*args: Any) -> RequestHandle:
        added.append(add(*args))
        if len(added) == 6:
            all_added.set()
        return added[-1]

    def fragile_step() -> list[RequestHandle]:
        all_added.wait(60)
        return step()

    def fail(*_: object) -> None:
        monkeypatch.setattr(engine.worker, "run", run)
        raise (CapacityError if failure == "no room" else MemoryError)(failure)

    run = engine.worker.run
    monkeypatch.setattr(engine, "add", add_all)
    monkeypatch.setattr(engine, "step", fragile_step)
    monkeypatch.setattr(engine.worker, "run", fail)
    results: dict[str, Any] = {}

    def ask(prompt: str, num: int) -> None:
        try:
            results[prompt] = llm.generate([prompt] * num, SHORT, use_tqdm=False)
        except BaseException as error:
            results[prompt] = error

    threads = []
    for prompt, num in (("a", 1), ("b", 2), ("c", 3)):  # a and b take all three slots
        before = len(added)
        threads.append(threading.Thread(target=ask, args=(prompt, num)))
        threads[-1].start()
        while len(added) < before + num:
            threads[-1].join(0.01)
    for thread in threads:
        thread.join(60)
    assert not engine.has_work
    stepping = [
        error for error in results.values() if isinstance(error, MemoryError | CapacityError)
    ]
    lost = [error for error in results.values() if isinstance(error, StepFailedError)]
    assert len(stepping) == 1  # only one thread ran the step
    assert all(error.__cause__ is stepping[0] and failure in str(error) for error in lost)
    assert {type(results["a"]), type(results["b"])} <= {type(stepping[0]), StepFailedError}
    if not isinstance(results["c"], Exception):  # unless it ran the step itself
        assert [output.outputs[0] for output in results["c"]] == [expected] * 3
        assert len(lost) == 1
    assert first(llm, "c", SHORT) == expected


def test_a_stream_whose_requests_another_call_lost_raises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = make(max_num_seqs=4)
    stream = llm.stream(["one", "two"], SHORT)
    next(stream)

    def fail(*_: object) -> None:
        raise MemoryError("the device")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.worker, "run", fail)
        with pytest.raises(MemoryError, match="the device"):
            llm.generate("three", SHORT, use_tqdm=False)
    with pytest.raises(StepFailedError, match="MemoryError: the device") as raised:
        list(stream)
    assert isinstance(raised.value.__cause__, MemoryError)
    assert not llm.engine.has_work


# Interrupts


def test_an_interrupt_cancels_the_requests_of_its_call(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = first(llm, "hello", SHORT)
    step, calls = llm.engine.step, iter(range(100))

    def interrupted():
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["hello"] * 30, SHORT, use_tqdm=False)
    assert llm.engine._handles == {}
    assert first(llm, "hello", SHORT) == expected


def test_outputs_can_be_written_as_json(llm: LLM) -> None:
    """All values are plain Python, without tensors or numpy numbers."""
    from dataclasses import asdict

    (output,) = llm.generate("hello", replace(SHORT, logprobs=2), use_tqdm=False)
    assert json.loads(json.dumps(asdict(output)))["outputs"][0]["text"] == output.outputs[0].text


def test_log_probabilities_belong_to_their_rows(twin) -> None:
    """Some rows request log probabilities, and others do not."""
    oracle, llm = twin
    prompts = [tokens_of(5 + i, oracle.vocab_size, seed=i) for i in range(4)]
    params = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=wanted)
        for wanted in (None, 1, None, 0)
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    for prompt, wanted, output in zip(prompts, params, outputs, strict=True):
        answer = output.outputs[0]
        assert (answer.logprobs is None) == (wanted.logprobs is None)
        if answer.logprobs is not None:
            rows = torch.log_softmax(oracle.generate(prompt, 6)[1], -1)
            for token, row, by_id in zip(answer.token_ids, rows, answer.logprobs, strict=True):
                assert by_id[token].logprob == pytest.approx(row[token].item(), abs=1e-4)


def test_public_names_are_listed_before_they_are_imported() -> None:
    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(slotzero))
    assert all(hasattr(slotzero, name) for name in dir(slotzero))
