"""Tests of reasoning over HTTP: its fields, its tokens, and how requests switch it."""

from typing import Any

import pytest
from fake_engine import CHAT, FakeClient, ask, chat, refused, stream, tool_tokenizer

MESSAGES = (
    "{% for m in messages %}{{ m.role }}:{% if m.reasoning_content %}[{{ m.reasoning_content }}]"
    "{% endif %}{{ m.content }};{% endfor %}"
)
SWITCH = (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
QWEN3 = MESSAGES + SWITCH
OPENED = MESSAGES + "{% if enable_thinking is not defined or enable_thinking %}<think>\n{% endif %}"
ANSWER = "<think>\nHm.\n</think>\n\nHello!"


@pytest.mark.parametrize(
    ("template", "text"), [(QWEN3, ANSWER), (OPENED, ANSWER.removeprefix("<think>\n"))]
)
@pytest.mark.parametrize("step", [1, 5, 100])
def test_reasoning_has_its_own_fields(template: str, text: str, step: int) -> None:
    tokenizer = tool_tokenizer(template)
    reply = chat(FakeClient(text, step=step), tokenizer)
    message = reply["choices"][0]["message"]
    assert message["content"] == "Hello!"
    assert message["reasoning_content"] == message["reasoning"] == "Hm."
    num = text.index("Hello!") - 2  # line ends after the marker belong to the answer
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    options = {"include_usage": True}
    client = FakeClient(text, step=step, pace=0.001)
    chunks = stream(client, "/v1/chat/completions", tokenizer=tokenizer, stream_options=options)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Hello!"
    assert chunks[-1]["usage"]["completion_tokens_details"] == {"reasoning_tokens": num}
    hidden = chat(FakeClient(text, step=step), tokenizer, include_reasoning=False)
    assert "reasoning" not in hidden["choices"][0]["message"]


def test_reasoning_can_be_switched_off_and_left_in_the_text() -> None:
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        client = FakeClient("Hello!")
        message = chat(client, tool_tokenizer(QWEN3), **off)["choices"][0]["message"]
        assert client.prompt.endswith("</think>\n\n")
        assert message == {"role": "assistant", "content": "Hello!", "refusal": None}
    client = FakeClient(ANSWER)
    body = CHAT | {"reasoning_effort": "high"}
    path = "/v1/chat/completions"
    ask(client, path, body, tokenizer=tool_tokenizer(MESSAGES + SWITCH + "{{ reasoning_effort }}"))
    assert client.prompt.endswith("high")
    reply = ask(client, path, CHAT, tokenizer=tool_tokenizer(QWEN3), reasoning_parser="none")
    assert reply.json()["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.parametrize(
    "template",
    [
        "<think>\n",
        "{{ messages[0].thinking }}<think>\n",  # an attribute, no variable
        "{% set ns = namespace(enable_thinking=true) %}{% set thinking = 1 %}<think>\n",
        "{{ reasoning_effort }}<think>\n",  # gpt-oss can reason less, but not nothing
    ],
)
def test_a_switch_that_the_template_lacks_is_refused(template: str) -> None:
    body = CHAT | {"reasoning_effort": "none"}
    error = refused("/v1/chat/completions", body, tokenizer=tool_tokenizer(MESSAGES + template))
    assert "cannot switch its reasoning" in error["message"]


def test_reasoning_may_be_switched_off_where_there_is_none() -> None:
    body = CHAT | {"reasoning_effort": "none"}
    assert ask(FakeClient(), "/v1/chat/completions", body).status_code == 200  # it never reasons


def test_reasoning_comes_back_to_the_template() -> None:
    for name in ("reasoning_content", "reasoning"):
        client = FakeClient("x")
        earlier: Any = {"role": "assistant", "content": "Hello!", name: "Hm."}
        chat(client, tool_tokenizer(QWEN3), messages=[*CHAT["messages"], earlier])
        assert client.prompt == "user:Hi;assistant:[Hm.]Hello!;"


def test_an_implied_format_is_chosen_by_a_flag() -> None:
    reply = ask(
        FakeClient("Hm.</think>Hello!"),
        "/v1/chat/completions",
        CHAT,
        reasoning_parser="deepseek_r1",
    )
    message = reply.json()["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("Hm.", "Hello!")


def test_an_answer_that_ends_in_its_reasoning() -> None:
    reply = chat(FakeClient(ANSWER), tool_tokenizer(QWEN3), max_tokens=11)
    choice = reply["choices"][0]
    assert choice["finish_reason"] == "length"
    assert (choice["message"]["reasoning"], choice["message"]["content"]) == ("Hm.", "")


def test_a_structure_follows_the_reasoning() -> None:
    client = FakeClient("{}")
    form = {"type": "json_object"}
    chat(client, tool_tokenizer(OPENED), response_format=form)
    assert "</think>" in client.params["structured_outputs"]["grammar"]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    chat(client, tool_tokenizer(QWEN3), response_format=form, **off)
    assert client.params["structured_outputs"] == {"json_object": True}
