"""The HTTP application over a fake engine: what every request is answered with, byte by byte."""

import asyncio
import json
import logging
import math
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from schemathesis.checks import CHECKS

from slotzero import __version__, errors
from slotzero.cli import flags, serve
from slotzero.cli import main as cli
from slotzero.errors import (
    ConfigError,
    EngineDiedError,
    EngineUnavailableError,
    OverloadedError,
    RequestRefusedError,
    SlotzeroError,
)
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.structured import structure_error
from slotzero.server import fleet
from slotzero.server.app import make_app
from slotzero.server.messages import Loading, Stats, TokenDelta, TokenLogprobs
from slotzero.server.protocol import NEUTRAL, ChatRequest, CompletionRequest
from slotzero.server.settings import TOOL_CALL_PARSERS, ServerSettings
from slotzero.server.status import error_reply, status_of
from slotzero.server.tool_calls import (
    FORCED,
    HERMES,
    LLAMA,
    Argued,
    Called,
    CallFormat,
    CallParser,
    Said,
)
from slotzero.server.tools import FORMATS, choose_format
from slotzero.text.tokenizer import Tokenizer

EOS = 257
MAX_LEN = 512
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi", "max_tokens": 64}
STATS = Stats(
    running=1, waiting=0, slots=16, pages_used=2, pages_cached=3, pages=32, prompt_tokens=4,
    generated_tokens=5, prefix_asked_tokens=6, prefix_hit_tokens=7, preemptions=0, steps=8,
    replays={"decode[8]": 3}, eager={}, real_tokens={}, padded_tokens={}, failed_sizes={},
    steps_watched=0, violations=0,
)  # fmt: skip


# A fake engine


class FakeStream:
    def __init__(self, client: "FakeClient", request_id: str, grown: list[TokenDelta]) -> None:
        self._client, self._id, self._grown = client, request_id, grown
        self.is_closed = False

    def __aiter__(self) -> AsyncIterator[TokenDelta]:
        return self._read()

    async def _read(self) -> AsyncIterator[TokenDelta]:
        for i, grown in enumerate(self._grown):
            await asyncio.sleep(self._client.pace)
            if i == self._client.hangs_at:
                await asyncio.sleep(60)
            if i == self._client.dies_at:
                raise EngineDiedError("the engine's process ended")
            if self._client.refusal is not None:
                raise self._client.refusal
            yield grown

    async def aclose(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._client.closed.append(self._id)


class FakeClient:
    """Answers `text`, whatever is asked, in steps of so many tokens."""

    def __init__(
        self,
        text: str | list[str] = "Hello!",
        *,
        step: int = 1,
        state: str = "ready",
        hangs_at: int | None = None,
        dies_at: int | None = None,
        error: SlotzeroError | None = None,
        refusal: RequestRefusedError | None = None,
        ends_with_eos: bool = True,
        pace: float = 0.0,
    ) -> None:
        self.texts = [text] if isinstance(text, str) else text
        self.step, self.state, self.pace = step, state, pace
        self.hangs_at, self.dies_at = hangs_at, dies_at
        self.error, self.refusal, self.ends_with_eos = error, refusal, ends_with_eos
        self.settings: dict[str, Any] = {"model": "tiny:llama"}
        self.failure = ""
        self.progress: Loading | None = None
        self.info: Mapping[str, Any] = {
            "limits": {"max_model_len": MAX_LEN},
            "eos_token_ids": [EOS],
            "vocab_size": 259,
            "sizes": {"decode": [{"key": "decode[8]", "backend": "cpu", "seconds": 0.1, "bytes": 1,
                                  "failure": ""}]},
            "recording_seconds": 0.5,
            "sanitize": "off",
        }  # fmt: skip
        self.stats: Stats | None = STATS
        self.replicas = [self]
        self.submitted: list[tuple[str, list[int], dict[str, Any]]] = []
        self.closed: list[str] = []
        self.log: list[str] = []
        self.num_admitted = 0

    async def start(self) -> None:
        self.log.append("start")

    async def drain(self, grace: float) -> None:
        self.log.append(f"drain {grace:g}")

    async def stop(self) -> None:
        self.log.append("stop")

    def admit(self) -> None:
        self.num_admitted += 1

    def submit(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> FakeStream:
        if self.error is not None and len(self.submitted) >= getattr(self, "num_allowed", 0):
            raise self.error
        text = self.texts[len(self.submitted) % len(self.texts)]
        self.submitted.append((request_id, prompt, dict(params)))
        tokens = list(text.encode())
        if self.ends_with_eos:
            tokens.append(EOS)
        limit = params.get("max_tokens") or MAX_LEN
        reason = "stop" if len(tokens) <= limit else "length"
        return FakeStream(self, request_id, self._grown(request_id, tokens[:limit], params, reason))

    def _grown(
        self, request_id: str, tokens: list[int], params: Mapping[str, Any], reason: str
    ) -> list[TokenDelta]:
        wanted = params.get("logprobs")
        steps = [tokens[i : i + self.step] for i in range(0, len(tokens), self.step)]
        return [
            TokenDelta(
                request_id,
                step,
                [] if wanted is None else [_logprobs(token, wanted) for token in step],
                3,
                reason if i == len(steps) - 1 else None,
            )
            for i, step in enumerate(steps)
        ]

    @property
    def params(self) -> dict[str, Any]:
        """Of the last request."""
        return self.submitted[-1][2]

    @property
    def prompt(self) -> str:
        return Tokenizer.bytes_tokenizer().decode(self.submitted[-1][1], skip_special_tokens=False)


def _logprobs(token: int, wanted: int) -> TokenLogprobs:
    top = [token, ord("x"), 0xE2][:wanted]
    return TokenLogprobs(-0.5, top, [-0.5, -1.5, -math.inf][:wanted])


def tool_tokenizer(template: str) -> Tokenizer:
    plain = Tokenizer.bytes_tokenizer()
    return Tokenizer(plain._backend, plain.special_tokens, template)


def app_of(
    client: FakeClient,
    tokenizer: Tokenizer | None = None,
    sampling: Mapping[str, Any] | None = None,
    **given: Any,
) -> Any:
    settings = ServerSettings(**{"served_model_name": ("tiny", "other/name")} | given)
    return make_app(client, tokenizer or Tokenizer.bytes_tokenizer(), settings, sampling)


def ask(
    client: FakeClient,
    path: str,
    body: Any = None,
    *,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
    content: bytes | None = None,
    tokenizer: Tokenizer | None = None,
    **given: Any,
) -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(client, tokenizer, **given))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            how = method or ("GET" if body is None and content is None else "POST")
            if content is not None:
                sent = {"Content-Type": "application/json"} | dict(headers or {})
                return await http.request(how, path, content=content, headers=sent)
            return await http.request(how, path, json=body, headers=headers)

    return asyncio.run(call())


def chat(client: FakeClient | None = None, tokenizer: Tokenizer | None = None, **body: Any) -> Any:
    response = ask(client or FakeClient(), "/v1/chat/completions", CHAT | body, tokenizer=tokenizer)
    assert response.status_code == 200, response.text
    return response.json()


def complete(client: FakeClient | None = None, **body: Any) -> Any:
    response = ask(client or FakeClient(), "/v1/completions", COMPLETION | body)
    assert response.status_code == 200, response.text
    return response.json()


def chunks_of(response: httpx.Response) -> list[Any]:
    assert response.headers["content-type"].startswith("text/event-stream")
    *lines, end = response.text.split("\n\n")
    assert end == ""
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) for line in lines[:-1]]


