"""Tests with OpenAI's Agents SDK, over Responses and chat completions."""

import asyncio
from typing import Any

import agents
import pytest
from agent_tools import QUESTION, Report, Tools
from openai import AsyncOpenAI

agents.set_tracing_disabled(True)
pytestmark = pytest.mark.parametrize(
    "kind", [agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel]
)


def model(kind: Any, url: str, name: str) -> Any:
    return kind(name, AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0))


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop(kind: Any, scripted: str, tools: Tools, is_stream: bool) -> None:
    async def run() -> Any:
        functions = [agents.function_tool(tools.weather), agents.function_tool(tools.add)]
        agent = agents.Agent(name="a", tools=functions, model=model(kind, scripted, "tiny"))
        if not is_stream:
            return await agents.Runner.run(agent, QUESTION)
        result = agents.Runner.run_streamed(agent, QUESTION)
        async for _ in result.stream_events():
            pass
        return result

    tools.check(asyncio.run(run()).final_output)


def test_structured_output(kind: Any, served: str) -> None:
    agent = agents.Agent(name="a", output_type=Report, model=model(kind, served, "default"))
    assert isinstance(agents.Runner.run_sync(agent, QUESTION).final_output, Report)
