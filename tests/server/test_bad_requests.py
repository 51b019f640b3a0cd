"""Tests of malformed requests, API keys, request ids, origins and logs."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from fake_engine import (
    CHAT,
    COMPLETION,
    FakeClient,
    FakeStream,
    app_of,
    ask,
    refused,
    refused_chat,
    refused_completion,
)

from slotzero.errors import (
    RequestRefusedError,
)


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
def test_invalid_bodies_are_refused(content: bytes) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"):
        response = ask(FakeClient(), path, content=content, method="POST")
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error"
        assert "JSON" in error["message"] or error["param"]


def test_json_needs_its_content_type() -> None:
    """Otherwise a form on any web page could send a request."""
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

    response = asyncio.run(call())  # without a Content-Length
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    assert refused("/v1/completions", COMPLETION, status=413, max_request_bytes=10)
    assert client.submitted == []


@pytest.mark.parametrize("prompt", ["x" * 511, "x" * 100_000, [1] * 512, ["x", "y" * 600]])
def test_prompts_longer_than_the_context_are_refused(prompt: Any) -> None:
    client = FakeClient()
    error = refused_completion(client=client, prompt=prompt)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "prompt")
    if isinstance(prompt, str):
        message = {"role": "user", "content": prompt}
        error = refused_chat(client=client, messages=[message])
        assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert client.submitted == []


def test_messages_that_together_exceed_the_context_are_refused() -> None:
    client = FakeClient()
    error = refused_chat(client=client, messages=[{"role": "user", "content": "x" * 500}] * 40)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert client.submitted == []


def test_unknown_models_are_refused() -> None:
    for body in ({"model": "gpt-5"}, {"model": "x" * 5000}, {"model": ""}):
        error = refused_chat(404, **body)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert ask(FakeClient(), "/v1/completions", COMPLETION | {"model": "other/name"}).is_success


def test_unknown_routes_are_refused() -> None:
    error = refused("/chat/completions", CHAT, status=404)
    assert error["code"] == "not_found"
    assert error["message"].startswith("no route /chat/completions; OpenAI's routes begin with /v1")
    error = refused("/v1/completions", None, status=405)
    assert error["code"] == "method_not_allowed"
    assert error["message"] == "/v1/completions does not support the method GET"


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


def test_keys_with_odd_bytes_are_wrong() -> None:
    async def call(key: bytes) -> int:
        transport = httpx.ASGITransport(app_of(FakeClient(), api_key=("first",)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            return (await http.get("/v1/models", headers=[(b"Authorization", key)])).status_code

    assert asyncio.run(call(b"Bearer \xff\xfe")) == 401
    assert asyncio.run(call(b"Bearer first")) == 200


@pytest.mark.parametrize(
    "bad", ["a b", "a/b", "x" * 129, "a\nb: c", "a\r\nSet-Cookie: x", "é", "", "{}", "a\n"]
)
def test_unsafe_request_ids_are_replaced(bad: str) -> None:
    async def call() -> httpx.Headers:
        transport = httpx.ASGITransport(app_of(FakeClient()))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            headers = [(b"x-request-id", bad.encode())]
            return (await http.get("/version", headers=headers)).headers

    headers = asyncio.run(call())
    assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    assert "set-cookie" not in headers


def test_request_ids_are_returned() -> None:
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


def test_a_bug_is_a_500_without_details(caplog: pytest.LogCaptureFixture) -> None:
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