def stream(client: FakeClient, path: str, **body: Any) -> list[Any]:
    tokenizer = body.pop("tokenizer", None)
    base = CHAT if "chat" in path else COMPLETION
    return chunks_of(ask(client, path, base | body | {"stream": True}, tokenizer=tokenizer))


def refused(
    path: str, body: Any, client: FakeClient | None = None, status: int = 400, **given: Any
) -> Any:
    response = ask(client or FakeClient(), path, body, **given)
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert len(error["message"]) < 700
    return error


def refused_chat(status: int = 400, client: FakeClient | None = None, **body: Any) -> Any:
    return refused("/v1/chat/completions", CHAT | body, client, status)


def refused_completion(status: int = 400, client: FakeClient | None = None, **body: Any) -> Any:
    return refused("/v1/completions", COMPLETION | body, client, status)


# Chat


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
        FakeClient("Hé", step=2, pace=0.05),  # else what comes together is sent together
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
        + line('{"content":"H"}')  # the second byte was half a character
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


def test_messages_as_templates_know_them() -> None:
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
def test_parts_that_are_no_text_are_said_to_be_none(kind: str) -> None:
    content = [{"type": "text", "text": "See:"}, {"type": kind, kind: {"url": "x"}}]
    messages = [*CHAT["messages"], {"role": "user", "content": content}]
    where = "messages[1].content[1].type"
    for path, body in (
        ("/v1/chat/completions", CHAT | {"messages": messages}),
        ("/tokenize", {"messages": messages}),
    ):
        error = refused(path, body)
        assert error["param"] == where
        assert error["message"] == f"{where}: {kind!r}, but this model takes text alone"


def test_what_a_template_refuses_names_no_flag() -> None:
    tokenizer = tool_tokenizer("{{ raise_exception('no system role') }}")
    error = refused("/v1/chat/completions", CHAT, tokenizer=tokenizer)
    assert error["param"] == "messages"
    assert error["message"].endswith("refuses these messages: no system role")


# Fields


def test_parameters_reach_the_engine() -> None:
    client = FakeClient()
    same = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "frequency_penalty": 1.5,
        "presence_penalty": -1, "repetition_penalty": 1.1, "seed": 7, "min_tokens": 2,
        "ignore_eos": True, "stop_token_ids": [1], "skip_special_tokens": False,
        "include_stop_str_in_output": True,
    }  # fmt: skip
    chat(client, **same, max_completion_tokens=9, logit_bias={"5": -100})
    assert client.params == same | {"max_tokens": 9, "logit_bias": {5: -100.0}}
    chat(client, max_tokens=5)
    assert client.params == {"max_tokens": 5}
    ask(client, "/v1/completions", {"model": "tiny", "prompt": [1, 2]})
    assert client.params == {"max_tokens": 16}
    assert client.submitted[-1][1] == [1, 2]


def test_every_field_of_openai_is_known() -> None:
    for theirs, ours in (
        (chat_params.CompletionCreateParamsStreaming, ChatRequest),
        (completion_params.CompletionCreateParamsStreaming, CompletionRequest),
    ):
        assert set(theirs.__annotations__) - set(ours.model_fields) == set()
    mine = set(ChatRequest.model_fields) | set(CompletionRequest.model_fields)
    assert set(NEUTRAL) <= mine


@pytest.mark.parametrize("name", NEUTRAL)
def test_what_is_not_supported_is_refused_by_name(name: str) -> None:
    is_chat = name in ChatRequest.model_fields
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    base = CHAT if is_chat else COMPLETION
    for value in ("odd", 5, True, {"a": 1}, ["x"], 0):
        assert refused(path, base | {name: value})["param"] == name
    for value in (None, *NEUTRAL[name]):
        assert ask(FakeClient(), path, base | {name: value}).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"user": "me", "metadata": {"a": "b"}, "safety_identifier": "x", "prompt_cache_key": "k"},
        {"response_format": {"type": "text"}, "tool_choice": "none", "logprobs": False},
        {"stream": None, "n": None, "stop": None, "logit_bias": None, "seed": None},
        {"parallel_tool_calls": True, "tools": None, "top_logprobs": None},
    ],
)
def test_what_asks_for_nothing_is_accepted(body: dict[str, Any]) -> None:
    client = FakeClient()
    chat(client, **body)
    assert client.params == {"max_tokens": None}


WRONG_FIELDS = [
    ({"temperature": -1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 2}, "top_p"),
    ({"n": 0}, "n"),
    ({"n": -5}, "n"),
    ({"n": 1000}, "n"),
    ({"n": "2"}, "n"),
    ({"n": 1.0}, "n"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 65, "max_tokens": 64}, "min_tokens"),
    ({"top_k": -2}, "top_k"),
    ({"min_p": -0.1}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 2**63}, "seed"),
    ({"seed": 1.5}, "seed"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"a": 1}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias"),
    ({"logit_bias": {str(i): 1 for i in range(100_000)}}, "logit_bias"),
    ({"logit_bias": {"1": "x"}}, "logit_bias.1"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": [str(i) for i in range(100_000)]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"stop": "x" * 257}, "stop"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation"),
    ({"stream": True, "stream_options": {"more": 1}}, "stream_options.more"),
    ({"no_such_field": 1}, "no_such_field"),
    ({"model": 3}, "model"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"guided_json": "{"}, "guided_json"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_choice": [str(i) for i in range(100_000)]}, "guided_choice"),
    ({"guided_regex": "a" * 100_001}, "guided_regex"),
    ({"guided_json": {"enum": ["a" * 100_000]}}, "guided_json"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
    ({"structured_outputs": {"json": {}, "regex": "a"}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a"}, "guided_regex": "a"}, "guided_regex"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
     "structured_outputs"),
    ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
    ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": "start: x"}}, "structured_outputs.grammar"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "param"), WRONG_FIELDS)
def test_a_wrong_field_is_named(body: dict[str, Any], param: str) -> None:
    client = FakeClient()
    for error in (refused_chat(client=client, **body), refused_completion(client=client, **body)):
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert client.submitted == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 3, "max_tokens": 4}, "max_tokens"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            "response_format.json_schema.schema",
        ),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"messages": [{"role": "user", "content": ""}] * 2049}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}] * 129}, "tools"),
    ],
)
def test_a_wrong_field_of_a_chat_is_named(body: dict[str, Any], param: str) -> None:
    assert refused_chat(**body)["param"] == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": ["a", 3]}, "prompt[1]"),
        ({"prompt": ["a"] * 600, "n": 2}, "prompt"),
        ({"prompt": [[1, 2], [3, "4"]]}, "prompt[1][1]"),
        ({"prompt": [1.5] * 100_000}, "prompt[0]"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(body: dict[str, Any], param: str) -> None:
    assert refused_completion(**body)["param"] == param


def test_a_field_that_is_missing_is_named() -> None:
    assert refused("/v1/chat/completions", {"model": "tiny"})["param"] == "messages"
    assert refused("/v1/completions", {"prompt": "x"})["param"] == "model"


@pytest.mark.parametrize(
    ("asked", "structure"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {"response_format": {"type": "json_schema", "json_schema": {
                "name": "x", "strict": True, "schema": {"type": "object"}}}},
            {"json_schema": {"type": "object"}},
        ),
        ({"guided_json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"guided_json": '{"type": "object"}'}, {"json_schema": {"type": "object"}}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json": {"a": 1}}}, {"json_schema": {"a": 1}}),
        ({"structured_outputs": {"json": '{"a": 1}', "regex": None}}, {"json_schema": {"a": 1}}),
        ({"structured_outputs": {"regex": "a+", "json_object": False}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
    ],
)  # fmt: skip
def test_structure_reaches_the_engine(asked: dict[str, Any], structure: dict[str, Any]) -> None:
    client = FakeClient()
    chat(client, **asked)
    assert client.params["structured_outputs"] == structure
    complete(client, **asked)
    assert client.params["structured_outputs"] == structure


def test_an_answer_that_its_grammar_ends_is_whole() -> None:
    client = FakeClient("yes", ends_with_eos=False)  # it ends by "stop", but not by a stop token
    made = chat(client, guided_choice=["yes", "no"])
    assert made["choices"][0]["message"]["content"] == "yes"


def structure_refusal(why: str, kind: Any = None) -> RequestRefusedError:
    error = structure_error(why, kind)
    return RequestRefusedError("RequestError", str(error), error.param, error.label)


def test_a_structure_that_is_refused_is_named() -> None:
    refusal = structure_refusal("no such type", "json_schema")
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "odd"}}}
    error = refused_chat(client=FakeClient(refusal=refusal), response_format=schema)
    assert error["param"] == "response_format"
    refusal = RequestRefusedError("RequestError", "too hard")
    error = refused_completion(client=FakeClient(refusal=refusal), guided_regex="a")
    assert error["param"] == "guided_regex"


