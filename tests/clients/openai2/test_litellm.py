"""Tests with litellm, over chat completions and Messages."""

import json
from typing import Any

import litellm
import pytest
from agent_tools import FUNCTIONS, MESSAGES, Report, Tools

TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]


def given(kind: str, url: str, name: str) -> Any:
    base = url if kind == "anthropic" else f"{url}/v1"
    return {"model": f"{kind}/{name}", "base_url": base, "api_key": "k", "max_tokens": 200}


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop(kind: str, scripted: str, tools: Tools, is_stream: bool) -> None:
    messages = list(MESSAGES)
    while True:
        made = litellm.completion(
            messages=messages, tools=TOOLS, stream=is_stream, **given(kind, scripted, "tiny")
        )
        if is_stream:
            made = litellm.stream_chunk_builder(list(made), messages=messages)
        message = made.choices[0].message
        messages.append(message.model_dump())
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = tools.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    tools.check(message.content)


def test_structured_output(served: str) -> None:
    made = litellm.completion(
        messages=MESSAGES, response_format=Report, **given("openai", served, "default")
    )
    Report.model_validate_json(made.choices[0].message.content)
