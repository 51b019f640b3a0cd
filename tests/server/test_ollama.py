"""Tests of Ollama's routes: chat with tools and thinking, generate, tags, and errors."""

import json
from typing import Any

import pytest
from asgi_clients import TEMPLATE, THOUGHT, TOOL_LOOP, call_text, engine
from fake_engine import FakeClient, ask, tool_tokenizer

USER: Any = [{"role": "user", "content": "Hi"}]
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object"}},
}


def lines_of(text: str) -> list[Any]:
    return [json.loads(line) for line in text.splitlines()]


def post(client: FakeClient, path: str, **body: Any) -> Any:
    sent = {"model": "tiny:latest", **body}
    reply = ask(client, path, sent, tokenizer=tool_tokenizer(TEMPLATE))
    assert reply.status_code == 200, reply.text
    return reply


@pytest.mark.parametrize("step", [1, 1000])
def test_a_chat_with_a_tool(step: int) -> None:
    client = engine(TOOL_LOOP[0], step)
    *parts, calls, end = lines_of(post(client, "/api/chat", messages=USER, tools=[WEATHER]).text)
    assert "".join(part["message"]["content"] for part in parts) == "I look."
    assert "".join(part["message"].get("thinking", "") for part in parts) == "Hm."
    (call,) = calls["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": {"city": "Paris"}}
    assert (end["done"], end["done_reason"]) == (True, "stop")
    assert end["eval_count"] == len(TOOL_LOOP[0].encode()) + 1
    whole = post(client, "/api/chat", messages=USER, tools=[WEATHER], stream=False).json()
    assert whole["message"]["tool_calls"][0]["function"] == call["function"]
    later = [*USER, whole["message"],
             {"role": "tool", "tool_name": "weather", "content": "rain"}]  # fmt: skip
    post(client, "/api/chat", messages=later, tools=[WEATHER])
    assert client.prompt.endswith('"arguments": {"city": "Paris"}}</tool_call>;tool:rain;')


@pytest.mark.parametrize("text", [TOOL_LOOP[0][:-20], call_text("weather", "[1]")])
def test_a_call_that_breaks_off_is_not_sent(text: str) -> None:
    client = engine(text)
    made = post(client, "/api/chat", messages=USER, tools=[WEATHER], stream=False).json()
    assert "tool_calls" not in made["message"]
    assert made["done_reason"] == "length"
    *_, end = lines_of(post(client, "/api/chat", messages=USER, tools=[WEATHER]).text)
    assert end["done_reason"] == "length"


def test_generate_options_and_format() -> None:
    client = engine(f"{THOUGHT}{{}}")
    options = {"temperature": 0.5, "num_predict": 60, "stop": ["x"], "num_ctx": 99,
               "repeat_penalty": 1.1}  # fmt: skip
    made = post(client, "/api/generate", prompt="Hi", system="Be brief.", format="json",
                options=options, stream=False).json()  # fmt: skip
    assert (made["response"], made["thinking"], made["done"]) == ("{}", "Hm.", True)
    assert client.prompt == "system:Be brief.;user:Hi;"
    assert client.params.pop("structured_outputs")
    assert client.params == {
        "temperature": 0.5, "max_tokens": 60, "repetition_penalty": 1.1,
        "skip_special_tokens": False,
    }  # fmt: skip
    post(client, "/api/chat", messages=USER, think=False)
    assert client.prompt.endswith("<think></think>")


def test_tags_and_version() -> None:
    names = [model["name"] for model in ask(FakeClient(), "/api/tags").json()["models"]]
    assert names == ["tiny", "other/name"]
    assert set(ask(FakeClient(), "/api/version").json()) == {"version"}


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ({"messages": USER, "model": "other"}, 404, "not served here"),
        ({"messages": USER, "format": "xml"}, 400, "format: must be"),
        ({"messages": USER, "options": {"temperature": -1}}, 400, "options.temperature"),
        ({"messages": USER, "options": {"mirostat": 1}}, 400, "options.mirostat: unknown field"),
        ({"messages": USER, "think": "high"}, 400, "think: this model does not reason"),
        ({"messages": [{"role": "user", "content": "x", "images": ["a"]}]}, 400, "images"),
        ({}, 400, "messages"),
    ],
)
def test_errors_have_ollamas_shape(body: Any, status: int, why: str) -> None:
    reply = ask(FakeClient(), "/api/chat", {"model": "tiny", **body})
    assert reply.status_code == status
    assert set(reply.json()) == {"error"}
    assert why in reply.json()["error"]
