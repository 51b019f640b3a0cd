"""Tests with Pydantic AI, over all three APIs."""

import asyncio
from typing import Any

import pytest
from agent_tools import QUESTION, Report, Tools
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

KINDS = [OpenAIChatModel, OpenAIResponsesModel, AnthropicModel]


def model(kind: Any, url: str, name: str) -> Any:
    if kind is AnthropicModel:
        return kind(name, provider=AnthropicProvider(base_url=url, api_key="k"))
    return kind(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="k"))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop(kind: Any, scripted: str, tools: Tools, is_stream: bool) -> None:
    async def run() -> Any:
        agent = Agent(model(kind, scripted, "tiny"), tools=[tools.weather, tools.add])
        if not is_stream:
            return (await agent.run(QUESTION)).output
        async with agent.run_stream(QUESTION) as result:
            return await result.get_output()

    output = asyncio.run(run())
    if is_stream:  # the first text ends such a run: here, that before the first call
        assert output == "I look."
    else:
        tools.check(output)


@pytest.mark.parametrize("kind", KINDS[:2])
@pytest.mark.parametrize("output", [NativeOutput, ToolOutput])
def test_structured_output(kind: Any, served: str, output: Any) -> None:
    agent = Agent(model(kind, served, "default"), output_type=output(Report))
    assert isinstance(agent.run_sync(QUESTION).output, Report)
