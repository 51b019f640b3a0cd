"""Tests with instructor, which asks for structures by a schema or by tools."""

from collections.abc import Iterable
from typing import Any

import instructor
import pytest
from agent_tools import MESSAGES, Report, Tools
from openai import OpenAI
from pydantic import BaseModel


class weather(BaseModel):  # noqa: N801
    """Return the weather of a city."""

    city: str


class add(BaseModel):  # noqa: N801
    """Add two numbers."""

    a: int
    b: int


def client(url: str, mode: instructor.Mode) -> Any:
    return instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="k"), mode=mode)


def test_two_tools(scripted: str, tools: Tools) -> None:
    """It returns calls rather than running them."""
    looping = client(scripted, instructor.Mode.PARALLEL_TOOLS)
    messages = list(MESSAGES)
    for _ in range(2):
        (call,) = looping.chat.completions.create(
            model="tiny", messages=messages, response_model=Iterable[weather | add]
        )
        name = type(call).__name__
        function = {"name": name, "arguments": call.model_dump_json()}
        made = {"id": f"call_{name}", "type": "function", "function": function}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [made]},
            {"role": "tool", "tool_call_id": f"call_{name}",
             "content": tools.call(name, call.model_dump())},
        ]  # fmt: skip
    assert tools.called == [("weather", "Paris"), ("add", 1, 2)]


@pytest.mark.parametrize("mode", [instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS])
def test_structured_output(served: str, mode: instructor.Mode) -> None:
    made = client(served, mode).chat.completions.create(
        model="default", messages=MESSAGES, response_model=Report, max_retries=0
    )
    assert isinstance(made, Report)
