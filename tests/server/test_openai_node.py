"""Tests that OpenAI's client for Node (openai_client.mjs) gets the same as their Python client."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI
from served import ADD, HELLO, KEY, PATIENCE, Server, tiny_server

pytestmark = pytest.mark.slow

PACKAGE = "openai@6"
SCRIPT = Path(__file__).parent / "openai_client.mjs"
GREEDY: Any = {"model": "tiny", "temperature": 0, "max_tokens": 20}
# greedy answers are endless white space
RANDOM: Any = {"temperature": 1, "seed": 3, "max_tokens": 200}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the client into a folder, beside the script that uses it."""
    missing = [name for name in ("node", "npm") if shutil.which(name) is None]
    if missing:
        pytest.skip(f"no {missing[0]} on this machine")
    path = tmp_path_factory.mktemp("node")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(path), PACKAGE]
    try:
        run = subprocess.run(install, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        pytest.skip(f"npm took more than {PATIENCE:g} s to install {PACKAGE}")
    if run.returncode != 0:
        pytest.skip(f"npm could not install {PACKAGE}: {run.stderr.strip()[-300:]}")
    shutil.copy(SCRIPT, path)
    return path


@pytest.fixture(scope="module")
def server(package: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with tiny_server(tmp_path_factory.mktemp("served")) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def told(package: Path, server: Server) -> Any:
    asked = {"url": server.url, "key": KEY, "model": "tiny", "messages": HELLO, "tool": ADD}
    run = subprocess.run(
        ["node", str(package / SCRIPT.name), json.dumps(asked)],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def choices_of(reply: Any) -> Any:
    """Return the choices of a reply to the Python client as the Node client shows them."""
    return json.loads(reply.model_dump_json(exclude_unset=True))["choices"]


def chat(client: OpenAI, **asked: Any) -> Any:
    return choices_of(client.chat.completions.create(**GREEDY | {"messages": HELLO} | asked))


def complete(client: OpenAI, **asked: Any) -> Any:
    return choices_of(client.completions.create(**GREEDY | {"prompt": "Once"} | asked))


def test_models(told: Any) -> None:
    assert [model["id"] for model in told["models"]] == ["tiny"]


def test_chat(told: Any, client: OpenAI) -> None:
    assert told["chat"]["choices"] == chat(client)
    assert told["chat"]["choices"][0]["finish_reason"] == "length"
    assert told["chat"]["usage"]["completion_tokens"] == 20


def test_stream(told: Any) -> None:
    *chunks, last = told["stream"]
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == told["chat"]["choices"][0]["message"]["content"]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[-2:]] == [None, "length"]
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["choices"] == []
    usage = told["chat"]["usage"]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][name] == usage[name]


def test_completions(told: Any, client: OpenAI) -> None:
    assert told["completion"]["choices"] == complete(client)


def test_several_answers(told: Any, client: OpenAI) -> None:
    assert told["several"]["choices"] == complete(client, n=3, temperature=1, seed=5)
    assert [choice["index"] for choice in told["several"]["choices"]] == [0, 1, 2]


def test_stop_strings(told: Any) -> None:
    (whole,), (choice,) = told["completion"]["choices"], told["stopped"]["choices"]
    assert choice["text"] == whole["text"].partition(whole["text"][10:13])[0]
    assert choice["finish_reason"] == "stop"


def test_logprobs(told: Any, client: OpenAI) -> None:
    assert told["chatLogprobs"]["choices"] == chat(client, logprobs=True, top_logprobs=3)
    assert len(told["chatLogprobs"]["choices"][0]["logprobs"]["content"]) == 20
    assert told["logprobs"]["choices"] == complete(client, logprobs=3)
    assert len(told["logprobs"]["choices"][0]["logprobs"]["token_logprobs"]) == 20


def test_a_forced_call(told: Any, client: OpenAI) -> None:
    asked: Any = {"tools": [ADD], "tool_choice": "required"}
    (choice,), (expected,) = told["call"]["choices"], chat(client, **RANDOM, **asked)
    assert choice["finish_reason"] == "tool_calls"
    (call,) = choice["message"]["tool_calls"]
    (expected_call,) = expected["message"]["tool_calls"]
    assert call["function"] == expected_call["function"]
    assert set(json.loads(call["function"]["arguments"])) == {"a", "b"}
    parts = [
        part["function"]
        for chunk in told["streamedCall"]
        for part in chunk["choices"][0]["delta"].get("tool_calls", [])
    ]
    joined = {name: "".join(part.get(name, "") for part in parts) for name in call["function"]}
    assert joined == call["function"]


def test_a_schema(told: Any, client: OpenAI) -> None:
    schema = {"name": "x", "schema": ADD["function"]["parameters"]}
    form: Any = {"type": "json_schema", "json_schema": schema}
    assert told["structured"]["choices"] == chat(client, **RANDOM, response_format=form)
    assert set(json.loads(told["structured"]["choices"][0]["message"]["content"])) == {"a", "b"}


@pytest.mark.parametrize(
    ("what", "name", "status", "code", "param"),
    [
        ("unknownModel", "NotFoundError", 404, "model_not_found", "model"),
        ("badTemperature", "BadRequestError", 400, None, "temperature"),
        ("badStream", "BadRequestError", 400, None, "temperature"),
        ("wrongKey", "AuthenticationError", 401, "invalid_api_key", None),
    ],
)
def test_errors_are_typed(
    told: Any, what: str, name: str, status: int, code: str | None, param: str | None
) -> None:
    error = told[what]
    assert error.pop("requestID")
    assert error.pop("message").startswith(f"{status} ")
    assert error == {
        "name": name,
        "status": status,
        "code": code,
        "param": param,
        "type": "invalid_request_error",
    }


def test_an_abort_leaves_nothing_behind(told: Any, server: Server) -> None:
    assert told["aborted"]["chunks"] < 480
    assert told["aborted"]["after"]["choices"] == told["completion"]["choices"]
    server.wait_until_idle()
