"""Tests of replies: several answers to a request, stop strings, log probabilities."""

import base64
from typing import Any

import pytest
from fake_engine import FakeClient, chat, complete, stream

from slotzero.server.answers import TokenRow
from slotzero.server.logprobs import LogprobShapes
from slotzero.server.messages import TokenLogprobs
from slotzero.text.tokenizer import Tokenizer


def test_n_answers_have_neighbouring_seeds() -> None:
    client = FakeClient(["one", "two", "three"])
    made = chat(client, n=3, seed=2**63 - 2)
    texts = [choice["message"]["content"] for choice in made["choices"]]
    assert texts == ["one", "two", "three"]
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2]
    assert [params["seed"] for _, _, params in client.submitted] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert made["usage"]["prompt_tokens"] == 21  # the prompt counts once
    assert made["usage"]["completion_tokens"] == 4 + 4 + 6
    assert len(set(client.closed)) == 3
    assert client.num_admitted == 1, "many answers are one request to a full server"


def test_n_answers_are_streamed_together() -> None:
    made = stream(FakeClient(["ab", "cd"]), "/v1/chat/completions", n=2)
    texts = ["", ""]
    for chunk in made:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
    assert texts == ["ab", "cd"]
    ends = [chunk["choices"][0] for chunk in made if chunk["choices"][0]["finish_reason"]]
    assert {choice["index"] for choice in ends} == {0, 1}


def test_prompts_times_n() -> None:
    client = FakeClient(["a", "b", "c", "d"])
    made = complete(client, prompt=["x", "yz"], n=2)
    assert [choice["text"] for choice in made["choices"]] == ["a", "b", "c", "d"]
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2, 3]
    assert [len(prompt) for _, prompt, _ in client.submitted] == [2, 2, 3, 3]
    assert made["usage"]["prompt_tokens"] == 5
    assert complete(client, prompt=[[1], [2, 3]])["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize("is_streamed", [False, True])
def test_echo(is_streamed: bool) -> None:
    for prompt in ("Say:", list(b"Say:")):
        if is_streamed:
            made = stream(FakeClient(" ok"), "/v1/completions", prompt=prompt, echo=True)
            assert made[0]["choices"][0]["text"].startswith("Say:")
            text = "".join(chunk["choices"][0]["text"] for chunk in made)
        else:
            made = complete(FakeClient(" ok"), prompt=prompt, echo=True)
            text = made["choices"][0]["text"]
        assert text == "Say: ok"


@pytest.mark.parametrize("step", [1, 2, 3, 50])
@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("stop", "text", "reason"),
    [
        ("END", "one EN two ", "stop"),
        (["two", "END"], "one EN ", "stop"),
        (["nothing", "EN "], "one ", "stop"),
        ("never", "one EN two END three", "stop"),
        ("threexyz", "one EN two END three", "stop"),
    ],
)
def test_stop_strings_across_tokens(
    step: int, is_streamed: bool, stop: Any, text: str, reason: str
) -> None:
    client = FakeClient("one EN two END three", step=step)
    if is_streamed:
        made = stream(client, "/v1/completions", stop=stop)
        said = "".join(chunk["choices"][0]["text"] for chunk in made)
        end = made[-1]["choices"][0]["finish_reason"]
    else:
        (choice,) = complete(client, stop=stop)["choices"]
        said, end = choice["text"], choice["finish_reason"]
    assert (said, end) == (text, reason)
    assert len(client.closed) == 1  # the engine is told


def test_a_stop_string_counts_what_was_generated() -> None:
    made = complete(FakeClient("abcdef"), stop="c")
    assert made["usage"]["completion_tokens"] == 3
    assert (
        complete(FakeClient("abc"), stop="b", include_stop_str_in_output=True)["choices"][0]["text"]
        == "ab"
    )


def test_length_is_a_finish_reason() -> None:
    made = complete(FakeClient("abcdef"), max_tokens=3)
    assert made["choices"][0]["finish_reason"] == "length"
    assert made["choices"][0]["text"] == "abc"


def test_chat_logprobs() -> None:
    made = chat(FakeClient("aé"), logprobs=True, top_logprobs=3)
    content = made["choices"][0]["logprobs"]["content"]
    x = {"token": "x", "logprob": -1.5, "bytes": [120]}
    never = {"token": "\ufffd", "logprob": -9999.0, "bytes": None}
    a = {"token": "a", "logprob": -0.5, "bytes": [97]}
    assert content[0] == a | {"top_logprobs": [a, x, never]}
    assert len(content) == 3  # a and the two halves of é, without the end of the sequence
    assert made["choices"][0]["logprobs"]["refusal"] is None
    plain = chat(FakeClient("a"), logprobs=True)["choices"][0]["logprobs"]["content"]
    assert plain == [a | {"top_logprobs": []}]


