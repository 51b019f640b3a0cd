"""The answers to one HTTP request, from their submission to their last token.

This module knows the engine's client, not HTTP. The rule: when the reader stops, for whatever
reason, no request stays in the engine.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Collection, Mapping, Sequence
from typing import Any, Protocol

from slotzero.errors import DeadlineError, EngineDiedError, RequestError, RequestRefusedError
from slotzero.server.answers import AnswerBuilder, GenerationRequest, TextDelta
from slotzero.server.messages import Action, Loading, TokenDelta
from slotzero.server.metrics import Metrics, Watched
from slotzero.server.status import status_of
from slotzero.text.tokenizer import Tokenizer


class GrownStream(Protocol):
    def __aiter__(self) -> AsyncIterator[TokenDelta]: ...

    async def aclose(self) -> None: ...


class Replica(Watched, Protocol):
    """The part of EngineClient that the application uses."""

    @property
    def failure(self) -> str: ...
    @property
    def progress(self) -> Loading | None: ...


class Client(Replica, Protocol):
    """The part of Fleet that the application uses."""

    @property
    def settings(self) -> Mapping[str, Any]: ...
    @property
    def replicas(self) -> Sequence[Replica]: ...

    async def start(self) -> None: ...

    def admit(self) -> None: ...

    def submit(
        self, request_id: str, prompt: list[int], params: Mapping[str, Any]
    ) -> GrownStream: ...

    async def perform(self, action: Action) -> None: ...

    def restore_by(self, *actions: Action) -> None: ...

    def lose_weights(self, why: str) -> None: ...

    async def drain(self, grace: float) -> None: ...

    async def stop(self) -> None: ...


class Generation:
    def __init__(
        self,
        client: Client,
        tokenizer: Tokenizer,
        metrics: Metrics,
        requests: Sequence[GenerationRequest],
        timeout: float | None,
    ) -> None:
        ends = client.info.get("eos_token_ids", ())
        self.answers = [AnswerBuilder(request, tokenizer, ends) for request in requests]
        self._client = client
        self._metrics = metrics
        self._began = time.monotonic()
        self._timeout = timeout
        self._streams: list[GrownStream] = []
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._mail: asyncio.Queue[TextDelta | Exception] = asyncio.Queue()

    async def submit(self) -> None:
        """Submit all requests or none; raises what the client raises."""
        name = uuid.uuid4().hex
        self._client.admit()
        try:
            for i, answer in enumerate(self.answers):
                request = answer.request
                stream = self._client.submit(f"{name}-{i}", request.prompt, request.engine_params)
                self._streams.append(stream)
        except BaseException:
            for stream in self._streams:
                await stream.aclose()
            raise
        for answer, stream in zip(self.answers, self._streams, strict=True):
            self._tasks[answer.request.index] = asyncio.create_task(self._follow(answer, stream))

    async def deltas(self) -> AsyncGenerator[TextDelta, None]:
        """Yield new text as it arrives; what arrived while the reader was busy is joined into one
        delta per answer. The caller must close the generator."""
        try:
            while self._tasks:
                deltas, error = await self._batch()
                for delta in deltas:
                    if delta.index in self._tasks:  # else it was ended
                        if delta.finish_reason is not None:
                            del self._tasks[delta.index]
                        yield delta
                if error is not None:
                    raise error
        finally:
            await self.close()

    def end(self, index: int) -> None:
        """End this answer early."""
        task = self._tasks.pop(index, None)
        if task is not None:
            task.cancel()

    def cancel(self, only: Collection[int] | None = None) -> None:
        """End all answers, or only these, early; the reader gets what there is, with the reason
        "cancelled"."""
        for index, task in self._tasks.items():
            if only is not None and index not in only:
                continue
            task.cancel()
            num_tokens = self.answers[index].num_tokens
            self._mail.put_nowait(TextDelta(index, "", [], "cancelled", num_tokens))

    async def close(self) -> None:
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _batch(self) -> tuple[list[TextDelta], Exception | None]:
        """Wait for a delta and return all that have arrived, one per answer, and an error that came
        after them."""
        deltas: dict[int, TextDelta] = {}
        item = await self._next()
        while isinstance(item, TextDelta):
            before = deltas.get(item.index)
            deltas[item.index] = before + item if before else item
            if self._mail.empty():
                return list(deltas.values()), None
            item = self._mail.get_nowait()
        return list(deltas.values()), item

    async def _next(self) -> TextDelta | Exception:
        left = None if self._timeout is None else self._began + self._timeout - time.monotonic()
        try:
            async with asyncio.timeout(left):
                return await self._mail.get()
        except TimeoutError:
            raise DeadlineError(
                f"the answer was not complete within {self._timeout:g} s (--request-timeout)"
            ) from None

    async def _follow(self, answer: AnswerBuilder, stream: GrownStream) -> None:
        latest = self._began
        error: Exception | None = None
        try:
            async for grown in stream:
                latest = self._note(answer, grown, latest)
                self._mail.put_nowait(answer.grow(grown))
                if answer.finish_reason is not None:
                    break
            else:
                raise EngineDiedError("the engine aborted this request: send it again")
        except Exception as raised:
            error = self._named(answer.request, raised)
            self._mail.put_nowait(error)
        finally:
            await stream.aclose()
            if error is None or answer.num_tokens:
                self._metrics.finished(
                    answer.finish_reason or "abort",
                    time.monotonic() - self._began,
                    len(answer.request.prompt),
                    answer.num_tokens,
                )

    def _note(self, answer: AnswerBuilder, grown: TokenDelta, latest: float) -> float:
        now = time.monotonic()
        num_new = len(grown.token_ids)
        if num_new and answer.num_tokens == 0:
            self._metrics.first_token(now - self._began)
            num_new -= 1
        for _ in range(num_new):
            self._metrics.token((now - latest) / num_new)
        return now

    def _named(self, request: GenerationRequest, error: Exception) -> Exception:
        if not isinstance(error, RequestRefusedError) or status_of(error).code != 400:
            return error
        found = RequestError(error.message, error.param, error.label).renamed(request.names)
        if found.param is None and "structured_outputs" in request.engine_params:
            found.param = request.names.get("structured_outputs")
        return found
