"""Tests of the Responses API, with OpenAI's own client in process: items, events, storage."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
from asgi_clients import THOUGHT, TOOL_LOOP, app, call_text, engine, openai_client, run
from fake_engine import FakeClient, ask
from openai import BadRequestError, NotFoundError
from openai.types.responses import ResponseFunctionToolCall
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from pydantic import BaseModel

from slotzero.errors import RequestError
from slotzero.server.responses_request import NEUTRAL, ResponsesRequest
from slotzero.server.settings import ServerSettings

WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": False,
}
ADD: Any = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}


def test_a_response() -> None:
    async def work() -> None:
        client = openai_client(fake)
        made = await client.responses.create(
            model="tiny", input="Hi", instructions="Be brief.", metadata={"a": "b"},
            max_output_tokens=50,
        )  # fmt: skip
        assert made.output_text == "Hello!"
        thought, message = made.output
        assert (thought.type, message.type) == ("reasoning", "message")
        assert thought.content is not None
        assert thought.content[0].text == "Hm."
        assert made.status == "completed"
        assert made.usage is not None
        assert made.usage.output_tokens_details.reasoning_tokens == len("<think>\nHm.\n</think>")
        assert made.usage.input_tokens_details.cached_tokens == 3
        assert made.usage.total_tokens == made.usage.input_tokens + made.usage.output_tokens
        again = await client.responses.retrieve(made.id)
        assert again.to_dict() == made.to_dict()
        items = await client.responses.input_items.list(made.id)
        assert items.data[0].content[0].text == "Hi"  # type: ignore[union-attr, index]
        await client.responses.delete(made.id)
        with pytest.raises(NotFoundError, match="not stored here"):
            await client.responses.retrieve(made.id)

    fake = engine(f"{THOUGHT}Hello!")
    run(work)
    assert fake.prompt == "system:Be brief.;user:Hi;"
    assert fake.params["max_tokens"] == 50


@pytest.mark.parametrize("step", [1, 1000])
def test_a_stream_agrees_with_its_response(step: int) -> None:
    async def work() -> None:
        client = openai_client(engine(TOOL_LOOP[0], step))
        text, thought, arguments, numbers = "", "", "", []
        async with client.responses.stream(model="tiny", input="Hi", tools=[WEATHER]) as stream:
            async for event in stream:
                numbers.append(event.sequence_number)
                if event.type == "response.output_text.delta":
                    text += event.delta
                elif event.type == "response.reasoning_text.delta":
                    thought += event.delta
                elif event.type == "response.function_call_arguments.delta":
                    arguments += event.delta
            final = await stream.get_final_response()
        assert numbers == list(range(len(numbers)))
        assert (text, thought, arguments) == ("I look.", "Hm.", '{"city": "Paris"}')
        assert final.status == "completed"
        assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
        assert final.output[2].arguments == arguments  # type: ignore[union-attr]
        assert (await client.responses.retrieve(final.id)).output_text == text

    run(work)


@pytest.mark.parametrize("is_stored", [True, False])
def test_a_tool_loop_with_two_tools(is_stored: bool) -> None:
    """Continued by previous_response_id, or by sending all items back."""
    results = {"weather": "3 degrees", "add": "3"}

    async def work() -> None:
        client = openai_client(fake)
        items: list[Any] = [{"role": "user", "content": "How warm is Paris?"}]
        names, previous = [], None
        while True:
            made = await client.responses.create(
                model="tiny", input=items, tools=[WEATHER, ADD], store=is_stored,
                previous_response_id=previous, include=["reasoning.encrypted_content"],
            )  # fmt: skip
            calls = [one for one in made.output if isinstance(one, ResponseFunctionToolCall)]
            names += [call.name for call in calls]
            outputs = [
                {"type": "function_call_output", "call_id": call.call_id,
                 "output": results[call.name]}
                for call in calls
            ]  # fmt: skip
            if not calls:
                break
            if is_stored:
                previous, items = made.id, outputs
            else:
                items += [*made.output, *outputs]
        assert names == ["weather", "add"]
        assert made.output_text == "It is 3 degrees in Paris."

    fake = engine(TOOL_LOOP)
    run(work)
    assert fake.prompt.endswith(
        "user:How warm is Paris?;assistant:<think>Hm.</think>I look.<tool_call>"
        '{"name": "weather", "arguments": {"city": "Paris"}}</tool_call>;tool:3 degrees;'
        'assistant:<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>;tool:3;'
    )


class Answer(BaseModel):
    value: int


def test_structured_text() -> None:
    async def work() -> None:
        client = openai_client(fake)
        made = await client.responses.parse(model="tiny", input="Hi", text_format=Answer)
        assert made.output_parsed == Answer(value=3)
        named: Any = {"type": "function", "name": "add"}
        await client.responses.create(model="tiny", input="Hi", tools=[ADD], tool_choice=named)

    fake = engine(['{"value": 3}', call_text("add", "{}")])
    run(work)
    first, second = (params["structured_outputs"]["grammar"] for _, _, params in fake.submitted)
    assert '"value"' in first
    assert "add" in second


def test_a_response_that_is_cut_off() -> None:
    async def work() -> None:
        client = openai_client(engine(TOOL_LOOP[0]))
        made = await client.responses.create(
            model="tiny", input="Hi", tools=[WEATHER], max_output_tokens=90
        )
        assert (made.status, made.output[2].status) == ("incomplete", "incomplete")  # type: ignore[union-attr]
        assert made.incomplete_details is not None
        assert made.incomplete_details.reason == "max_output_tokens"
        with pytest.raises(BadRequestError, match="is incomplete and cannot be continued"):
            await client.responses.create(model="tiny", input="x", previous_response_id=made.id)

    run(work)


@pytest.mark.parametrize("arguments", ['{"city": Paris}', "[1]"])
def test_a_broken_call_before_another_is_incomplete(arguments: str) -> None:
    async def work() -> None:
        broken = call_text("weather", arguments)
        client = openai_client(engine(broken + call_text("add", '{"a": 1, "b": 2}')))
        made = await client.responses.create(model="tiny", input="Hi", tools=[WEATHER, ADD])
        assert made.output[0].status == made.status == "incomplete"
        assert made.incomplete_details.reason == "broken_tool_call"

    run(work)


def test_a_stream_can_be_cancelled() -> None:
    names: list[str] = []

    async def work() -> None:
        inner = app(fake)

        async def watched(scope: Any, receive: Any, send: Any) -> None:
            async def seen(message: Any) -> None:
                names.extend(re.findall("resp_[0-9a-f]{32}", str(message.get("body", b""))))
                await send(message)

            await inner(scope, receive, seen)

        transport = httpx2.ASGITransport(app=watched)
        async with httpx2.AsyncClient(transport=transport, base_url="http://test") as http:
            body = {"input": "Hi", "stream": True}
            streaming = asyncio.create_task(http.post("/v1/responses", json=body))
            while not names:
                await asyncio.sleep(0.01)
            cancelled = await http.post(f"/v1/responses/{names[0]}/cancel")
            assert cancelled.status_code == 202
            *_, last, end = (await streaming).text.split("\n\n")
            assert (last.partition("\n")[0], end) == ("event: response.incomplete", "")
            again = await http.post(f"/v1/responses/{names[0]}/cancel")
            assert "is cancelled already" in again.json()["error"]["message"]
            reply = (await http.get(f"/v1/responses/{names[0]}")).json()
            assert reply["status"] == "cancelled"
            assert 0 < reply["usage"]["output_tokens"] < 800

    fake = engine("a b " * 200, step=1)
    run(work)
    assert len(fake.closed) == 1


def test_an_error_within_a_stream_has_the_next_number() -> None:
    body = {"input": "Hi", "stream": True}
    reply = ask(FakeClient("Hello", dies_at=2, pace=0.01), "/v1/responses", body)
    *events, end = (event.partition("\ndata: ") for event in reply.text.split("\n\n"))
    bodies = [json.loads(data) for _, _, data in events]
    assert end == ("", "", "")
    assert [body["sequence_number"] for body in bodies] == list(range(len(bodies)))
    name, last = events[-1][0], bodies[-1]
    assert (name, last["type"], last["code"]) == ("event: error", "error", "engine_died")
    assert last["message"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": "x", "previous_response_id": "resp_none"}, "previous_response_id"),
        ({}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
         "input[0].content[0].type"),
        ({"input": [{"type": None, "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"type": {}, "role": "user", "content": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "function_call", "call_id": "1", "name": "f", "arguments": "no"}]},
         "input[0].arguments"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"input": "x", "tools": [WEATHER | {"name": "x" * 65}]}, "tools[0].name"),
        ({"input": "x", "tools": [WEATHER | {"parameters": {"type": "string"}}]},
         "tools[0].parameters.type"),
        ({"input": "x", "tools": [WEATHER, WEATHER]}, "tools"),
        ({"input": "x", "tools": [WEATHER], "tool_choice": {"type": "function", "name": "g"}},
         "tool_choice"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "temperature": 9e999}, "temperature"),
        ({"input": "x", "reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "odd": 1}, "odd"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named(body: Any, param: str) -> None:
    sent = json.dumps({"model": "tiny", **body}).encode()
    reply = ask(FakeClient(), "/v1/responses", content=sent)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error"), error


def test_every_field_of_openai_is_known() -> None:
    theirs = set(ResponseCreateParamsStreaming.__annotations__)
    assert theirs - set(ResponsesRequest.model_fields) == set()
    for name in NEUTRAL:
        for value in ("odd", 5, {"a": 1}):
            with pytest.raises(RequestError) as error:
                ResponsesRequest.model_validate({"input": "x", name: value})
            assert error.value.param == name


def test_responses_survive_in_a_file(tmp_path: Path) -> None:
    file = str(tmp_path / "responses.db")

    async def first() -> list[str]:
        client = openai_client(engine("Hello!"), response_store=file, max_stored_responses=2)
        made = [await client.responses.create(model="tiny", input=text) for text in "abc"]
        return [one.id for one in made]

    async def second() -> None:
        client = openai_client(engine("Hello!"), response_store=file)
        assert (await client.responses.retrieve(names[2])).output_text == "Hello!"
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(names[0])  # dropped: at most two are kept
        await client.responses.create(model="tiny", input="d", previous_response_id=names[1])

    names = run(first)
    run(second)


def test_memory_is_bounded_and_can_be_off() -> None:
    async def work() -> None:
        client = openai_client(engine("Hello!"), max_stored_responses=0)
        made = await client.responses.create(model="tiny", input="a")
        with pytest.raises(NotFoundError):
            await client.responses.retrieve(made.id)
        client = openai_client(engine("Hello!"), max_stored_responses=1)
        names = [(await client.responses.create(model="tiny", input=t)).id for t in "ab"]
        with pytest.raises(BadRequestError, match="not stored here; send the whole"):
            await client.responses.create(model="tiny", input="c", previous_response_id=names[0])
        await client.responses.create(model="tiny", input="c", previous_response_id=names[1])

    run(work)
    assert ServerSettings().response_store is None
