"""Check with agent frameworks that are not test dependencies, since their dependencies conflict.

    python tests/support/agent_clients.py serve PORT    where slotzero is installed
    python tests/support/agent_clients.py PORT          where one or more of the frameworks are

The server has a fake engine, whose answers call two tools (`tiny` on PORT) or are JSON (PORT + 1).
Each framework that is installed runs a loop with these tools and asks for structured output.
"""

import asyncio
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from pydantic import BaseModel

QUESTION = "How warm is Paris?"
TOOLS: Any = [
    {"type": "function", "function": {
        "name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "add")
]  # fmt: skip
names: list[str] = []


class Answer(BaseModel):
    """An answer."""

    value: int


def weather(city: str) -> str:
    """Return the weather of a city."""
    names.append("weather")
    return f"3 degrees in {city}"


def add(a: int, b: int) -> int:
    """Add two numbers."""
    names.append("add")
    return a + b


def openai_agents(urls: list[str]) -> list[Any]:
    import agents
    from openai import AsyncOpenAI

    agents.set_tracing_disabled(True)
    tools = [agents.function_tool(weather), agents.function_tool(add)]
    found = []
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        models = [kind("tiny", AsyncOpenAI(base_url=url, api_key="k")) for url in urls]
        looping = agents.Agent(name="a", tools=tools, model=models[0])
        found.append(agents.Runner.run_sync(looping, QUESTION).final_output)
        typed = agents.Agent(name="a", output_type=Answer, model=models[1])
        found.append(agents.Runner.run_sync(typed, QUESTION).final_output)
    return found


def pydantic_ai(urls: list[str]) -> list[Any]:
    from pydantic_ai import Agent, NativeOutput
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.openai import OpenAIProvider

    found = []
    for kind in (OpenAIChatModel, OpenAIResponsesModel):
        models = [kind("tiny", provider=OpenAIProvider(base_url=u, api_key="k")) for u in urls]
        found.append(Agent(models[0], tools=[weather, add]).run_sync(QUESTION).output)
        found.append(Agent(models[1], output_type=NativeOutput(Answer)).run_sync(QUESTION).output)
    return found


def langchain_openai(urls: list[str]) -> list[Any]:
    from langchain_core.messages import HumanMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    tools = {made.name: made for made in (tool(weather), tool(add))}
    found = []
    for is_responses in (False, True):
        models = [
            ChatOpenAI(model="tiny", base_url=url, api_key="k", use_responses_api=is_responses)
            for url in urls
        ]
        messages: list[Any] = [HumanMessage(QUESTION)]
        looping = models[0].bind_tools(list(tools.values()))
        messages.append(looping.invoke(messages))
        while messages[-1].tool_calls:
            messages += [tools[call["name"]].invoke(call) for call in messages[-1].tool_calls]
            messages.append(looping.invoke(messages))
        found.append(messages[-1].text)
        found.append(models[1].with_structured_output(Answer).invoke(QUESTION))
    return found


def litellm(urls: list[str]) -> list[Any]:
    import litellm

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    given: Any = {"model": "openai/tiny", "api_key": "k"}
    while True:
        made = litellm.completion(messages=messages, tools=TOOLS, base_url=urls[0], **given)
        message = made.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            break
        for call in message.tool_calls:
            names.append(call.function.name)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "3 degrees"})
    typed = litellm.completion(
        messages=messages[:1], response_format=Answer, base_url=urls[1], **given
    )
    return [message.content, Answer.model_validate_json(typed.choices[0].message.content)]


def instructor(urls: list[str]) -> list[Any]:
    import instructor
    from openai import OpenAI

    client = instructor.from_openai(
        OpenAI(base_url=urls[1], api_key="k"), mode=instructor.Mode.JSON_SCHEMA
    )
    messages: Any = [{"role": "user", "content": QUESTION}]
    return [client.chat.completions.create(model="tiny", messages=messages, response_model=Answer)]


CHECKS: dict[str, Callable[[list[str]], list[Any]]] = {
    "agents": openai_agents,
    "pydantic_ai": pydantic_ai,
    "langchain_openai": langchain_openai,
    "litellm": litellm,
    "instructor": instructor,
}


async def serve(port: int) -> None:
    import uvicorn
    from asgi_clients import TOOL_LOOP, app, engine

    servers = [
        uvicorn.Server(uvicorn.Config(app(engine(texts)), port=port + i, log_level="warning"))
        for i, texts in enumerate((TOOL_LOOP, '{"value": 3}'))
    ]
    await asyncio.gather(*(server.serve() for server in servers))


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        sys.exit(asyncio.run(serve(int(sys.argv[2]))))
    for name, check in CHECKS.items():
        if find_spec(name) is None:
            print(f"{name}: not installed")
            continue
        names.clear()
        first = int(sys.argv[1])
        found = check([f"http://127.0.0.1:{first + i}/v1" for i in (0, 1)])
        print(f"{name}: called {names}, answered {found}")