@pytest.mark.parametrize(
    ("asked", "kind", "name"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", "response_format"),
        ({"guided_json": {}}, "json_schema", "guided_json"),
        ({"guided_regex": "a"}, "regex", "guided_regex"),
        ({"guided_choice": ["a"]}, "choice", "guided_choice"),
        ({"structured_outputs": {"json": {}}}, "json_schema", "structured_outputs.json"),
        ({"structured_outputs": {"regex": "a"}}, "regex", "structured_outputs.regex"),
    ],
)
def test_a_structure_has_the_clients_name_in_the_text_too(
    asked: dict[str, Any], kind: str, name: str
) -> None:
    for refusal, shown in (
        (structure_refusal("wrong: regex", kind), f"{name}: wrong: regex"),
        (structure_refusal("no token can begin"), f"{name}: no token can begin"),
    ):
        client = FakeClient(refusal=refusal)
        for error in (
            refused_chat(client=client, **asked),
            refused_completion(client=client, **asked),
        ):
            assert (error["param"], error["message"]) == (name, shown)


def test_a_tool_whose_schema_is_wrong_is_named() -> None:
    error = refused(
        "/v1/chat/completions",
        CHAT | {"tools": [WEATHER], "tool_choice": "required"},
        FakeClient(refusal=structure_refusal("no such type", "json_schema")),
        tokenizer=tool_tokenizer(HERMES_TEMPLATE),
    )
    assert (error["param"], error["message"]) == ("tools", "tools: no such type")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"max_completion_tokens": 0}, "max_completion_tokens=0: must be at least 1; "),
        ({"max_tokens": 0}, "max_tokens=0: must be at least 1; "),
        (
            {"max_completion_tokens": 3, "min_tokens": 5},
            "min_tokens=5: must be at least 0 and at most 3, the limit",
        ),
        ({"guided_choice": []}, "guided_choice=[] is empty; "),
        ({"guided_regex": "a" * 100_001}, "guided_regex: 100001 characters, at most 100000"),
        ({"guided_json": "[1]"}, "guided_json=[1] must be a JSON object"),
        (
            {"guided_regex": "a\ud800"},
            "guided_regex has half a character at position 1; send valid Unicode",
        ),
        (
            {"structured_outputs": {"choice": ["a", "\ud800"]}},
            "structured_outputs.choice[1] has half a character at position 0; ",
        ),
        (
            {"structured_outputs": {"json": {}, "regex": "a"}},
            "structured_outputs: give one of json, json_object, regex, choice, got json and regex",
        ),
    ],
)
def test_the_text_of_an_error_names_what_was_sent(body: dict[str, Any], message: str) -> None:
    content = json.dumps(CHAT | body).encode()
    response = ask(FakeClient(), "/v1/chat/completions", content=content)
    assert response.status_code == 400
    assert response.json()["error"]["message"].startswith(message)


# Answers


def test_n_answers_have_neighbouring_seeds() -> None:
    client = FakeClient(["one", "two", "three"])
    made = chat(client, n=3, seed=2**63 - 2)
    texts = [choice["message"]["content"] for choice in made["choices"]]
    assert texts == ["one", "two", "three"]
    assert [choice["index"] for choice in made["choices"]] == [0, 1, 2]
    assert [params["seed"] for _, _, params in client.submitted] == [2**63 - 2, 2**63 - 1, -(2**63)]
    assert made["usage"]["prompt_tokens"] == 21  # once
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


def test_length_is_a_reason() -> None:
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
    assert len(content) == 3  # a, and two halves of é; not the end of the sequence
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


def test_what_comes_while_the_client_is_slow_comes_in_one() -> None:
    made = stream(FakeClient("abcdef" * 20, step=1), "/v1/completions", max_tokens=200, logprobs=1)
    assert "".join(chunk["choices"][0]["text"] for chunk in made) == "abcdef" * 20
    offsets = [at for chunk in made for at in chunk["choices"][0]["logprobs"]["text_offset"]]
    assert offsets == list(range(120))


# Tools

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
_MESSAGES = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls %}[{{ call.function.name }} "
    "{{ call.function.arguments | tojson }}]{% endfor %}{% endfor %}"
)
HERMES_TEMPLATE = "{% if tools %}{{ tools | tojson }} use <tool_call>\n{% endif %}" + _MESSAGES
LLAMA_TEMPLATE = "{% if tools %}{{ tools | tojson }} <|python_tag|>\n{% endif %}" + _MESSAGES
ODD_TEMPLATE = "{% if tools %}{{ tools | tojson }} call as [f(x)]\n{% endif %}" + _MESSAGES
PARIS = '{"name": "weather", "arguments": {"city": "Paris"}}'
PARIS_LLAMA = '{"name": "weather", "parameters": {"city": "Paris"}}'
NOW = '{"name": "time", "arguments": {}}'


