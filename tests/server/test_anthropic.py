"""Tests of the Messages API, with Anthropic's own client in process: blocks, events, errors."""

import json
from typing import Any

import pytest
from asgi_clients import THOUGHT, TOOL_LOOP, call_text, engine, http_client, run
from fake_engine import FakeClient, ask

from slotzero.server.anthropic_request import MessagesRequest, messages_conversation
from slotzero.server.conversation import ANY

USER: Any = [{"role": "user", "content": "How warm is Paris?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ADD: Any = {"name": "add", "input_schema": {"type": "object"}}


def client_of(fake: FakeClient, **given: Any) -> Any:
    import anthropic  # here, because it takes seconds, and every process collects this file

    http = http_client(fake, **given)
    return anthropic.AsyncAnthropic(
        base_url="http://test", api_key="only-for-tests", http_client=http, max_retries=0
    )


def test_a_message() -> None:
    async def work() -> None:
        client = client_of(fake, api_key=("only-for-tests",))
        made = await client.messages.create(
            model="tiny", max_tokens=50, messages=USER, stop_sequences=["ZZ"],
            extra_body={"temperature": 0.5},
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            metadata={"user_id": "me"},
        )  # fmt: skip
        thought, text = made.content
        assert (thought.thinking, text.text) == ("Hm.", "Hello!")
        assert (made.stop_reason, made.stop_sequence) == ("end_turn", None)
        assert made.usage.cache_read_input_tokens == 3
        num = made.usage.input_tokens + 3
        counted = await client.messages.count_tokens(
            model="tiny", messages=USER, system="Be brief."
        )
        assert counted.input_tokens == num == len(fake.submitted[0][1])

    fake = engine(f"{THOUGHT}Hello!")
    run(work)
    assert fake.prompt == "system:Be brief.;user:How warm is Paris?;"
    assert fake.params == {"max_tokens": 50, "temperature": 0.5, "skip_special_tokens": False}


@pytest.mark.parametrize("step", [1, 1000])
def test_a_stream_agrees_with_its_message(step: int) -> None:
    async def work() -> None:
        client = client_of(engine(TOOL_LOOP[0], step))
        kinds = []
        given = {"model": "tiny", "max_tokens": 200, "messages": USER, "tools": [WEATHER]}
        async with client.messages.stream(**given) as stream:
            async for event in stream:
                kinds.append(event.type)
            streamed = await stream.get_final_message()
        whole = await client.messages.create(**given)
        for one, other in zip(streamed.content, whole.content, strict=True):
            assert one.model_dump(exclude={"id"}) == other.model_dump(exclude={"id"})
        assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
        assert whole.content[2].input == {"city": "Paris"}
        assert streamed.stop_reason == whole.stop_reason == "tool_use"
        assert streamed.usage == whole.usage
        assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 3

    run(work)


def test_a_tool_loop_with_two_tools() -> None:
    results = {"weather": "3 degrees", "add": "3"}

    async def work() -> None:
        client, messages, names = client_of(fake), list(USER), []
        while True:
            made = await client.messages.create(
                model="tiny", max_tokens=200, messages=messages, tools=[WEATHER, ADD]
            )
            if made.stop_reason != "tool_use":
                break
            calls = [block for block in made.content if block.type == "tool_use"]
            names += [call.name for call in calls]
            messages += [
                {"role": "assistant", "content": made.content},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": call.id, "content": results[call.name]}
                    for call in calls]},
            ]  # fmt: skip
        assert names == ["weather", "add"]
        assert made.content[0].text == "It is 3 degrees in Paris."

    fake = engine(TOOL_LOOP)
    run(work)
    assert fake.prompt.endswith(
        "user:How warm is Paris?;assistant:<think>Hm.</think>I look.<tool_call>"
        '{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>;tool:3 degrees;'
        'assistant:<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>;tool:3;'
    )


def test_choices_thinking_and_structure() -> None:
    async def work() -> None:
        client = client_of(fake)
        given = {"model": "tiny", "max_tokens": 99, "messages": USER}
        choice = {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
        made = await client.messages.create(**given, tools=[WEATHER, ADD], tool_choice=choice)
        assert made.content[-1].name == "add"
        schema = {"type": "object", "properties": {"value": {"type": "integer"}}}
        made = await client.messages.create(
            **given, thinking={"type": "disabled"},
            extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
        )  # fmt: skip
        assert json.loads(made.content[0].text) == {"value": 3}
        made = await client.messages.create(**given, stop_sequences=["!"])
        assert (made.stop_reason, made.stop_sequence) == ("stop_sequence", "!")
        await client.messages.create(**given, thinking={"type": "enabled", "budget_tokens": 1024})
        prefilled = [*USER, {"role": "assistant", "content": "It is"}]
        await client.messages.create(**given | {"messages": prefilled})

    fake = engine([call_text("add", "{}"), '{"value": 3}', "Stop! Now", "x", " warm."])
    run(work)
    forced, structured = (fake.submitted[i][2]["structured_outputs"] for i in (0, 1))
    assert "add" in forced["grammar"]
    assert "value" in str(structured["json_schema"])
    assert fake.prompt == "user:How warm is Paris?;assistant:It is"


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        (TOOL_LOOP[0], 90),
        (TOOL_LOOP[0][:-20], 900),
        (f"{THOUGHT}I look.\n{call_text('weather', '[1]')}", 900),
    ],
)
def test_a_call_that_is_cut_off_is_not_invented(text: str, limit: int) -> None:
    """Neither by the limit, nor by a model that ends in its middle or writes no object."""

    async def work() -> None:
        given: Any = {"model": "tiny", "max_tokens": limit, "messages": USER, "tools": [WEATHER]}
        made = await client_of(engine(text)).messages.create(**given)
        assert made.stop_reason == "max_tokens"
        assert made.content[2].input == {}
        async with client_of(engine(text)).messages.stream(**given) as stream:
            assert (await stream.get_final_message()).stop_reason == "max_tokens"

    run(work)


