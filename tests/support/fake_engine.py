"""Fake engine that answers with a given text, and requests to the HTTP application over it."""

import asyncio
import json
import math
import struct
from collections.abc import AsyncIterator, Mapping
from typing import Any

import httpx
import msgspec

from slotzero.errors import (
    EngineDiedError,
    RequestRefusedError,
    SlotzeroError,
)
from slotzero.sampling.structured import structure_error
from slotzero.server.app import make_app
from slotzero.server.messages import Action, Loading, Stats, TokenDelta, TokenExperts, TokenLogprobs
from slotzero.server.settings import ServerSettings
from slotzero.text.tokenizer import Tokenizer

EOS = 257
MAX_LEN = 512
VECTOR = (3.0, 0.0, 4.0)
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
COMPLETION = {"model": "tiny", "prompt": "Hi", "max_tokens": 64}
STATS = Stats(
    running=1, waiting=0, slots=16, pages_used=2, pages_cached=3, pages=32, prompt_tokens=4,
    generated_tokens=5, prefix_asked_tokens=6, prefix_hit_tokens=7, preemptions=0, steps=8,
    replays={"decode[8]": 3}, eager={}, real_tokens={}, padded_tokens={}, failed_sizes={},
    steps_watched=0, violations=0,
)  # fmt: skip


class FakeStream:
    """The stream of one answer, which can hang, die or be refused as its client says."""

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
    """An engine client that answers every request with `text`, `step` tokens at a time."""

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
        routes_experts: bool = False,
    ) -> None:
        self.texts = [text] if isinstance(text, str) else text
        self.step, self.state, self.pace = step, state, pace
        self.routes_experts = routes_experts
        self.hangs_at, self.dies_at = hangs_at, dies_at
        self.error, self.refusal, self.ends_with_eos = error, refusal, ends_with_eos
        self.settings: dict[str, Any] = {"model": "tiny:llama"}
        self.failure = ""
        self.progress: Loading | None = None
        self.info: Mapping[str, Any] = {
            "limits": {"max_model_len": MAX_LEN},
            "kv_cache": {"dtype": "float32", "tokens": 4096},
            "eos_token_ids": [EOS],
            "vocab_size": 259,
            "sizes": {"decode": [{"key": "decode[8]", "backend": "cpu", "seconds": 0.1, "bytes": 1,
                                  "failure": ""}]},
            "pooling": {"size": len(VECTOR)},
            "recording_seconds": 0.5,
            "sanitize": "off",
        }  # fmt: skip
        self.stats: Stats | None = STATS
        self.replicas = [self]
        self.submitted: list[tuple[str, list[int], dict[str, Any]]] = []
        self.closed: list[str] = []
        self.log: list[str] = []
        self.num_admitted = 0
        self.actions: list[Action] = []
        self.action_error: SlotzeroError | None = None
        self.restores: tuple[Action, ...] = ()
        self.lost_weights = ""

    async def start(self) -> None:
        self.log.append("start")

    async def drain(self, grace: float) -> None:
        self.log.append(f"drain {grace:g}")

    async def stop(self) -> None:
        self.log.append("stop")

    def admit(self) -> None:
        self.num_admitted += 1

    async def perform(self, action: Action) -> None:
        self.actions.append(action)
        if self.action_error is not None:
            raise self.action_error

    def restore_by(self, *actions: Action) -> None:
        self.restores = actions

    def lose_weights(self, why: str) -> None:
        self.lost_weights = why

    def submit(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> FakeStream:
        if self.error is not None and len(self.submitted) >= getattr(self, "num_allowed", 0):
            raise self.error
        text = self.texts[len(self.submitted) % len(self.texts)]
        self.submitted.append((request_id, prompt, dict(params)))
        if params.get("pooled"):
            vector = struct.pack(f"<{len(VECTOR)}f", *VECTOR)
            return FakeStream(self, request_id, [TokenDelta(request_id, [], [], 3, "stop",
                                                            vector=vector)])  # fmt: skip
        tokens = list(text.encode())
        if self.ends_with_eos:
            tokens.append(EOS)
        limit = params.get("max_tokens") or MAX_LEN
        reason = "stop" if len(tokens) <= limit else "length"
        grown = self._grown(request_id, tokens[:limit], params, reason)
        if (wanted := params.get("prompt_logprobs")) is not None:
            scores = [_logprobs(token, wanted) for token in prompt[1:]]
            grown[0] = msgspec.structs.replace(grown[0], prompt_logprobs=scores)
        if self.routes_experts:
            num_rows = len(prompt) + len(tokens[:limit]) - 1
            experts = TokenExperts((num_rows, 1, 2), bytes(i % 256 for i in range(num_rows * 4)))
            grown[-1] = msgspec.structs.replace(grown[-1], routed_experts=experts)
        return FakeStream(self, request_id, grown)

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
        """Sampling parameters of the last request."""
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


def structure_refusal(why: str, kind: Any = None) -> RequestRefusedError:
    error = structure_error(why, kind)
    return RequestRefusedError("RequestError", str(error), error.param, error.label)
