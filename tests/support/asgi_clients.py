"""The official clients of the APIs, connected to the application in this process."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import httpx2
from fake_engine import FakeClient, app_of, tool_tokenizer
from openai import AsyncOpenAI

T = TypeVar("T")
# Qwen3's way to write reasoning and calls, in short
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} <tool_call>{% endif %}{% for m in messages %}"
    "{{ m.role }}:{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% for c in m.tool_calls %}<tool_call>{{ c.function | tojson }}</tool_call>"
    "{% endfor %};{% endfor %}{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}"
)
THOUGHT = "<think>\nHm.\n</think>\n\n"


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


TOOL_LOOP = [
    THOUGHT + "I look.\n" + call_text("weather", '{"city": "Paris"}'),
    call_text("add", '{"a": 1, "b": 2}'),
    "It is 3 degrees in Paris.",
]
"""What a model answers in a conversation with two tools."""


def engine(texts: str | list[str], step: int = 3) -> FakeClient:
    client = FakeClient(texts, step=step, pace=0.0005)
    client.info = {**client.info, "limits": {"max_model_len": 8192}}
    return client


def app(client: FakeClient, **given: Any) -> Any:
    return app_of(client, tool_tokenizer(TEMPLATE), **given)


def http_client(client: FakeClient, **given: Any) -> httpx2.AsyncClient:
    return httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app=app(client, **given)), base_url="http://test"
    )


def openai_client(client: FakeClient, **given: Any) -> AsyncOpenAI:
    http = http_client(client, **given)
    return AsyncOpenAI(base_url="http://test/v1", api_key="k", http_client=http, max_retries=0)


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(work())
