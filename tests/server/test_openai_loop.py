"""Tests of chat completions with OpenAI's own client in process: a tool loop, helpers, parsing."""

from typing import Any

import pytest
from asgi_clients import THOUGHT, TOOL_LOOP, engine, openai_client, run
from openai.lib.streaming.chat import ContentDeltaEvent
from pydantic import BaseModel

USER: Any = {"role": "user", "content": "How warm is Paris?"}
TOOLS: Any = [
    {"type": "function", "function": {
        "name": name, "strict": True,
        "parameters": {"type": "object", "properties": {key: {"type": kind}},
                       "additionalProperties": False}}}
    for name, key, kind in (("weather", "city", "string"), ("add", "a", "integer"))
]  # fmt: skip


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_tool_loop_with_two_tools(is_stream: bool) -> None:
    results = {"weather": "3 degrees", "add": "3"}

    async def work() -> None:
        client, messages, names = openai_client(fake), [USER], []
        while True:
            given: Any = {"model": "tiny", "messages": messages, "tools": TOOLS}
            if is_stream:
                async with client.chat.completions.stream(**given) as stream:
                    parts = [event.delta async for event in stream
                             if isinstance(event, ContentDeltaEvent)]  # fmt: skip
                    made = await stream.get_final_completion()
                assert "".join(parts) == (made.choices[0].message.content or "")
            else:
                made = await client.chat.completions.create(**given)
            (choice,) = made.choices
            calls = choice.message.tool_calls or []
            assert choice.finish_reason == ("tool_calls" if calls else "stop")
            if not calls:
                break
            messages.append(choice.message.to_dict())
            for call in calls:
                names.append(call.function.name)
                messages.append({"role": "tool", "tool_call_id": call.id,
                                 "content": results[call.function.name]})  # fmt: skip
        assert names == ["weather", "add"]
        assert choice.message.content == "It is 3 degrees in Paris."

    fake = engine(TOOL_LOOP)
    run(work)
    assert "<think>Hm.</think>I look." in fake.prompt
    assert "weather" in fake.params["structured_outputs"]["grammar"]


class Answer(BaseModel):
    value: int


def test_parsed_answers() -> None:
    async def work() -> None:
        client = openai_client(engine(f'{THOUGHT}{{"value": 3}}'))
        made = await client.chat.completions.parse(
            model="tiny", messages=[USER], response_format=Answer
        )
        message = made.choices[0].message
        assert message.parsed == Answer(value=3)
        assert message.model_extra is not None
        assert message.model_extra["reasoning_content"] == "Hm."
        assert made.usage is not None
        assert made.usage.completion_tokens_details is not None
        assert made.usage.completion_tokens_details.reasoning_tokens

    run(work)
