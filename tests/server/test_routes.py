"""Tests of the other routes: models, health, metrics, tokenize, server info, live, the page."""

import asyncio
import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine import (
    COMPLETION,
    FakeClient,
    app_of,
    ask,
    refused,
    tool_tokenizer,
)

from slotzero import __version__
from slotzero.sampling.params import SamplingParams
from slotzero.server import fleet


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


def test_events_are_counted() -> None:
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


def test_tokenize_and_detokenize() -> None:
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


def test_tokens_may_exceed_the_context() -> None:
    """Evaluations cut a long text into windows themselves."""
    made = ask(FakeClient(), "/tokenize", {"prompt": "H" * 9000}).json()
    assert made == {"count": 9001, "max_model_len": 512, "tokens": [256] + [72] * 9000}
    made = ask(FakeClient(), "/detokenize", {"tokens": made["tokens"]}).json()
    assert made == {"prompt": "<bos>" + "H" * 9000}
    assert refused("/tokenize", {})["param"] == "prompt"
    assert refused("/tokenize", {"prompt": "x", "model": "odd"}, status=404)


def test_server_info() -> None:
    made = ask(FakeClient(), "/server_info", headers={"Authorization": "Bearer k"}, api_key=("k",))
    info = made.json()
    assert info["state"] == "ready"
    assert info["config"]["engine"] == {"model": "tiny:llama"}
    assert info["config"]["server"]["api_key"] == 1  # the number of keys, never the keys
    assert info["runners"]["decode"][0]["key"] == "decode[8]"
    assert info["pools"]["pages"] == 32
    engine = {"state": "ready", "failure": None, "progress": None, "pools": info["pools"]}
    assert info["engines"] == [engine]
    assert info["certification"]["sizes"] == {"decode[8]": True}
    assert info["engine"]["limits"]["max_model_len"] == 512
    assert info["vllm_config"]["model_config"]["logprobs_mode"] == "raw_logprobs"


def test_trainers_are_told_what_log_probabilities_are_those_of() -> None:
    client = FakeClient()
    client.settings["logprobs_mode"] = "processed_logprobs"
    config = ask(client, "/server_info").json()["vllm_config"]["model_config"]
    assert config["logprobs_mode"] == "processed_logprobs"


def test_live() -> None:
    async def call() -> Any:
        app = app_of(FakeClient())
        asyncio.get_running_loop().call_later(0.1, setattr, app.state.slotzero, "is_closing", True)
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


def test_only_clients_with_a_key_learn_why_there_is_no_engine() -> None:
    client = FakeClient(state="failed")
    client.failure = "no memory is left"
    for path in ("/server_info", "/live"):
        assert ask(client, path, api_key=("k",)).status_code == 401
    health = ask(client, "/health", api_key=("k",)).json()
    assert health == {"status": "failed", "engines": ["failed"]}
    assert ask(client, "/server_info").json()["failure"] == "no memory is left"

    async def last_words() -> Any:
        app = app_of(client)
        app.state.slotzero.is_closing = True  # as when the engine has failed and the server ends
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


def test_the_fake_client_has_the_interface_of_the_real_one() -> None:
    real = fleet.Fleet({})
    known = "settings state failure progress info stats replicas start submit drain stop"
    for name in known.split():
        assert hasattr(real, name)
        assert hasattr(FakeClient(), name)
    assert {field.name for field in fields(SamplingParams)} >= {"structured_outputs"}


def test_ping() -> None:
    client = FakeClient()
    assert ask(client, "/ping").status_code == ask(client, "/ping", method="POST").status_code
    assert ask(FakeClient(state="loading"), "/ping").status_code == 503


def test_tokens_of_a_conversation_with_tools() -> None:
    tokenizer = tool_tokenizer("{{ tools[0].function.name }} <tool_call> {{ messages[0].content }}")
    tool = {"type": "function", "function": {"name": "f"}}
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "tools": [tool], "return_token_strs": True}
    reply = ask(FakeClient(), "/tokenize", body, tokenizer=tokenizer).json()
    assert bytes(reply["tokens"]) == b"f <tool_call> Hi"
    assert reply["token_strs"][-2:] == ["H", "i"]
