"""Tests of the HTTP status when the engine is overloaded, not ready, dead or slow."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
from fake_engine import (
    CHAT,
    COMPLETION,
    FakeClient,
    app_of,
    ask,
    chunks_of,
    refused_chat,
    refused_completion,
    stream,
)

from slotzero import errors
from slotzero.errors import (
    EngineUnavailableError,
    OverloadedError,
    RequestRefusedError,
    SlotzeroError,
)
from slotzero.server.messages import Loading
from slotzero.server.status import error_parts, status_of


def test_too_many_requests() -> None:
    client = FakeClient(error=OverloadedError("512 requests wait already", retry_after=2.6))
    response = ask(client, "/v1/chat/completions", CHAT | {"stream": True})
    assert response.status_code == 429
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["code"] == "rate_limit_exceeded"


def test_too_many_in_the_middle_of_one_request() -> None:
    client = FakeClient(error=OverloadedError("full"))
    client.num_allowed = 2  # type: ignore[attr-defined]
    assert refused_chat(429, client, n=4)
    # every submitted stream was closed
    assert len(client.submitted) == len(set(client.closed)) == 2


@pytest.mark.parametrize("state", ["loading", "restarting", "unresponsive", "failed", "stopped"])
def test_requests_without_an_engine(state: str) -> None:
    client = FakeClient(state=state, error=EngineUnavailableError(f"the engine is {state}"))
    response = ask(client, "/v1/completions", COMPLETION)
    assert response.status_code == 503
    assert int(response.headers["retry-after"]) >= 1
    health = ask(client, "/health")
    assert health.status_code == 503
    assert health.json()["status"] == state


def test_loading_progress_is_reported() -> None:
    client = FakeClient(state="loading")
    client.progress = Loading("recording", 3, 21)
    progress = {"stage": "recording", "done": 3, "total": 21}
    told = {"status": "loading", "engines": ["loading"], "progress": progress}
    assert ask(client, "/health").json() == told
    assert ask(client, "/server_info").json()["engines"][0]["progress"] == progress


def test_limits_are_unknown_before_the_engine_is_ready() -> None:
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
def test_refusals_of_the_engine(is_streamed: bool) -> None:
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
    assert error_parts(refused)[2] == "n"
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
    assert ask(FakeClient(), "/v1/completions", COMPLETION, request_timeout=60).is_success


def serve_until(client: FakeClient, body: Any, when: Callable[[list[Any]], bool]) -> list[Any]:
    """Call the application as a server does, and disconnect once `when` holds for its messages."""

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
        await asyncio.wait_for(task, 60)
        return sent

    return asyncio.run(call())


@pytest.mark.parametrize("n", [1, 3])
def test_the_requests_of_a_client_that_disconnects_are_cancelled(n: int) -> None:
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
