"""One reply to a request for answers: whole, or as a stream of events.

This module knows no API: a Writer builds the reply, and its shape says how events are sent.

The rule: nothing is sent before the first token has arrived or the request is refused, so that an
error has its own HTTP status. A later error is the last event of the stream.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Any, Protocol

from fastapi import Request, Response

from slotzero.server.answers import GenerationRequest, TextDelta
from slotzero.server.app_state import AppState
from slotzero.server.events import EventStream, unless_gone
from slotzero.server.generation import Generation
from slotzero.server.replies import ErrorReply, ReplyModel
from slotzero.server.status import BUG, error_parts
from slotzero.server.stream_format import WireFormat

log = logging.getLogger("slotzero.server")


class Writer(Protocol):
    """Builds the replies of one route."""

    shape: WireFormat

    def add(self, delta: TextDelta) -> None:
        """Add a delta to the whole reply."""

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterable[bytes]:
        """Add a delta, and return the events to stream for it."""

    def is_enough(self, index: int) -> bool:
        """Return whether this answer is complete."""

    def last_chunks(self, generation: Generation) -> Iterable[bytes]:
        """Return the events after the last delta."""

    def whole(self, generation: Generation) -> ReplyModel:
        """Return all deltas as one reply."""


class Watcher(Protocol):
    """Follows one generation, beside its writer."""

    def begin(self, generation: Generation) -> None: ...

    async def finish(self, generation: Generation) -> None:
        """The answer is complete; its last event was not sent yet."""

    def end(self) -> None:
        """The generation has ended, for whatever reason."""


async def reply(
    state: AppState,
    request: Request,
    requests: list[GenerationRequest],
    writer: Writer,
    is_stream: bool | None,
    watcher: Watcher | None = None,
) -> Response:
    generation = await state.run(requests)
    deltas = generation.deltas()

    async def close() -> None:
        await generation.close()
        if watcher is not None:
            watcher.end()

    try:
        if watcher is not None:
            watcher.begin(generation)
        if not is_stream:
            work = gather(deltas, generation, writer, watcher)
            made = told(await unless_gone(request.receive, work))
            await close()
            made.headers.update(version_header(generation))
            return made
        first = await unless_gone(request.receive, following(deltas))
    except BaseException:
        await close()
        raise
    sent = events(first, deltas, generation, writer, watcher, state.metrics.refused)
    stream = EventStream(sent, close, writer.shape.media_type)
    stream.headers.update(version_header(generation))
    return stream


def version_header(generation: Generation) -> dict[str, str]:
    """Return the header that names the weights of an answer: those of its newest token so far."""
    versions = [answer.weight_version for answer in generation.answers if answer.weight_version]
    return {"X-Weight-Version": versions[-1]} if versions else {}


async def gather(
    deltas: AsyncGenerator[TextDelta, None],
    generation: Generation,
    writer: Writer,
    watcher: Watcher | None,
) -> ReplyModel:
    async with aclosing(deltas):
        async for delta in deltas:
            writer.add(delta)
            if writer.is_enough(delta.index):
                generation.end(delta.index)
    if watcher is not None:
        await watcher.finish(generation)
    if any(answer.prompt_logprobs for answer in generation.answers):  # may take a second
        return await asyncio.to_thread(writer.whole, generation)
    return writer.whole(generation)


async def following(deltas: AsyncGenerator[TextDelta, None]) -> TextDelta:
    return await anext(deltas)


async def events(
    first: TextDelta,
    deltas: AsyncGenerator[TextDelta, None],
    generation: Generation,
    writer: Writer,
    watcher: Watcher | None,
    refused: Callable[[int], None],
) -> AsyncGenerator[bytes, None]:
    delta: TextDelta | None = first
    num_sent = 0
    try:
        async with aclosing(deltas):
            while delta is not None:
                for chunk in writer.chunks(delta, generation):
                    num_sent += 1
                    yield chunk
                if writer.is_enough(delta.index):
                    generation.end(delta.index)
                delta = await anext(deltas, None)
        if watcher is not None:
            await watcher.finish(generation)
        for chunk in writer.last_chunks(generation):
            num_sent += 1
            yield chunk
    except Exception as error:
        status, message, param = error_parts(error)
        if status is BUG:
            log.exception("a streamed reply failed")
        refused(status.code)
        yield writer.shape.stream_error(status, message, param, num_sent)
    if writer.shape.done:
        yield writer.shape.done


def told(reply: ReplyModel, status: int = 200) -> Response:
    return Response(reply.json_bytes(), status, media_type="application/json")


def responses(
    model: type[ReplyModel], stream: WireFormat | None = None, error: type[ReplyModel] = ErrorReply
) -> dict[int | str, dict[str, Any]]:
    """Return the possible responses for the OpenAPI document. `stream`: how the reply is streamed,
    if it can be."""
    made: dict[str, Any] = {"model": model}
    if stream is not None:
        made["content"] = {stream.media_type: {}}
    return {200: made, "4XX": {"model": error}, "5XX": {"model": error}}
