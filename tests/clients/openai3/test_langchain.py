"""Tests with langchain-openai, over chat completions and Responses."""

from typing import Any

import pytest
from agent_tools import QUESTION, Report, Tools
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

pytestmark = pytest.mark.parametrize("is_responses", [False, True])


def model(url: str, name: str, is_responses: bool) -> ChatOpenAI:
    return ChatOpenAI(
        model=name, base_url=f"{url}/v1", api_key="k", use_responses_api=is_responses, max_retries=0
    )


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop(scripted: str, tools: Tools, is_responses: bool, is_stream: bool) -> None:
    functions = {made.name: made for made in (tool(tools.weather), tool(tools.add))}
    looping = model(scripted, "tiny", is_responses).bind_tools(list(functions.values()))
    messages: list[Any] = [HumanMessage(QUESTION)]
    while True:
        if is_stream:
            first, *rest = looping.stream(messages)
            message: Any = sum(rest, first)
        else:
            message = looping.invoke(messages)
        messages.append(message)
        if not message.tool_calls:
            break
        messages += [functions[call["name"]].invoke(call) for call in message.tool_calls]
    tools.check(message.text)


def test_structured_output(served: str, is_responses: bool) -> None:
    typed = model(served, "default", is_responses).with_structured_output(Report)
    assert isinstance(typed.invoke(QUESTION), Report)
