"""Tests with OpenAI's client: chat completions and Responses, whole and streamed."""

import json
from typing import Any

import pytest
from agent_tools import FUNCTIONS, MESSAGES, QUESTION, Report, Tools
from openai import OpenAI, pydantic_function_tool

CHAT_TOOLS: Any = [{"type": "function", "function": function} for function in FUNCTIONS]
RESPONSE_TOOLS: Any = [{"type": "function", "strict": False, **f} for f in FUNCTIONS]


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_of_chat_completions(scripted: str, tools: Tools, is_stream: bool) -> None:
    messages = list(MESSAGES)
    while True:
        given: Any = {"model": "tiny", "messages": messages, "tools": CHAT_TOOLS}
        if is_stream:
            with client(scripted).chat.completions.stream(**given) as stream:
                message = stream.get_final_completion().choices[0].message
        else:
            message = client(scripted).chat.completions.create(**given).choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            result = tools.call(call.function.name, json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    tools.check(message.content)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_of_responses(scripted: str, tools: Tools, is_stream: bool) -> None:
    asked: Any = QUESTION
    previous = None
    while True:
        given: Any = {
            "model": "tiny", "input": asked, "tools": RESPONSE_TOOLS,
            "previous_response_id": previous,
        }  # fmt: skip
        if is_stream:
            with client(scripted).responses.stream(**given) as stream:
                made = stream.get_final_response()
        else:
            made = client(scripted).responses.create(**given)
        calls = [item for item in made.output if item.type == "function_call"]
        if not calls:
            break
        previous = made.id
        asked = [
            {"type": "function_call_output", "call_id": call.call_id,
             "output": tools.call(call.name, json.loads(call.arguments))}
            for call in calls
        ]  # fmt: skip
    tools.check(made.output_text)


def test_structured_output(served: str) -> None:
    made = client(served).chat.completions.parse(
        model="default", messages=MESSAGES, response_format=Report
    )
    assert isinstance(made.choices[0].message.parsed, Report)
    response = client(served).responses.parse(model="default", input=QUESTION, text_format=Report)
    assert isinstance(response.output_parsed, Report)


def test_a_tool_that_must_be_called(served: str) -> None:
    made = client(served).chat.completions.parse(
        model="default",
        messages=MESSAGES,
        tools=[pydantic_function_tool(Report)],
        tool_choice="required",
    )
    (call, *_) = made.choices[0].message.tool_calls or ()
    assert isinstance(call.function.parsed_arguments, Report)