def test_errors_have_anthropics_shape() -> None:
    import anthropic

    async def work() -> None:
        client = client_of(engine("x"))
        given = {"max_tokens": 5, "messages": USER}
        with pytest.raises(anthropic.NotFoundError, match="not served here"):
            await client.messages.create(model="other", **given)
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            bad = {"temperature": -1}
            await client.messages.create(model="tiny", extra_body=bad, **given)
        locked = client_of(engine("x"), api_key=("other",))
        with pytest.raises(anthropic.AuthenticationError, match="invalid API key"):
            await locked.messages.create(model="tiny", **given)

    run(work)


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"max_tokens": 5}, "messages"),
        ({"messages": USER}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": USER, "max_tokens": 0}, "max_tokens"),
        ({"messages": USER, "max_tokens": 5, "odd": 1}, "odd: unknown field"),
        ({"messages": USER, "max_tokens": 5, "tools": [ADD, ADD]}, "two tools have the name"),
        ({"messages": USER, "max_tokens": 5, "tools": [ADD | {"name": "x" * 65}]},
         f"tools[0].name: '{'x' * 40}', of 65 characters, does not match"),
        ({"messages": USER, "max_tokens": 5,
          "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
         "tools[0].type: must be 'custom', got 'web_search_20250305'"),
        ({"messages": USER, "max_tokens": 5, "tools": [{"name": "f"}]},
         "tools[0].input_schema: missing"),
        ({"messages": USER, "max_tokens": 5, "tools": [ADD | {"input_schema": {"type": "x"}}]},
         "tools[0].input_schema.type"),
        ({"messages": USER, "max_tokens": 5, "tools": [ADD],
          "tool_choice": {"type": "tool", "name": "f"}}, "tool_choice.name: 'f' is not one"),
        ({"messages": USER, "max_tokens": 5, "tool_choice": {"type": "tool"}},
         "tool_choice.name"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "max_tokens": 5},
         "messages[0].content[0].type: 'image' is not supported"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "image"}]}]}],
          "max_tokens": 5},
         "messages[0].content[0].content[0].type: 'image' is not supported, only text is"),
        ({"messages": USER, "max_tokens": 5, "system": [{"type": "tool_use"}]},
         "system[0].type: 'tool_use' is not supported, only text is"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1", "name": "f",
                                                     "input": {}}]}], "max_tokens": 5},
         "only the assistant thinks and uses tools"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}], "max_tokens": 5},
         "tool_use_id: missing"),
        ({"messages": USER, "max_tokens": 5, "thinking": {"type": "enabled"}},
         "does not reason"),
        ({"messages": USER, "max_tokens": 5, "mcp_servers": [{}]}, "mcp_servers: not supported"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(body: Any, where: str) -> None:
    reply = ask(FakeClient(), "/v1/messages", body)
    assert reply.status_code == 400, reply.text
    assert set(reply.json()) == {"type", "error"}
    assert reply.json()["error"]["type"] == "invalid_request_error"
    assert where in reply.json()["error"]["message"]


def test_an_error_within_a_stream() -> None:
    body = {"messages": USER, "max_tokens": 50, "stream": True}
    reply = ask(FakeClient("Hello", dies_at=2, pace=0.01), "/v1/messages", body)
    *_, last, end = reply.text.split("\n\n")
    assert end == ""
    name, data = last.split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: "))["error"]["type"] == "overloaded_error"


def test_effort_works_with_and_without_thinking() -> None:
    for thinking, effort, expected in (
        (None, "low", "low"),
        ("adaptive", "max", "high"),
        ("enabled", None, ANY),
        ("disabled", "low", "none"),
        ("adaptive", None, None),
    ):
        given = {"model": "tiny", "max_tokens": 5, "messages": USER}
        given |= {} if thinking is None else {"thinking": {"type": thinking}}
        given |= {} if effort is None else {"output_config": {"effort": effort}}
        made = messages_conversation(MessagesRequest(**given))
        assert made.template.effort == expected, (thinking, effort)


def test_invalid_unicode_of_a_model_is_sent() -> None:
    call = call_text("weather", '{"city": "\\ud83d"}')

    async def work() -> None:
        made = await client_of(engine(f"{THOUGHT}{call}")).messages.create(
            model="tiny", max_tokens=200, messages=USER, tools=[WEATHER]
        )
        assert made.content[-1].input == {"city": "\ud83d"}

    run(work)
