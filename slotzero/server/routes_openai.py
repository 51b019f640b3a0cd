"""OpenAI's routes: chat completions, completions, models.

They know requests and replies; chat.py and completion.py build the two kinds of answers.

The rule: nothing is sent before the first token has arrived or the request is refused, so that an
error has its own HTTP status. A later error is the last event of the stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response

from slotzero.server.answers import GenerationRequest, TextDelta
from slotzero.server.app_state import AppState
from slotzero.server.chat import ChatWriter
from slotzero.server.completion import CompletionWriter
from slotzero.server.events import DONE, EventStream, event, unless_gone
from slotzero.server.gate import json_bytes
from slotzero.server.generation import Generation
from slotzero.server.generation_requests import (
    about,
    chat_requests,
    check_choices,
    completion_requests,
)
from slotzero.server.protocol import ChatRequest, CompletionRequest
from slotzero.server.replies import (
    ChatReply,
    CompletionReply,
    ErrorReply,
    ModelCard,
    ModelList,
    ReplyModel,
)
from slotzero.server.status import BUG, error_reply
from slotzero.server.tools import plan_tools, template_messages, template_variables

log = logging.getLogger("slotzero.server")


class Writer(Protocol):
    """Builds the replies of one route."""

    def add(self, delta: TextDelta) -> None:
        """Add a delta to the whole reply."""

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterable[ReplyModel]:
        """Add a delta, and return the chunks to stream for it."""

    def is_enough(self, index: int) -> bool:
        """Return whether this answer is complete."""

    def last_chunk(self, generation: Generation) -> ReplyModel | None: ...

    def whole(self, generation: Generation) -> ReplyModel:
        """Return all deltas as one reply."""


def responses(
    model: type[ReplyModel], is_streamed: bool = False
) -> dict[int | str, dict[str, Any]]:
    """Return the possible responses for the OpenAPI document."""
    made: dict[str, Any] = {"model": model}
    if is_streamed:
        made["content"] = {EventStream.media_type: {}}
    refused: dict[int | str, dict[str, Any]] = {
        code: {"model": ErrorReply} for code in (400, 401, 404, 405, 413, 429, 500, 503, 504)
    }
    return {200: made} | refused


def openai_routes(state: AppState) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions", responses=responses(ChatReply, True), response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        state.check_model(body.model)
        plan = plan_tools(body, state.call_format)
        messages = template_messages(body.messages)
        variables = template_variables(body.chat_template_kwargs)
        for message in messages:
            state.check_text(message["content"], "messages")

        def encode() -> tuple[str, list[int]]:
            text = state.tokenizer.apply_chat_template(
                messages,
                tools=plan.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                **variables,
            )
            state.check_text(text, "messages")
            return text, state.tokenizer.encode(text, add_special_tokens=False)

        with about("messages"):
            text, tokens = await asyncio.to_thread(encode)
        state.check_tokens(tokens, "messages")
        log_prompt(request, text)
        requests = chat_requests(body, tokens, plan.schema, plan.form is not None, state.sampling)
        writer = ChatWriter(body, state.tokenizer, plan, state.names[0])
        return await reply(request, requests, writer, body.stream)

    @router.post("/completions", responses=responses(CompletionReply, True), response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        state.check_model(body.model)
        given = prompts_of(body)
        check_choices(body, len(given))
        for text in given:
            if isinstance(text, str):
                state.check_text(text, "prompt")
            else:
                state.check_tokens(text, "prompt")

        def encode() -> tuple[list[list[int]], list[str]]:
            tokens = [encoded(state, prompt) for prompt in given]
            return tokens, [echo(state, prompt) if body.echo else "" for prompt in given]

        with about("prompt"):
            prompts, echoes = await asyncio.to_thread(encode)
        for prompt in prompts:
            state.check_tokens(prompt, "prompt")
        log_prompt(request, given)
        requests = completion_requests(body, prompts, echoes, state.sampling)
        writer = CompletionWriter(body, requests, state.tokenizer, state.names[0])
        return await reply(request, requests, writer, body.stream)

    @router.get("/models", responses=responses(ModelList), response_model=None)
    async def models() -> Response:
        cards = [card(name) for name in state.names]
        return told(ModelList(object="list", data=cards))

    @router.get("/models/{name:path}", responses=responses(ModelCard), response_model=None)
    async def model(name: str) -> Response:
        state.check_model(name)
        return told(card(name))

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=state.started_at,
            owned_by="slotzero",
            max_model_len=state.max_model_len,
        )

    def log_prompt(request: Request, prompt: Any) -> None:
        if state.settings.log_requests:
            log.info("%s: prompt: %r", request.state.request_id, prompt)

    async def reply(
        request: Request, requests: list[GenerationRequest], writer: Writer, is_stream: bool | None
    ) -> Response:
        generation = await state.run(requests)
        deltas = generation.deltas()
        try:
            if not is_stream:
                work = gather(deltas, generation, writer)
                return told(await unless_gone(request.receive, work))
            first = await unless_gone(request.receive, following(deltas))
        except BaseException:
            await generation.close()
            raise
        return EventStream(
            events(first, deltas, generation, writer, state.metrics.refused), generation.close
        )

    return router


async def gather(
    deltas: AsyncGenerator[TextDelta, None], generation: Generation, writer: Writer
) -> ReplyModel:
    async with aclosing(deltas):
        async for delta in deltas:
            writer.add(delta)
            if writer.is_enough(delta.index):
                generation.end(delta.index)
    return writer.whole(generation)


async def following(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    return await anext(deltas)


async def events(
    first: TextDelta,
    deltas: AsyncGenerator[TextDelta, None],
    generation: Generation,
    writer: Writer,
    refused: Callable[[int], None],
) -> AsyncGenerator[bytes, None]:
    delta: TextDelta | None = first
    try:
        async with aclosing(deltas):
            while delta is not None:
                for chunk in writer.chunks(delta, generation):
                    yield event(chunk.json_bytes())
                if writer.is_enough(delta.index):
                    generation.end(delta.index)
                delta = await anext(deltas, None)
        last = writer.last_chunk(generation)
        if last is not None:
            yield event(last.json_bytes())
    except Exception as error:
        status, body = error_reply(error)
        if status is BUG:
            log.exception("a streamed reply failed")
        refused(status.code)
        yield event(json_bytes(body))
    yield DONE


def told(reply: ReplyModel, status: int = 200) -> Response:
    return Response(reply.json_bytes(), status, media_type="application/json")


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts; the field holds one or a list, each as text or as a list of tokens."""
    prompt: Any = body.prompt
    is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    return list(prompt) if is_list and prompt else [prompt]


def encoded(state: AppState, prompt: str | list[int]) -> list[int]:
    return state.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def echo(state: AppState, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    known = [token for token in prompt if 0 <= token < state.tokenizer.vocab_size]
    return state.tokenizer.decode(known)  # the engine refuses unknown ones
