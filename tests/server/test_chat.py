"""Tests of chat completions: replies byte by byte, streamed and whole, and accepted messages."""

import json
import re
from typing import Any

import pytest
from fake_engine import CHAT, FakeClient, ask, chat, refused, stream, tool_tokenizer

from slotzero import __version__


def test_a_chat() -> None:
    client = FakeClient("Hello!")
    made = chat(client)
    assert re.fullmatch("chatcmpl-[0-9a-f]{32}", made.pop("id"))
    assert made.pop("created") > 1_700_000_000
    assert made == {
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": f"slotzero-{__version__}",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello!", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 21,
            "completion_tokens": 7,
            "total_tokens": 28,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
    }
    assert client.prompt == "<bos>user: Hi<eos>assistant: "
    assert client.params == {"max_tokens": None}
    assert len(client.closed) == 1


def test_a_streamed_chat_byte_by_byte() -> None:
    response = ask(
        # otherwise tokens that arrive together are sent together
        FakeClient("Hé", step=2, pace=0.05),
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    )
    head = response.text[: response.text.index('"choices"')]
    assert re.fullmatch(
        r'data: {"id":"chatcmpl-[0-9a-f]{32}","object":"chat.completion.chunk","created":\d+,'
        rf'"model":"tiny","system_fingerprint":"slotzero-{re.escape(__version__)}",',
        head,
    )
    first = '{"role":"assistant","content":"","refusal":null}'
    usage = (
        '"usage":{"prompt_tokens":21,"completion_tokens":4,"total_tokens":25,'
        '"prompt_tokens_details":{"cached_tokens":3}}'
    )

    def line(delta: str, reason: str = "null") -> str:
        choice = f'{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{reason}}}'
        return f'{head}"choices":[{choice}],"usage":null}}\n\n'

    assert response.text == (
        line(first)
        + line('{"content":"H"}')  # the second byte is half a character
        + line('{"content":"é"}')
        + line("{}", '"stop"')
        + f'{head}"choices":[],{usage}}}\n\n'
        + "data: [DONE]\n\n"
    )
    assert response.headers["cache-control"] == "no-cache"


def test_without_include_usage_chunks_have_none() -> None:
    made = stream(FakeClient(), "/v1/chat/completions")
    assert all("usage" not in chunk for chunk in made)
    made = stream(FakeClient(), "/v1/completions", stream_options={"include_usage": False})
    assert all("usage" not in chunk and chunk["choices"] for chunk in made)


def test_messages_reach_the_template() -> None:
    client = FakeClient()
    chat(
        client,
        messages=[
            {"role": "developer", "content": "Be brief"},
            {"role": "user", "content": [{"type": "text", "text": "a"},
                                         {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": None, "audio": None,
             "function_call": None, "annotations": [], "tool_calls": None},
            {"role": "user", "content": "d", "name": "Eve"},
        ],
    )  # fmt: skip
    assert client.prompt == (
        "<bos>system: Be brief<eos>user: a\nb<eos>assistant: c<eos>user: d<eos>assistant: "
    )


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ("Hi", "messages"),
        ([{"content": "Hi"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": "x", "mood": 1}], "messages[0].mood"),
        ([{"role": "tool", "content": "x"}], "messages[0].tool_call_id"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages[0].tool_call_id"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "messages[0].content[0].type",
        ),
        (
            [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [
                {"id": "1", "function": {"name": "f", "arguments": "nope"}}]}],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([{"role": "user", "content": "half \ud800"}], "messages"),
    ],
)  # fmt: skip
def test_bad_messages_are_named(messages: Any, param: str) -> None:
    body = json.dumps(CHAT | {"messages": messages}).encode()
    response = ask(FakeClient(), "/v1/chat/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file"])
def test_parts_that_are_not_text_are_refused(kind: str) -> None:
    content = [{"type": "text", "text": "See:"}, {"type": kind, kind: {"url": "x"}}]
    messages = [*CHAT["messages"], {"role": "user", "content": content}]
    where = "messages[1].content[1].type"
    for path, body in (
        ("/v1/chat/completions", CHAT | {"messages": messages}),
        ("/tokenize", {"messages": messages}),
    ):
        error = refused(path, body)
        assert error["param"] == where
        assert error["message"] == f"{where}: {kind!r} is not supported, only text is"


def test_the_error_of_a_template_names_no_flag() -> None:
    tokenizer = tool_tokenizer("{{ raise_exception('no system role') }}")
    error = refused("/v1/chat/completions", CHAT, tokenizer=tokenizer)
    assert error["param"] == "messages"
    assert error["message"].endswith("rejects these messages: no system role")