def test_streamed_chat_logprobs_are_the_same() -> None:
    whole = chat(FakeClient("stop here"), logprobs=True, top_logprobs=2, stop="her")
    rows = []
    for chunk in stream(
        FakeClient("stop here"), "/v1/chat/completions", logprobs=True, top_logprobs=2, stop="her"
    ):
        choice = chunk["choices"][0]
        if choice["logprobs"]:
            rows += choice["logprobs"]["content"]
            assert choice["delta"]["content"]
    assert rows == whole["choices"][0]["logprobs"]["content"]
    assert "".join(row["token"] for row in rows) == "stop "


def test_completion_logprobs() -> None:
    made = complete(FakeClient("ab"), logprobs=1)["choices"][0]["logprobs"]
    assert made == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5}, {"b": -0.5}],
        "text_offset": [0, 1],
    }
    assert complete(FakeClient("ab"), logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None
    streamed = stream(FakeClient("ab"), "/v1/completions", logprobs=1)
    rows = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert [offset for row in rows for offset in row["text_offset"]] == [0, 1]


@pytest.mark.parametrize("prompt", ["Hé", list("Hé".encode())])
@pytest.mark.parametrize("is_streamed", [False, True])
def test_the_log_probabilities_of_an_echo(prompt: Any, is_streamed: bool) -> None:
    asked: Any = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
    if is_streamed:
        chunks = stream(FakeClient("ab"), "/v1/completions", **asked)
        parts = [
            [
                chunk["choices"][0]["logprobs"]
                for chunk in chunks
                if chunk["choices"][0]["index"] == i
            ]
            for i in range(2)
        ]
        made = [
            {name: [entry for part in of_choice for entry in part[name]] for name in of_choice[0]}
            for of_choice in parts
        ]
    else:
        made = [choice["logprobs"] for choice in complete(FakeClient("ab"), **asked)["choices"]]
    half = "\N{REPLACEMENT CHARACTER}"
    tokens, offsets = ["H", half, half, "a", "b"], [0, 1, 1, 2, 3]
    if isinstance(prompt, str):  # then the tokenizer adds a token that is not text
        tokens, offsets = ["<bos>", *tokens], [0, *offsets]
    wanted = {
        "tokens": tokens,
        "token_logprobs": [None, *[-0.5] * (len(tokens) - 1)],
        "top_logprobs": [None, *({token: -0.5} for token in tokens[1:])],
        "text_offset": offsets,
    }
    assert made == [wanted, wanted]


def test_an_echo_begins_before_the_prompt_that_was_cut_off() -> None:
    asked: Any = {"prompt": "Hello", "truncate_prompt_tokens": 2, "echo": True, "logprobs": 0}
    (choice,) = complete(FakeClient("ab"), **asked)["choices"]
    assert choice["text"] == "Helloab"
    assert choice["logprobs"]["tokens"][:2] == ["l", "o"]
    assert choice["logprobs"]["text_offset"] == [3, 4, 5, 6, 7]  # with the end of the sequence
    assert choice["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_prompt_is_scored_without_an_answer(is_streamed: bool) -> None:
    asked: Any = {"prompt": [72, 105], "echo": True, "logprobs": 1, "max_tokens": 0}
    client = FakeClient("ab")
    if is_streamed:
        (chunk,) = stream(client, "/v1/completions", **asked)
        (choice,) = chunk["choices"]
    else:
        made = complete(client, **asked)
        (choice,) = made["choices"]
        assert made["usage"]["completion_tokens"] == 0
    assert (choice["text"], choice["finish_reason"]) == ("Hi", "length")
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
    assert client.params["max_tokens"] == 1, "an engine always generates"
    more: Any = {"min_tokens": 3, "guided_regex": "a+"}  # of an answer that is not sent
    for extra in ({}, more):
        made = complete(client, prompt="Hi", echo=True, max_tokens=0, **extra)
        assert made["choices"][0]["text"] == "Hi"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_echo_has_a_row_for_the_token_that_ended_the_answer(is_streamed: bool) -> None:
    """lm-eval drops the last row, and expects that it is the only generated token's."""
    asked: Any = {"prompt": [72, 105], "max_tokens": 1, "logprobs": 1, "echo": True}
    if is_streamed:
        chunks = stream(FakeClient(""), "/v1/completions", **asked)
        tokens = [t for chunk in chunks for t in chunk["choices"][0]["logprobs"]["tokens"]]
    else:
        (choice,) = complete(FakeClient(""), **asked)["choices"]
        assert (choice["text"], choice["finish_reason"]) == ("Hi", "stop")
        assert choice["logprobs"]["text_offset"] == [0, 1, 2]
        assert choice["logprobs"]["top_logprobs"][2] == {"<eos>": -0.5}
        tokens = choice["logprobs"]["tokens"]
    assert tokens == ["H", "i", "<eos>"]
    plain = complete(FakeClient(""), prompt=[72, 105], logprobs=1)["choices"][0]
    assert plain["logprobs"]["tokens"] == []


def test_special_tokens_in_the_text_of_a_prompt_are_echoed() -> None:
    asked: Any = {"echo": True, "logprobs": 0, "max_tokens": 0}
    for prompt, text, offsets in (
        ("ab<eos>cd", "ab<eos>cd", [0, 0, 1, 2, 7, 8]),
        ([97, 98, 257, 99, 100], "abcd", [0, 1, 2, 2, 3]),
    ):
        (choice,) = complete(FakeClient("x"), prompt=prompt, **asked)["choices"]
        assert (choice["text"], choice["logprobs"]["text_offset"]) == (text, offsets)


def test_of_tokens_with_one_text_the_most_likely_one_is_returned() -> None:
    """lm-eval compares the chosen token with the highest of these: was it the most likely one?"""
    half = Tokenizer.bytes_tokenizer().decode([200])
    row = TokenRow(200, 0, TokenLogprobs(-3.0, [201, 65], [-1.0, -2.0]))
    made = LogprobShapes(Tokenizer.bytes_tokenizer()).of_completion([row], 2)
    assert (made.tokens, made.token_logprobs) == ([half], [-3.0])
    assert made.top_logprobs == [{half: -1.0, "A": -2.0}]


def test_a_prompt_is_scored_once() -> None:
    client = FakeClient(["a", "b", "c", "d"])
    asked: Any = {"prompt": [[72, 105], [72, 111]], "n": 2, "logprobs": 1, "echo": True}
    made = complete(client, **asked)
    rows = [choice["logprobs"]["tokens"][:2] for choice in made["choices"]]
    assert rows == [["H", "i"], ["H", "i"], ["H", "o"], ["H", "o"]]
    assert [params["prompt_logprobs"] for _, _, params in client.submitted] == [1, None, 1, None]
    streamed = FakeClient(["a", "b"])  # no answer waits for another
    stream(streamed, "/v1/completions", **asked | {"prompt": [72, 105]})
    assert [params["prompt_logprobs"] for _, _, params in streamed.submitted] == [1, 1]


@pytest.mark.parametrize("send", [complete, chat])
@pytest.mark.parametrize(("text", "num_kept"), [("abc", 4), ("a.bc", 2)])
def test_chosen_experts_are_sent_as_base64(send: Any, text: str, num_kept: int) -> None:
    """The last token is the end of the sequence, or that of a stop string."""
    client = FakeClient(text, step=9, routes_experts=True)
    asked: dict[str, Any] = {"stop": "."} if num_kept == 2 else {}
    choice = send(client, **asked)["choices"][0]
    num_rows = len(client.submitted[0][1]) + num_kept - 1
    made = choice["routed_experts"]
    assert (made["shape"], made["dtype"]) == ([num_rows, 1, 2], "int16")
    assert base64.b64decode(made["data"]) == bytes(i % 256 for i in range(num_rows * 4))
    assert "routed_experts" not in send(FakeClient(text))["choices"][0]


def test_prompt_logprobs_in_the_shape_of_vllm() -> None:
    x = {"logprob": -1.5, "rank": 2, "decoded_token": "x"}
    wanted = [None, {"105": {"logprob": -0.5, "rank": 1, "decoded_token": "i"}, "120": x}]
    made = complete(FakeClient("ab"), prompt=[72, 105], prompt_logprobs=2, n=2)
    assert [choice["prompt_logprobs"] for choice in made["choices"]] == [wanted, wanted]
    alone = wanted[1]["105"] | {"rank": None}  # type: ignore[index]
    asked: Any = {"prompt": [72, 105], "prompt_logprobs": 0, "logprobs": 1, "echo": True}
    made = complete(FakeClient("ab"), **asked)
    assert made["choices"][0]["prompt_logprobs"] == [None, {"105": alone}]
    assert made["choices"][0]["logprobs"]["top_logprobs"][1] == {"i": -0.5}
    made = chat(FakeClient("ab"), prompt_logprobs=1)
    assert made["prompt_logprobs"][0] is None
    assert len(made["prompt_logprobs"]) == made["usage"]["prompt_tokens"]
    for plain in (complete(FakeClient("ab"))["choices"][0], chat(FakeClient("ab"))):
        assert "prompt_logprobs" not in plain


def test_tokens_for_a_slow_client_are_sent_in_one_chunk() -> None:
    made = stream(FakeClient("abcdef" * 20, step=1), "/v1/completions", max_tokens=200, logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in made) == "abcdef" * 20
    offsets = [at for chunk in made for at in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == list(range(120))