def parsed(form: CallFormat, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """-> text, [(name, arguments)]"""
    parser = CallParser(form, {"weather", "time"})
    text, calls, ids = "", [], []
    for events in (*(parser.push(piece) for piece in pieces), parser.close()):
        for event in events:
            if isinstance(event, Said):
                text += event.text
            elif isinstance(event, Called):
                assert event.index == len(calls)
                calls.append((event.name, ""))
                ids.append(event.id)
            else:
                assert isinstance(event, Argued)
                name, arguments = calls[event.index]
                calls[event.index] = (name, arguments + event.text)
    assert len(set(ids)) == len(calls) == parser.num_calls
    assert parser.num_calls - parser.num_done in (0, 1)  # the last may be cut off
    return text, calls


CITY = ("weather", '{"city": "Paris"}')
PARSED = [
    (HERMES, "just text <tool", "just text <tool", []),
    (HERMES, f"<tool_call>\n{PARIS}\n</tool_call>", "", [CITY]),
    (HERMES, f"I look.\n<tool_call>{PARIS}</tool_call>", "I look.", [CITY]),
    (
        HERMES,
        f"<tool_call>{PARIS}</tool_call>\n<tool_call>{NOW}</tool_call>\n",
        "",
        [CITY, ("time", "{}")],
    ),
    (HERMES, f"a <tool_call>{PARIS}</tool_call> b", "ab", [CITY]),
    (HERMES, f"<tool_call>{PARIS}", "", [CITY]),
    (HERMES, f"<tool_call>{PARIS}</tool_", "", [CITY]),
    (HERMES, f"<tool_call>{PARIS[:-6]}", "", [("weather", '{"city": "Pa')]),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (HERMES, "<tool_call>no json</tool_call>", "<tool_call>no json</tool_call>", []),
    (HERMES, '<tool_call>{"a": 1}</tool_call>x', '<tool_call>{"a": 1}</tool_call>x', []),
    (HERMES, '<tool_call>{"arguments": {"x": "}"}, "name": "f"}', "", [("f", '{"x": "}"}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": null}', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}', "", [("f", "[1]")]),
    (HERMES, '<tool_call>{"name": "time"}</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"id": 3, "name": "time"}</tool_call>', "", [("time", "{}")]),
    (HERMES, '<tool_call>{"name": 3, "x": {}}', '<tool_call>{"name": 3, "x": {}}', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"q": "a\\"}{[", "b": [{}]}}', "",
     [("f", '{"q": "a\\"}{[", "b": [{}]}')]),
    (HERMES, "  \n text \n", "  \n text \n", []),
    (LLAMA, PARIS_LLAMA, "", [CITY]),
    (LLAMA, f" \n{PARIS_LLAMA}; {PARIS_LLAMA}", "", [CITY, CITY]),
    (LLAMA, f"<|python_tag|>{PARIS_LLAMA}", "", [CITY]),
    (LLAMA, f"Wait.<|python_tag|>{PARIS_LLAMA};", "Wait.", [CITY]),
    (LLAMA, '{"type": "function", "name": "time", "parameters": {}}', "", [("time", "{}")]),
    (LLAMA, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LLAMA, '{"city": "Rome"} is JSON', '{"city": "Rome"} is JSON', []),
    (LLAMA, '{"name": "weather"', '{"name": "weather"', []),
    (LLAMA, "{oh", "{oh", []),
    (LLAMA, "<|python", "<|python", []),
    (LLAMA, "<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    (LLAMA, f"No {PARIS_LLAMA}", f"No {PARIS_LLAMA}", []),
    (FORCED, f" {PARIS}\n", "", [CITY]),
    (FORCED, "", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "said", "calls"), PARSED)
def test_calls_are_read_however_they_are_cut(
    form: CallFormat, text: str, said: str, calls: list[tuple[str, str]]
) -> None:
    for step in (1, 2, 3, 7, len(text) or 1):
        pieces = [text[i : i + step] for i in range(0, len(text), step)]
        assert parsed(form, pieces) == (said, calls)


_FRAGMENTS = [
    "<tool_call>", "</tool_call>", "<|python_tag|>", "<tool_", "{", "}", "[", "]", '"', "\\", ",",
    ":", ";", " ", "\n", "name", "arguments", "time", '"name": "time"', '"arguments": {', PARIS,
    PARIS_LLAMA, "text",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([HERMES, LLAMA, FORCED]),
    st.lists(st.sampled_from(_FRAGMENTS), max_size=14),
    st.randoms(use_true_random=False),
)
def test_any_text_is_read_alike_in_pieces_and_whole(
    form: CallFormat, fragments: list[str], random: Any
) -> None:
    text = "".join(fragments)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(5))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    whole, cut = parsed(form, [text]), parsed(form, pieces)
    assert cut == whole
    if not whole[1]:
        assert whole[0] == text  # nothing is lost


def test_arguments_are_given_as_they_come() -> None:
    parser = CallParser(HERMES, {"weather"})
    assert parser.push('<tool_call>{"name": "weather", "argu') == []
    called, first = parser.push('ments": {"city": "Pa')
    assert isinstance(called, Called)
    assert called.name == "weather"
    assert first == Argued(0, '{"city": "Pa')
    assert parser.push("ris") == [Argued(0, "ris")]
    assert parser.push('"}}</tool_call>') == [Argued(0, '"}')]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (HERMES_TEMPLATE, f"<tool_call>\n{PARIS}\n</tool_call>"),
        (LLAMA_TEMPLATE, PARIS_LLAMA),
        (LLAMA_TEMPLATE, "<|python_tag|>" + PARIS_LLAMA),
    ],
)
@pytest.mark.parametrize("step", [1, 4, 100])
def test_a_tool_call(template: str, text: str, step: int) -> None:
    tokenizer, client = tool_tokenizer(template), FakeClient(text, step=step)
    (choice,) = chat(client, tokenizer, tools=[WEATHER, TIME])["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    (call,) = message.pop("tool_calls")
    assert message == {"role": "assistant", "content": None, "refusal": None}
    assert re.fullmatch("call_[0-9a-f]{24}", call.pop("id"))
    function = {"name": "weather", "arguments": '{"city": "Paris"}'}
    assert call == {"type": "function", "function": function}
    assert json.dumps(WEATHER) in client.prompt  # the model was told
    assert client.params["skip_special_tokens"] is False


@pytest.mark.parametrize(
    ("template", "text"),
    [(HERMES_TEMPLATE, f"So:<tool_call>{PARIS}</tool_call>"), (LLAMA_TEMPLATE, PARIS_LLAMA)],
)
def test_a_streamed_tool_call(template: str, text: str) -> None:
    made = stream(
        FakeClient(text, step=3, pace=0.005),
        "/v1/chat/completions",
        tools=[WEATHER],
        tokenizer=tool_tokenizer(template),
    )
    deltas = [chunk["choices"][0]["delta"] for chunk in made]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert calls[0]["type"] == "function"
    assert calls[0]["id"].startswith("call_")
    assert all(set(call) == {"index", "function"} for call in calls[1:])
    assert all(call["index"] == 0 for call in calls)
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert json.loads(arguments) == {"city": "Paris"}
    assert len(calls) > 3
    assert deltas[-1] == {}
    assert made[-1]["choices"][0]["finish_reason"] == "tool_calls"
    content = "".join(delta.get("content", "") for delta in deltas)
    assert content == ("So:" if "So:" in text else "")


def test_text_beside_tools_stays_text() -> None:
    tokenizer = tool_tokenizer(HERMES_TEMPLATE)
    (choice,) = chat(FakeClient("No need. <b>"), tokenizer, tools=[WEATHER])["choices"]
    assert choice["message"]["content"] == "No need. <b>"
    assert "tool_calls" not in choice["message"]
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_says_length() -> None:
    tokenizer, client = tool_tokenizer(HERMES_TEMPLATE), FakeClient(f"<tool_call>{PARIS}")
    (choice,) = chat(client, tokenizer, tools=[WEATHER], max_tokens=55)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "P'
    forced = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 44}
    (choice,) = chat(FakeClient(PARIS), tokenizer, **forced)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "P'


def test_one_call_and_no_more() -> None:
    two = f"<tool_call>{PARIS}</tool_call><tool_call>{NOW}</tool_call>"
    for step in (1, 500):
        client = FakeClient(two, step=step)
        tokenizer = tool_tokenizer(HERMES_TEMPLATE)
        tools = {"tools": [WEATHER, TIME], "parallel_tool_calls": False}
        (choice,) = chat(client, tokenizer, **tools)["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]
        assert choice["finish_reason"] == "tool_calls"
        assert len(client.closed) == 1
        both = chat(client, tokenizer, tools=[WEATHER, TIME])["choices"][0]["message"]["tool_calls"]
        assert len(both) == 2


def test_a_choice_that_forces_a_call() -> None:
    tokenizer, client = tool_tokenizer(HERMES_TEMPLATE), FakeClient(PARIS)
    named = {"type": "function", "function": {"name": "weather"}}
    (choice,) = chat(client, tokenizer, tools=[WEATHER, TIME], tool_choice=named)["choices"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "weather"
    assert choice["finish_reason"] == "tool_calls"
    schema = client.params["structured_outputs"]["json_schema"]
    assert schema["properties"]["name"] == {"const": "weather"}
    assert schema["properties"]["arguments"].items() >= WEATHER["function"]["parameters"].items()
    chat(client, tokenizer, tools=[WEATHER, TIME], tool_choice="required")
    assert len(client.params["structured_outputs"]["json_schema"]["anyOf"]) == 2


def test_a_strict_tool_is_enforced_only_where_a_call_is_forced() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    client = FakeClient([f"<tool_call>{PARIS}</tool_call>", PARIS])
    for choice, is_enforced in (("auto", False), ("required", True)):
        tokenizer = tool_tokenizer(HERMES_TEMPLATE)
        (made,) = chat(client, tokenizer, tools=[strict], tool_choice=choice)["choices"]
        assert made["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "Paris"}'
        assert ("structured_outputs" in client.params) == is_enforced


def test_tool_choice_none_keeps_tools_out() -> None:
    client = FakeClient(f"<tool_call>{PARIS}</tool_call>")
    (choice,) = chat(client, tool_tokenizer(HERMES_TEMPLATE), tools=[WEATHER], tool_choice="none")[
        "choices"
    ]
    assert choice["message"]["content"].startswith("<tool_call>")
    assert "weather" not in client.prompt
    chat(client, tools=[WEATHER], tool_choice="none")  # even where no template knows tools


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (
            {"tools": [TIME], "tool_choice": {"type": "function", "function": {"name": "odd"}}},
            "tool_choice",
        ),
        ({"tools": [TIME], "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TIME], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TIME], "response_format": {"type": "json_object"}}, "response_format"),
        ({"tools": [TIME], "tool_choice": "required", "guided_regex": "a"}, "guided_regex"),
    ],
)
def test_tools_that_cannot_be_kept_are_refused(body: dict[str, Any], param: str) -> None:
    error = refused("/v1/chat/completions", CHAT | body, tokenizer=tool_tokenizer(HERMES_TEMPLATE))
    assert error["param"] == param


def test_a_conversation_with_tools_goes_on() -> None:
    client = FakeClient("It rains.")
    chat(
        client,
        tool_tokenizer(HERMES_TEMPLATE),
        tools=[WEATHER],
        messages=[
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "1", "type": "function",
                 "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}]},
            {"role": "tool", "tool_call_id": "1", "content": "yes"},
        ],
    )  # fmt: skip
    assert client.prompt.endswith('assistant: [weather {"city": "Paris"}]tool: yes')


def test_the_format_is_found_in_the_template() -> None:
    assert choose_format("auto", HERMES_TEMPLATE) is HERMES
    assert choose_format("auto", LLAMA_TEMPLATE) is LLAMA
    assert choose_format("llama", HERMES_TEMPLATE) is LLAMA
    assert choose_format("hermes", ODD_TEMPLATE) is HERMES
    assert {*FORMATS, "auto", "none"} == {*TOOL_CALL_PARSERS}


@pytest.mark.parametrize(
    ("setting", "template", "why"),
    [
        ("auto", "{{ messages }}", "no chat template that shows them"),
        ("hermes", "{{ messages }}", "no chat template that shows them"),
        ("auto", None, "no chat template that shows them"),
        ("auto", ODD_TEMPLATE, "serve it with --tool-call-parser hermes or llama"),
        ("none", HERMES_TEMPLATE, "switched off on this server (--tool-call-parser none)"),
        ("none", "{{ messages }}", "switched off on this server (--tool-call-parser none)"),
    ],
)
def test_why_tools_are_refused(setting: str, template: str | None, why: str) -> None:
    plain = Tokenizer.bytes_tokenizer()
    error = refused(
        "/v1/chat/completions",
        CHAT | {"tools": [WEATHER]},
        tokenizer=Tokenizer(plain._backend, plain.special_tokens, template),
        tool_call_parser=setting,
    )
    assert error["param"] == "tools"
    assert why in error["message"]
    whys = ("no chat template", "serve it with", "switched off")
    assert sum(one in error["message"] for one in whys) == 1


# What is wrong before any field is


@pytest.mark.parametrize(
    "content",
    [
        b"{nope",
        b"",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe",
        b'{"a":' * 100_000,
        b"[" * 100_000,
        b'{"model": "tiny", "prompt": ' + b"9" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "x", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "x", "\\ud800": 1}',
    ],
)
def test_bodies_that_are_no_request(content: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = ask(FakeClient(), path, content=content, method="POST")
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "JSON" in error["message"] or error["param"]


def test_json_must_say_that_it_is_json() -> None:
    """A form that some web page sends cannot pass for a request."""
    body = json.dumps(COMPLETION).encode()
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        response = ask(
            FakeClient(), "/v1/completions", content=body, headers={"Content-Type": kind}
        )
        assert response.status_code == 400
        assert "Content-Type" in response.json()["error"]["message"]


def test_large_bodies() -> None:
    client = FakeClient()
    error = refused_completion(413, client, prompt="x" * (10 << 20))
    assert error["code"] == "request_too_large"

    async def body() -> AsyncIterator[bytes]:
        for _ in range(6):
            yield b" " * (1 << 20)

    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app_of(client))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            headers = {"Content-Type": "application/json"}
            return await http.post("/v1/completions", content=body(), headers=headers)

    response = asyncio.run(call())  # without a length
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert refused("/v1/completions", COMPLETION, status=413, max_request_bytes=10)
    assert client.submitted == []


@pytest.mark.parametrize("prompt", ["x" * 511, "x" * 100_000, [1] * 512, ["x", "y" * 600]])
def test_prompts_longer_than_the_context(prompt: Any) -> None:
    client = FakeClient()
    error = refused_completion(client=client, prompt=prompt)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    if isinstance(prompt, str):
        message = {"role": "user", "content": prompt}
        error = refused_chat(client=client, messages=[message])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert client.submitted == []


def test_models_that_are_not_served() -> None:
    for body in ({"model": "gpt-5"}, {"model": "x" * 5000}, {"model": ""}):
        error = refused_chat(404, **body)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert ask(FakeClient(), "/v1/completions", COMPLETION | {"model": "other/name"}).is_success


def test_routes_that_do_not_exist() -> None:
    error = refused("/chat/completions", CHAT, status=404)
    assert error["code"] == "not_found"
    assert error["message"].startswith("no route /chat/completions; OpenAI's begin with /v1")
    error = refused("/v1/completions", None, status=405)
    assert error["code"] == "method_not_allowed"
    assert error["message"] == "/v1/completions does not take GET"


document = schemathesis.openapi.from_asgi("/openapi.json", app_of(FakeClient("ok")))


@document.exclude(path="/live").parametrize()
@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
def test_whatever_is_sent_the_reply_is_as_documented(case: Any) -> None:
    if isinstance(case.body, dict) and "model" in case.body:
        case.body = {k: v for k, v in case.body.items() if k not in NEUTRAL} | {"model": "tiny"}
    response = case.call()
    assert response.status_code < 500
    # what a schema cannot say, how fields depend on each other, is refused with 400
    case.validate_response(response, excluded_checks=[CHECKS.get_one("positive_data_acceptance")])


# Keys, ids, logs


def test_keys() -> None:
    keys = {"api_key": ("first", "second")}
    for path in ("/v1/models", "/version", "/metrics", "/server_info", "/live", "/openapi.json"):
        error = refused(path, None, status=401, **keys)
        assert error["code"] == "invalid_api_key"
    for wrong in ("Bearer third", "Bearer", "Bearer ", "Basic first", "first", "Bearer first x"):
        headers = {"Authorization": wrong}
        response = ask(FakeClient(), "/v1/models", headers=headers, **keys)
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
    response = ask(FakeClient(), "/v1/completions", COMPLETION, **keys)
    assert response.status_code == 401
    for right in ("Bearer first", "bearer second"):
        headers = {"Authorization": right}
        assert ask(FakeClient(), "/v1/models", headers=headers, **keys).is_success
    assert ask(FakeClient(), "/health", **keys).is_success


def test_odd_bytes_are_wrong_keys() -> None:
    async def call(key: bytes) -> int:
        transport = httpx.ASGITransport(app_of(FakeClient(), api_key=("first",)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return (await http.get("/v1/models", headers=[(b"Authorization", key)])).status_code

    assert asyncio.run(call(b"Bearer \xff\xfe")) == 401
    assert asyncio.run(call(b"Bearer first")) == 200


@pytest.mark.parametrize(
    "bad", ["a b", "a/b", "x" * 129, "a\nb: c", "a\r\nSet-Cookie: x", "é", "", "{}", "a\n"]
)
def test_request_ids_that_could_be_something_else(bad: str) -> None:
    async def call() -> httpx.Headers:
        transport = httpx.ASGITransport(app_of(FakeClient()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            headers = [(b"x-request-id", bad.encode())]
            return (await http.get("/version", headers=headers)).headers

    headers = asyncio.run(call())
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert "set-cookie" not in headers


def test_request_ids_are_repeated() -> None:
    for path, body in (("/version", None), ("/v1/completions", {}), ("/nothing", None)):
        response = ask(FakeClient(), path, body, headers={"X-Request-Id": "Abc-1._x"})
        assert response.headers["x-request-id"] == "Abc-1._x"
    response = ask(FakeClient(), "/v1/models", headers={"X-Request-Id": "a"}, api_key=("k",))
    assert response.headers["x-request-id"] == "a"


def test_prompts_are_logged_only_if_asked(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    ask(FakeClient("ANSWER"), "/v1/completions", COMPLETION | {"prompt": "SECRET"})
    refused_completion(prompt="SECRET", temperature=-1)
    assert "'/v1/completions' 200" in caplog.text
    assert "SECRET" not in caplog.text
    assert "ANSWER" not in caplog.text
    ask(FakeClient(), "/v1/completions", COMPLETION | {"prompt": "SECRET"}, log_requests=True)
    assert "SECRET" in caplog.text


def test_a_bug_is_a_500_that_tells_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeClient):
        def submit(self, *_: Any) -> FakeStream:
            raise RuntimeError("with a secret")

    error = refused_chat(500, Broken())
    assert "secret" not in error["message"]
    assert "RuntimeError" in caplog.text
    error = refused_chat(500, FakeClient(refusal=RequestRefusedError("RuntimeError", "a secret")))
    assert "secret" not in error["message"]


def test_origins() -> None:
    asked = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
    given = {"allowed_origins": ("https://a.example",), "api_key": ("k",)}
    response = ask(FakeClient(), "/v1/completions", method="OPTIONS", headers=asked, **given)
    assert response.headers["access-control-allow-origin"] == "https://a.example"
    other = asked | {"Origin": "https://b.example"}
    response = ask(FakeClient(), "/v1/completions", method="OPTIONS", headers=other, **given)
    assert "access-control-allow-origin" not in response.headers
    response = ask(FakeClient(), "/version", headers={"Origin": "https://a.example"})
    assert "access-control-allow-origin" not in response.headers


# The engine's troubles


def test_too_many() -> None:
    client = FakeClient(error=OverloadedError("512 requests wait already", retry_after=2.6))
    response = ask(client, "/v1/chat/completions", CHAT | {"stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_too_many_in_the_midst_of_one_request() -> None:
    client = FakeClient(error=OverloadedError("full"))
    client.num_allowed = 2  # type: ignore[attr-defined]
    assert refused_chat(429, client, n=4)
    assert len(client.submitted) == len(set(client.closed)) == 2  # nothing is left behind


@pytest.mark.parametrize("state", ["loading", "restarting", "unresponsive", "failed", "stopped"])
def test_while_there_is_no_engine(state: str) -> None:
    client = FakeClient(state=state, error=EngineUnavailableError(f"the engine is {state}"))
    response = ask(client, "/v1/completions", COMPLETION)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    health = ask(client, "/health")
    assert health.status_code == 503
    assert health.json()["status"] == state


def test_how_far_loading_is() -> None:
    client = FakeClient(state="loading")
    client.progress = Loading("recording", 3, 21)
    progress = {"stage": "recording", "done": 3, "total": 21}
    told = {"status": "loading", "engines": ["loading"], "progress": progress}
    assert ask(client, "/health").json() == told
    assert ask(client, "/server_info").json()["engines"][0]["progress"] == progress


def test_before_the_engine_is_ready_limits_are_not_known() -> None:
    client = FakeClient(state="loading", error=EngineUnavailableError("loading"))
    client.info, client.stats = {}, None
    assert refused_completion(503, client, prompt="x" * 5000)
    assert ask(client, "/v1/models").json()["data"][0]["max_model_len"] is None
    for path in ("/server_info", "/metrics", "/version"):
        assert ask(client, path).is_success


def test_an_engine_that_dies_with_the_request() -> None:
    assert refused_chat(503, FakeClient(dies_at=0))["code"] == "engine_died"
    assert refused_chat(503, FakeClient(dies_at=3))["code"] == "engine_died"
    *made, last = stream(FakeClient(dies_at=3), "/v1/chat/completions")
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in made) == "Hel"
    assert last["error"]["code"] == "engine_died"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_what_the_engine_refuses(is_streamed: bool) -> None:
    for message, chat_name, name in (
        ("the prompt is empty: give at least one token", "messages", "prompt"),
        ("max_tokens=3: too few", "max_tokens", "max_tokens"),
        ("stop_token_ids: token id 900 is not known", "stop_token_ids", "stop_token_ids"),
        ("odd", None, None),
    ):
        client = FakeClient(refusal=RequestRefusedError("RequestError", message, name))
        assert refused_chat(client=client, stream=is_streamed)["param"] == chat_name
        assert refused_completion(client=client, stream=is_streamed)["param"] == name
    client = FakeClient(refusal=RequestRefusedError("CapacityError", "too small"))
    assert refused_chat(503, client, stream=is_streamed)


def test_every_error_has_a_status() -> None:
    for kind in vars(errors).values():
        if kind is RequestRefusedError:  # it has the status of the error that it names
            continue
        if isinstance(kind, type) and issubclass(kind, SlotzeroError):
            assert 400 <= status_of(kind("x")).code < 600
            assert any(base in errors.ERROR_OUTCOMES for base in kind.__mro__)
    assert status_of(ValueError("x")).code == 500
    refused = RequestRefusedError("RequestError", "n=0: must", "n")
    assert error_reply(refused)[1]["error"]["param"] == "n"
    assert status_of(RequestRefusedError("no such error", "x")).code == 500


def test_deadline() -> None:
    client = FakeClient(hangs_at=2)
    response = ask(client, "/v1/completions", COMPLETION, request_timeout=0.05)
    assert response.status_code == 504
    assert response.json()["error"]["code"] == "request_timeout"
    assert len(client.closed) == 1
    body = CHAT | {"stream": True, "n": 2}
    client = FakeClient(hangs_at=2)
    *_, last = chunks_of(ask(client, "/v1/chat/completions", body, request_timeout=0.05))
    assert last["error"]["code"] == "request_timeout"
    assert len(client.closed) == 2
    assert ask(FakeClient(), "/v1/completions", COMPLETION, request_timeout=5).is_success


def serve_until(client: FakeClient, body: Any, when: Callable[[list[Any]], bool]) -> list[Any]:
    """Calls the application as a server does, and hangs up when the messages sent are enough."""

    async def call() -> list[Any]:
        sent: list[Any] = []
        gone = asyncio.Event()
        request = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

        async def receive() -> Any:
            for message in request:
                return message
            await gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if when(sent):
                gone.set()

        scope = {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.4"}, "method": "POST",
            "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions",
            "query_string": b"", "headers": [(b"content-type", b"application/json")],
            "http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("c", 1),
            "root_path": "",
        }  # fmt: skip
        task = asyncio.create_task(app_of(client)(scope, receive, send))
        if when(sent):
            await asyncio.sleep(0.05)
            gone.set()
        await asyncio.wait_for(task, 5)
        return sent

    return asyncio.run(call())


@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_is_worked_for_no_more(n: int) -> None:
    client = FakeClient("a long answer", hangs_at=5)
    body = CHAT | {"stream": True, "n": n}
    sent = serve_until(client, body, lambda sent: len(sent) > 2)
    assert len(client.closed) == n
    assert sent[-1]["more_body"]  # it was cut off
    for streamed in (False, True):  # before anything was sent
        client = FakeClient("a long answer", hangs_at=0)
        sent = serve_until(client, CHAT | {"stream": streamed, "n": n}, lambda sent: True)
        assert sent == []
        assert len(client.closed) == n


# Routes of our own


def test_models() -> None:
    made = ask(FakeClient(), "/v1/models").json()
    assert made["object"] == "list"
    assert [card["id"] for card in made["data"]] == ["tiny", "other/name"]
    card = ask(FakeClient(), "/v1/models/other/name").json()
    assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "slotzero", 512)
    assert refused("/v1/models/none", None, status=404)["code"] == "model_not_found"


def test_health_version_metrics() -> None:
    health = ask(FakeClient(), "/health")
    assert (health.status_code, health.json()) == (200, {"status": "ready", "engines": ["ready"]})
    assert ask(FakeClient(), "/health", method="HEAD").status_code == 200
    assert ask(FakeClient(), "/version").json() == {"version": __version__}
    metrics = ask(FakeClient(), "/metrics")
    assert metrics.headers["content-type"].startswith("text/plain")
    assert 'slotzero_num_requests_running{engine="0"} 1.0' in metrics.text


def test_what_happens_is_counted() -> None:
    async def call() -> str:
        transport = httpx.ASGITransport(app_of(FakeClient("abc", step=2)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            await http.post("/v1/completions", json=COMPLETION | {"n": 2})
            await http.post("/v1/completions", json=COMPLETION | {"n": 0})
            await http.post("/v1/completions", json=COMPLETION | {"stop": "b"})
            await http.post("/v1/completions", json=COMPLETION | {"user": "x" * (5 << 20)})
            return (await http.get("/metrics")).text

    text = asyncio.run(call())
    for line in (
        "slotzero_requests_total 2.0",
        'slotzero_request_success_total{finished_reason="stop"} 3.0',
        'slotzero_http_refused_total{status="400"} 1.0',
        'slotzero_http_refused_total{status="413"} 1.0',
        "slotzero_time_to_first_token_seconds_count 3.0",
        "slotzero_time_per_output_token_seconds_count 7.0",
        "slotzero_request_generation_tokens_sum 10.0",
    ):
        assert line in text


def test_tokenize_and_back() -> None:
    client = FakeClient()
    made = ask(client, "/tokenize", {"prompt": "Hé"}).json()
    assert made == {"count": 4, "max_model_len": 512, "tokens": [256, 72, 195, 169]}
    made = ask(client, "/tokenize", {"prompt": "H", "add_special_tokens": False}).json()
    assert made["tokens"] == [72]
    messages = [{"role": "user", "content": "Hi"}]
    made = ask(client, "/tokenize", {"model": "tiny", "messages": messages}).json()
    assert made["count"] == 21
    assert ask(client, "/detokenize", {"tokens": [256, 72, 195, 169]}).json()["prompt"] == "<bos>Hé"
    for tokens in ([-1], [10**30], [259]):
        assert refused("/detokenize", {"tokens": tokens})["param"] == "tokens"
    assert refused("/detokenize", {"tokens": [72] * 513})["code"] == "context_length_exceeded"
    assert ask(client, "/detokenize", {"tokens": [72] * 512}).json()["prompt"] == "H" * 512
    assert refused("/tokenize", {})["param"] == "prompt"
    assert refused("/tokenize", {"prompt": "x", "model": "odd"}, status=404)


def test_server_info() -> None:
    made = ask(FakeClient(), "/server_info", headers={"Authorization": "Bearer k"}, api_key=("k",))
    info = made.json()
    assert info["state"] == "ready"
    assert info["config"]["engine"] == {"model": "tiny:llama"}
    assert info["config"]["server"]["api_key"] == 1  # how many, never which
    assert info["runners"]["decode"][0]["key"] == "decode[8]"
    assert info["pools"]["pages"] == 32
    engine = {"state": "ready", "failure": None, "progress": None, "pools": info["pools"]}
    assert info["engines"] == [engine]
    assert info["certification"]["sizes"] == {"decode[8]": True}
    assert info["engine"]["limits"]["max_model_len"] == 512


def test_live() -> None:
    async def call() -> Any:
        app = app_of(FakeClient())
        asyncio.get_running_loop().call_later(0.1, setattr, app.state.front, "is_closing", True)
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return await http.get("/live")

    response = asyncio.run(call())
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, end = response.text.split("\n\n")
    assert end == ""
    first, last = (json.loads(event.removeprefix("data: ")) for event in events)
    assert (first["state"], first["failure"]) == ("ready", None)
    assert first["stats"]["generated_tokens"] == 5
    assert last["state"] == "stopping"


def test_why_there_is_no_engine_is_told_to_those_with_a_key() -> None:
    client = FakeClient(state="failed")
    client.failure = "no memory is left"
    for path in ("/server_info", "/live"):
        assert ask(client, path, api_key=("k",)).status_code == 401
    health = ask(client, "/health", api_key=("k",)).json()
    assert health == {"status": "failed", "engines": ["failed"]}
    assert ask(client, "/server_info").json()["failure"] == "no memory is left"

    async def last_words() -> Any:
        app = app_of(client)
        app.state.front.is_closing = True  # a server whose engine failed ends
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return json.loads((await http.get("/live")).text.removeprefix("data: "))

    told = asyncio.run(last_words())
    assert (told["state"], told["failure"]) == ("failed", "no memory is left")


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from slotzero.server import routes_engine

    monkeypatch.setattr(routes_engine, "PAGE", tmp_path / "index.html")
    assert refused("/", None, status=404)
    (tmp_path / "index.html").write_text("<p>page")
    response = ask(FakeClient(), "/")
    assert response.text == "<p>page"
    assert response.headers["content-security-policy"] == "default-src 'self' 'unsafe-inline'"
    assert response.headers["content-type"].startswith("text/html")


def test_the_engine_lives_as_long_as_the_application() -> None:
    async def call() -> list[str]:
        client = FakeClient()
        app = app_of(client, grace=2)
        async with app.router.lifespan_context(app):
            assert client.log == ["start"]
        return client.log

    assert asyncio.run(call()) == ["start", "drain 2", "stop"]


def test_the_fake_is_like_the_client() -> None:
    real = fleet.Fleet({})
    known = "settings state failure progress info stats replicas start submit drain stop"
    for name in known.split():
        assert hasattr(real, name)
        assert hasattr(FakeClient(), name)
    assert {field.name for field in fields(SamplingParams)} >= {"structured_outputs"}


# Settings and the command


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"port": -1}, "port"),
        ({"port": 70000}, "port"),
        ({"api_key": [""]}, "api_key"),
        ({"api_key": ["a b"]}, "api_key"),
        ({"api_key": ["é"]}, "api_key"),
        ({"served_model_name": [""]}, "served_model_name"),
        ({"data_parallel_size": 0}, "data_parallel_size is a number of engines, at least 1"),
        ({"data_parallel_size": 1.5}, "data_parallel_size"),
        ({"data_parallel_size": "2"}, "data_parallel_size"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_request_bytes": 0}, "max_request_bytes"),
        ({"max_connections": 1}, "max_connections"),
        ({"receive_timeout": 0}, "receive_timeout"),
        ({"keep_alive_timeout": -1}, "keep_alive_timeout"),
        ({"heartbeat_timeout": 1}, "heartbeat_timeout is at least 2 seconds, or 0"),
        ({"step_timeout": -1}, "step_timeout"),
        ({"unresponsive_timeout": -1}, "unresponsive_timeout"),
        ({"request_timeout": 0}, "request_timeout"),
        ({"request_timeout": math.nan}, "request_timeout"),
        ({"grace": -1}, "grace"),
        ({"tool_call_parser": "odd"}, "tool_call_parser"),
    ],
)
def test_settings_that_make_no_sense(given: dict[str, Any], names: str) -> None:
    with pytest.raises(ConfigError, match=names) as error:
        ServerSettings(**given)
    assert "é" not in str(error.value)


def test_it_is_local_unless_told_otherwise() -> None:
    assert ServerSettings().is_local
    assert ServerSettings(host="localhost").is_local
    assert ServerSettings(host="::1").is_local
    assert not ServerSettings(host="0.0.0.0").is_local
    assert not ServerSettings(host="example.org").is_local


def test_flags_of_serve() -> None:
    words = (
        "tiny:llama --port 0 --api-key a --api-key b --max-request-bytes 1M --request-timeout 2.5 "
        "--tool-call-parser llama --log-requests --served-model-name x --max-num-seqs 3 --dp 2"
    )
    args = serve.parser().parse_args(words.split())
    assert flags.server_settings(args) == ServerSettings(
        port=0,
        api_key=("a", "b"),
        max_request_bytes=1 << 20,
        request_timeout=2.5,
        tool_call_parser="llama",
        log_requests=True,
        served_model_name=("x",),
        data_parallel_size=2,
    )
    assert flags.engine_settings(args) == {"max_num_seqs": 3}
    text = " ".join(serve.parser().format_help().split())
    for field in fields(ServerSettings):
        assert flags.field_docs(ServerSettings)[field.name] in text
        assert "--" + field.name.replace("_", "-") in text


def test_its_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from slotzero.cli import serve\n"
        "serve.parser().format_help()\n"
        "heavy = {'torch', 'numpy', 'fastapi', 'uvicorn', 'pydantic', 'msgspec', 'tokenizers'}\n"
        "print(*heavy & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_packages_that_are_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "uvicorn" else 1)
    assert cli.main(["serve", "tiny:llama"]) == 2
    assert capsys.readouterr().err == (
        "slotzero: error: uvicorn is not installed: pip install 'slotzero[server]'\n"
    )


def test_a_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with serve._listen(ServerSettings(port=0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["serve", "tiny:llama", "--port", str(port)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"127.0.0.1:{port}" in error
    assert "--port" in error


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_accepted_connections_send_without_delay(host: str) -> None:
    """Nagle's algorithm would hold small writes back until the client's delayed ACK, 40 ms."""

    async def accept() -> int:
        accepted: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        def on_accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            end = writer.get_extra_info("socket")
            accepted.set_result(end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        listener = serve._listen(ServerSettings(host=host, port=0))
        async with asyncio.timeout(60), await asyncio.start_server(on_accept, sock=listener):
            _, writer = await asyncio.open_connection(*listener.getsockname()[:2])
            try:
                return await accepted
            finally:
                writer.close()

    assert asyncio.run(accept())


def test_an_address_that_is_not_ours() -> None:
    with pytest.raises(ConfigError, match="no-such-host"):
        serve._listen(ServerSettings(host="no-such-host.invalid"))


def test_the_curl_line_can_be_pasted() -> None:
    line = serve._curl(ServerSettings(served_model_name=("it's",), api_key=("k",)), "http://h:1")
    words = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {line}"], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words[:2] == ["curl", "http://h:1/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's"
    assert "Authorization: Bearer KEY" in words


@pytest.mark.parametrize(
    ("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)]
)
def test_what_a_request_leaves_out_of_sampling_is_the_models(path: str, body: Any) -> None:
    client, own = FakeClient(), {"temperature": 0.6, "top_k": 20}
    reply = ask(client, f"/v1/{path}", body | {"temperature": 0.0}, sampling=own)
    assert reply.status_code == 200
    assert client.params["top_k"] == 20
    assert client.params["temperature"] == 0.0


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize(
    "way",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": "a"}},
        {"guided_choice": ["a"]},
    ],
)
def test_a_structure_is_not_for_an_answer_that_may_call(choice: str, way: dict[str, Any]) -> None:
    body = CHAT | way | {"tools": [WEATHER], "tool_choice": choice}
    tokenizer = tool_tokenizer(HERMES_TEMPLATE)
    reply = ask(FakeClient(), "/v1/chat/completions", body, tokenizer=tokenizer)
    assert reply.status_code == 400
    assert "not with tools, or with tool_choice=none" in reply.json()["error"]["message"]
    assert reply.json()["error"]["param"].startswith(next(iter(way)))
    chat(FakeClient(), tokenizer, **way, tools=[WEATHER], tool_choice="none")
