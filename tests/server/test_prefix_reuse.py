"""Test that a conversation with tools reuses its prefix: prompts begin as the ones before them."""

import asyncio
from typing import Any

import httpx
from asgi_clients import call_text
from fake_engine import FakeClient, app_of

from slotzero.checkpoint.source import checkpoint_of
from slotzero.config import EngineConfig

PAGE_SIZE = 16
TURNS = 20
TOOLS: Any = [
    {"type": "function", "function": {
        "name": name, "description": f"Return the {name} of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}
    for name in ("weather", "population")
]  # fmt: skip


def pages(tokens: list[int]) -> list[tuple[int, ...]]:
    """Return the prefixes that end with a full page."""
    return [tuple(tokens[:end]) for end in range(PAGE_SIZE, len(tokens) + 1, PAGE_SIZE)]


def test_twenty_turns_with_tools_on_the_default_model() -> None:
    """The prefix cache is simulated: it has the full pages of all prompts and answers so far."""
    tokenizer = checkpoint_of(EngineConfig()).tokenizer()
    client = FakeClient()
    client.info = {**client.info, "limits": {"max_model_len": 8192}}
    answers = [call_text("weather", '{"city": "Rome"}'), "It rains in Rome, take a coat."]

    async def prompts() -> list[list[int]]:
        transport = httpx.ASGITransport(app=app_of(client, tokenizer))
        found, messages = [], []
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            for turn in range(TURNS):
                if turn % 2 == 0:
                    messages.append({"role": "user", "content": f"And on day {turn}?"})
                body = {"messages": messages, "tools": TOOLS}
                reply = await http.post("/tokenize", json=body)
                found.append(reply.json()["tokens"])
                if turn % 2 == 0:
                    function = {"name": "weather", "arguments": '{"city": "Rome"}'}
                    call = {"id": f"call_{turn}", "type": "function", "function": function}
                    messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
                    messages.append({"role": "tool", "tool_call_id": call["id"], "content": "Rain"})
                else:
                    messages.append({"role": "assistant", "content": answers[1]})
        return found

    cached: set[tuple[int, ...]] = set()
    num_asked = num_hit = 0
    for turn, prompt in enumerate(asyncio.run(prompts())):
        if turn:
            num_asked += len(prompt)
            num_hit += max((len(page) for page in pages(prompt) if page in cached), default=0)
        answer = tokenizer.encode(answers[turn % 2], add_special_tokens=False)
        cached.update(pages(prompt + answer))
    assert num_hit / num_asked >= 0.9, f"{num_hit} of {num_asked}"
