"""The answers to one HTTP request, from their submission to their last token.

It knows the engine's client, not HTTP. The rule: whoever stops reading, for whatever reason, leaves
nothing behind in the engine.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from slotzero.errors import DeadlineError, EngineDiedError, RequestError, RequestRefusedError
from slotzero.server.answers import Answer, Ask, Piece
from slotzero.server.messages import Loading, TokenDelta
from slotzero.server.metrics import Metrics, Watched
from slotzero.server.status import status_of
from slotzero.text.tokenizer import Tokenizer


class GrownStream(Protocol):
    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def aclose(self) -> None: ...


class Replica(Watched, Protocol):
    """EngineClient, as far as the application knows it."""

    @property
    def failure(self) -> str: ...
    @property
    def progress(self) -> Loading | None: ...


class Client(Replica, Protocol):
    """Fleet, as far as the application knows it."""

    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def replicas(self) -> Sequence[Replica]: ...

    async def start(self) -> None: ...

    def admit(self) -> None: ...

    def submit(
        self, request_id: str, prompt: list[int], params: Mapping[str, Any]
    ) -> GrownStream: ...

    async def drain(self, grace: float) -> None: ...

    async def stop(self) -> None: ...


class Run:
    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        metrics: Metrics,
        asks: Sequence[Ask],
        timeout: float | None,
    ) -> None:
        ends = client.info.get("eos_token_ids", ())
        self.answers = [Answer(ask, tokenizer, ends) for ask in asks]
        self._client = client
        self._metrics = metrics
        self._began = time.monotonic()
        self._timeout = timeout
        self._streams: list[GrownStream] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._mail: asyncio.Queue[Piece | Exception] = asyncio.Queue()

    async def submit(self) -> None:
        """All of them or none; raises what the client raises."""
        name = uuid.uuid4().hex
        self._client.admit()
        try:
            for i, answer in enumerate(self.answers):
                ask = answer.ask
                stream = self._client.submit(f"{name}-{i}", ask.prompt, ask.engine_params)
                self._streams.append(stream)
        except BaseException:
            for stream in self._streams:
                await stream.aclose()
            raise
        for answer, stream in zip(self.answers, self._streams, strict=True):
            self._tasks[answer.ask.index] = asyncio.create_task(self._follow(answer, stream))

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """What the answers gain, as it comes; what came while the reader was busy comes in one.
        Whoever opens it closes it."""
        try:
            while self._tasks:
                pieces, error = await self._batch()
                for piece in pieces:
                    if piece.index in self._tasks:  # else it was ended
                        if piece.finish_reason is not None:
                            del self._tasks[piece.index]
                        yield piece
                if error is not None:
                    raise error
        finally:
            await self.close()

    def end(self, index: int) -> None:
        """This answer is long enough."""
        task = self._tasks.pop(index, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _batch(self) -> tuple[list[Piece], Exception | None]:
        """All that is there, once something is: one piece an answer, and what went wrong then."""
        pieces: dict[int, Piece] = {}
        item = await self._next()
        while isinstance(item, Piece):
            before = pieces.get(item.index)
            pieces[item.index] = before + item if before else item
            if self._mail.empty():
                return list(pieces.values()), None
            item = self._mail.get_nowait()
        return list(pieces.values()), item

    async def _next(self) -> Piece | Exception:
        left = None if self._timeout is None else self._began + self._timeout - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await self._mail.get()
        except TimeoutError:
            raise DeadlineError(f"no answer within {self._timeout:g} s") from None

    async def _follow(self, answer: Answer, stream: GrownStream) -> None:
        latest = self._began
        error: Exception | None = None
        try:
            async for grown in stream:
                latest = self._note(answer, grown, latest)
                self._mail.put_nowait(answer.grow(grown))
                if answer.finish_reason is not None:
                    break
            else:
                raise EngineDiedError("the engine gave this request up; send it again")
        except Exception as raised:
            error = self._named(answer.ask, raised)
            self._mail.put_nowait(error)
        finally:
            await stream.aclose()
            if error is None or answer.num_tokens:
                self._metrics.finished(
                    answer.finish_reason or "abort",
                    time.monotonic() - self._began,
                    len(answer.ask.prompt),
                    answer.num_tokens,
                )

    def _note(self, answer: Answer, grown: TokenDelta, latest: float) -> float:
        now = time.monotonic()
        num_new = len(grown.token_ids)
        if num_new and answer.num_tokens == 0:
            self._metrics.first_token(now - self._began)
            num_new -= 1
        for _ in range(num_new):
            self._metrics.token((now - latest) / num_new)
        return now

    def _named(self, ask: Ask, error: Exception) -> Exception:
        if not isinstance(error, RequestRefusedError) or status_of(error).code != 400:
            return error
        found = RequestError(error.message, error.param, error.label).renamed(ask.names)
        if found.param is None and "structured_outputs" in ask.engine_params:
            found.param = ask.names.get("structured_outputs")
        return found
