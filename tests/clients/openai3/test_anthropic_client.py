"""Tests with Anthropic's client: messages, whole and streamed."""

from typing import Any

import pytest
from agent_tools import FUNCTIONS, MESSAGES, Report, Tools
from anthropic import Anthropic

TOOLS: Any = [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS]
GIVEN: Any = {"max_tokens": 200}


def client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="k", max_retries=0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop(scripted: str, tools: Tools, is_stream: bool) -> None:
    messages = list(MESSAGES)
    while True:
        given: Any = {"model": "tiny", "messages": messages, "tools": TOOLS, **GIVEN}
        if is_stream:
            with client(scripted).messages.stream(**given) as stream:
                message = stream.get_final_message()
        else:
            message = client(scripted).messages.create(**given)
        messages.append({"role": "assistant", "content": message.content})
        calls = [block for block in message.content if block.type == "tool_use"]
        assert message.stop_reason == ("tool_use" if calls else "end_turn")
        if not calls:
            break
        results = [
            {"type": "tool_result", "tool_use_id": call.id,
             "content": tools.call(call.name, dict(call.input))}
            for call in calls
        ]  # fmt: skip
        messages.append({"role": "user", "content": results})
    tools.check(message.content[-1].text)


def test_structured_output(served: str) -> None:
    made = client(served).messages.parse(
        model="default", messages=MESSAGES, output_format=Report, **GIVEN
    )
    assert isinstance(made.parsed_output, Report)


def test_a_tool_that_must_be_called(served: str) -> None:
    tool: Any = {"name": "report", "input_schema": Report.model_json_schema()}
    made = client(served).messages.create(
        model="default", messages=MESSAGES, tools=[tool], tool_choice={"type": "any"}, **GIVEN
    )
    call = made.content[0]
    assert call.type == "tool_use"
    Report.model_validate(call.input)
