"""The stream of new tokens of one request."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress

from slotzero.errors import SlotzeroError
from slotzero.server.messages import TokenDelta

Mail = asyncio.Queue[TokenDelta | SlotzeroError | None]  # None: closed by its reader


class Stream(AsyncIterator[TokenDelta]):
    """New tokens of one request, step by step. The request is cancelled if the reader stops: by
    `aclose`, by being cancelled while it waits, or by dropping the stream."""

    _is_over = True  # until __init__ has run

    def __init__(self, mail: Mail, cancel: Callable[[], None]) -> None:
        self._mail = mail
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._is_over = False

    async def __anext__(self) -> TokenDelta:
        if self._is_over:
            raise StopAsyncIteration
        try:
            item = await self._mail.get()
        except asyncio.CancelledError:
            await self.aclose()
            raise
        if isinstance(item, TokenDelta):
            self._is_over = item.finish_reason is not None
            return item
        self._is_over = True
        raise item or StopAsyncIteration

    async def aclose(self) -> None:
        if not self._is_over:
            self._is_over = True
            self._cancel()
            self._mail.put_nowait(None)  # wakes another task that waits here

    def __del__(self) -> None:
        if not self._is_over:
            with suppress(RuntimeError):  # the loop is closed
                # the garbage collector may run in any thread
                self._loop.call_soon_threadsafe(self._cancel)
