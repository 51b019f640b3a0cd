"""Routes of OpenAI's Responses API: create, retrieve, delete, cancel, and the input of a response.

A response is stored, unless the request says otherwise, so that a later one can continue it. One
that was cut off is stored too, but cannot be continued.
"""

import uuid
from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request, Response

from slotzero.errors import RequestError, UnknownResponseError
from slotzero.server.answer_plan import plan_answer
from slotzero.server.app_state import AppState
from slotzero.server.generation import Generation
from slotzero.server.replies import ReplyModel
from slotzero.server.response_store import StoredResponse
from slotzero.server.responses_request import (
    ResponsesRequest,
    input_messages,
    responses_conversation,
)
from slotzero.server.responses_writer import ResponseReply, ResponsesWriter
from slotzero.server.stream_format import RESPONSES
from slotzero.server.streaming import reply, responses, told


class DeletedReply(ReplyModel):
    id: str
    object: str
    deleted: bool


class ItemList(ReplyModel):
    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class _Keeper:
    """Stores one response when it is complete, and lets it be cancelled while it runs."""

    def __init__(
        self,
        state: AppState,
        running: dict[str, Generation],
        body: ResponsesRequest,
        messages: Sequence[dict[str, Any]],
        writer: ResponsesWriter,
    ) -> None:
        self._state = state
        self._running = running
        self._body = body
        self._messages = messages
        self._writer = writer

    def begin(self, generation: Generation) -> None:
        self._running[self._writer.id] = generation

    async def finish(self, generation: Generation) -> None:
        if self._body.store is False:
            return
        reply = self._writer.whole(generation).model_dump()
        messages = [*self._messages, self._writer.message()]
        stored = StoredResponse(reply, _items(self._body), messages)
        await self._state.responses.put(self._writer.id, stored)

    def end(self) -> None:
        self._running.pop(self._writer.id, None)


def responses_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/v1/responses")
    running: dict[str, Generation] = {}

    @router.post("", responses=responses(ResponseReply, RESPONSES), response_model=None)
    async def create(body: ResponsesRequest, request: Request) -> Response:
        state.check_model(body.model)
        messages = [*(await earlier(state, body.previous_response_id)), *input_messages(body)]
        plan = await plan_answer(state, responses_conversation(body, messages))
        state.log_prompt(request.state.request_id, plan.prompt)
        writer = ResponsesWriter(_fields(body), plan, state.names[0])
        keeper = _Keeper(state, running, body, messages, writer)
        return await reply(state, request, plan.requests, writer, body.stream, keeper)

    @router.get("/{name}", responses=responses(ResponseReply), response_model=None)
    async def retrieve(name: str) -> Response:
        return told(ResponseReply(**(await stored(name)).reply))

    @router.delete("/{name}", responses=responses(DeletedReply), response_model=None)
    async def delete(name: str) -> Response:
        if not await state.responses.delete(name):
            raise _unknown(name)
        return told(DeletedReply(id=name, object="response", deleted=True))

    @router.post("/{name}/cancel", responses=responses(ResponseReply), response_model=None)
    async def cancel(name: str) -> Response:
        """Cancel a response while it is streamed; its stream then ends with what there is."""
        generation = running.get(name)
        if generation is None:
            is_over = (await stored(name)).reply["status"]
            raise RequestError(f"response_id: {name[:80]!r} is {is_over} already", "response_id")
        generation.cancel()
        return Response(b"{}", 202, media_type="application/json")

    @router.get("/{name}/input_items", responses=responses(ItemList), response_model=None)
    async def input_items(name: str) -> Response:
        items = (await stored(name)).items
        ends = (items[0]["id"], items[-1]["id"]) if items else (None, None)
        return told(
            ItemList(object="list", data=items, first_id=ends[0], last_id=ends[1], has_more=False)
        )

    async def stored(name: str) -> StoredResponse:
        found = await state.responses.get(name)
        if found is None:
            raise _unknown(name)
        return found

    return router


async def earlier(state: AppState, name: str | None) -> list[dict[str, Any]]:
    """Return the conversation up to an earlier response."""
    if name is None:
        return []
    field = "previous_response_id"
    found = await state.responses.get(name)
    if found is None:
        raise RequestError(
            f"{field}: {name[:80]!r} is not stored here; send the whole conversation as input",
            field,
        )
    if found.reply["status"] != "completed":
        raise RequestError(
            f"{field}: {name[:80]!r} is {found.reply['status']} and cannot be continued", field
        )
    return found.messages


def _unknown(name: str) -> UnknownResponseError:
    return UnknownResponseError(
        f"response_id: {name[:80]!r} is not stored here; the oldest responses are dropped",
        "response_id",
    )


def _items(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input as items with ids."""
    if isinstance(body.input, str):
        part = {"type": "input_text", "text": body.input}
        made: list[dict[str, Any]] = [{"type": "message", "role": "user", "content": [part]}]
    else:
        made = [item.model_dump(exclude_none=True) for item in body.input]
    return [{"id": f"msg_{uuid.uuid4().hex}"} | item for item in made]


def _fields(body: ResponsesRequest) -> dict[str, Any]:
    """Return the fields of a reply that repeat the request."""
    effort = None if body.reasoning is None else body.reasoning.effort
    form = None if body.text is None else body.text.format
    shown = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    chosen = body.tool_choice or "auto"
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": effort, "summary": None},
        "store": body.store is not False,
        "background": False,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "text": {"format": shown},
        "tool_choice": chosen if isinstance(chosen, str) else chosen.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "truncation": "disabled",
        "user": body.user,
    }
