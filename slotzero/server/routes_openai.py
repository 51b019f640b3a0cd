"""OpenAI's routes: chat completions, completions, models.

They know requests and replies; the shapes of an answer are in chat.py and completion.py.

The rule: nothing is sent before the first token is there or the request is refused, so that an
error has its own status. An error later on is the stream's last event.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response

from slotzero.server.answers import Ask, Piece
from slotzero.server.asks import about, chat_asks, check_choices, completion_asks
from slotzero.server.chat import ChatWriter
from slotzero.server.completion import CompletionWriter
from slotzero.server.events import DONE, EventStream, event, unless_gone
from slotzero.server.front import Front
from slotzero.server.gate import json_bytes
from slotzero.server.protocol import ChatRequest, CompletionRequest
from slotzero.server.replies import (
    ChatReply,
    CompletionReply,
    ErrorReply,
    ModelCard,
    ModelList,
    ReplyModel,
)
from slotzero.server.runs import Run
from slotzero.server.status import BUG, error_reply
from slotzero.server.tools import plan_tools, template_messages, template_variables

log = logging.getLogger("slotzero.server")


class Writer(Protocol):
    """Answers in the shape of one route."""

    def add(self, piece: Piece) -> None:
        """Keeps it for the whole."""

    def chunks(self, piece: Piece, run: Run) -> Iterable[ReplyModel]:
        """Adds it, and says what a stream says of it."""

    def is_enough(self, index: int) -> bool:
        """Whether this answer has said all that is wanted of it."""

    def last_chunk(self, run: Run) -> ReplyModel | None: ...

    def whole(self, run: Run) -> ReplyModel:
        """What is said of all pieces in one reply."""


def responses(
    model: type[ReplyModel], is_streamed: bool = False
) -> dict[int | str, dict[str, Any]]:
    """For the OpenAPI document."""
    made: dict[str, Any] = {"model": model}
    if is_streamed:
        made["content"] = {EventStream.media_type: {}}
    refused: dict[int | str, dict[str, Any]] = {
        code: {"model": ErrorReply} for code in (400, 401, 404, 405, 413, 429, 500, 503, 504)
    }
    return {200: made} | refused


def openai_routes(front: Front) -> APIRouter:
    router = APIRouter(prefix="/v1")

    @router.post("/chat/completions", responses=responses(ChatReply, True), response_model=None)
    async def chat(body: ChatRequest, request: Request) -> Response:
        front.check_model(body.model)
        plan = plan_tools(body, front.call_format)
        messages = template_messages(body.messages)
        variables = template_variables(body.chat_template_kwargs)
        for message in messages:
            front.check_text(message["content"], "messages")

        def encode() -> tuple[str, list[int]]:
            text = front.tokenizer.apply_chat_template(
                messages,
                tools=plan.tools,
                add_generation_prompt=body.add_generation_prompt,
                continue_final_message=body.continue_final_message,
                **variables,
            )
            front.check_text(text, "messages")
            return text, front.tokenizer.encode(text, add_special_tokens=False)

        with about("messages"):
            text, tokens = await asyncio.to_thread(encode)
        front.check_tokens(tokens, "messages")
        log_prompt(request, text)
        asks = chat_asks(body, tokens, plan.schema, plan.form is not None, front.sampling)
        writer = ChatWriter(body, front.tokenizer, plan, front.names[0])
        return await reply(request, asks, writer, body.stream)

    @router.post("/completions", responses=responses(CompletionReply, True), response_model=None)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        front.check_model(body.model)
        given = prompts_of(body)
        check_choices(body, len(given))
        for text in given:
            if isinstance(text, str):
                front.check_text(text, "prompt")
            else:
                front.check_tokens(text, "prompt")

        def encode() -> tuple[list[list[int]], list[str]]:
            tokens = [encoded(front, prompt) for prompt in given]
            return tokens, [echo(front, prompt) if body.echo else "" for prompt in given]

        with about("prompt"):
            prompts, echoes = await asyncio.to_thread(encode)
        for prompt in prompts:
            front.check_tokens(prompt, "prompt")
        log_prompt(request, given)
        asks = completion_asks(body, prompts, echoes, front.sampling)
        writer = CompletionWriter(body, asks, front.tokenizer, front.names[0])
        return await reply(request, asks, writer, body.stream)

    @router.get("/models", responses=responses(ModelList), response_model=None)
    async def models() -> Response:
        cards = [card(name) for name in front.names]
        return told(ModelList(object="list", data=cards))

    @router.get("/models/{name:path}", responses=responses(ModelCard), response_model=None)
    async def model(name: str) -> Response:
        front.check_model(name)
        return told(card(name))

    def card(name: str) -> ModelCard:
        return ModelCard(
            id=name,
            object="model",
            created=front.started_at,
            owned_by="slotzero",
            max_model_len=front.max_model_len,
        )

    def log_prompt(request: Request, prompt: Any) -> None:
        if front.settings.log_requests:
            log.info("%s asks: %r", request.state.request_id, prompt)

    async def reply(
        request: Request, asks: list[Ask], writer: Writer, is_stream: bool | None
    ) -> Response:
        run = await front.run(asks)
        pieces = run.pieces()
        try:
            if not is_stream:
                work = gather(pieces, run, writer)
                return told(await unless_gone(request.receive, work))
            first = await unless_gone(request.receive, following(pieces))
        except BaseException:
            await run.close()
            raise
        return EventStream(events(first, pieces, run, writer, front.metrics.refused), run.close)

    return router


async def gather(pieces: AsyncGenerator[Piece, None], run: Run, writer: Writer) -> ReplyModel:
    async with aclosing(pieces):
        async for piece in pieces:
            writer.add(piece)
            if writer.is_enough(piece.index):
                run.end(piece.index)
    return writer.whole(run)


async def following(pieces: AsyncGenerator[Piece, None]) -> Piece:
    return await anext(pieces)


async def events(
    first: Piece,
    pieces: AsyncGenerator[Piece, None],
    run: Run,
    writer: Writer,
    refused: Callable[[int], None],
) -> AsyncGenerator[bytes, None]:
    piece: Piece | None = first
    try:
        async with aclosing(pieces):
            while piece is not None:
                for chunk in writer.chunks(piece, run):
                    yield event(chunk.json_bytes())
                if writer.is_enough(piece.index):
                    run.end(piece.index)
                piece = await anext(pieces, None)
        last = writer.last_chunk(run)
        if last is not None:
            yield event(last.json_bytes())
    except Exception as error:
        status, body = error_reply(error)
        if status is BUG:
            log.exception("a stream failed")
        refused(status.code)
        yield event(json_bytes(body))
    yield DONE


def told(reply: ReplyModel, status: int = 200) -> Response:
    return Response(reply.json_bytes(), status, media_type="application/json")


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """A prompt, or a list of prompts; a prompt is text or a list of tokens."""
    prompt: Any = body.prompt
    is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    return list(prompt) if is_list and prompt else [prompt]


def encoded(front: Front, prompt: str | list[int]) -> list[int]:
    return front.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt


def echo(front: Front, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    known = [token for token in prompt if 0 <= token < front.tokenizer.vocab_size]
    return front.tokenizer.decode(known)  # the engine refuses those that it does not know
