"""Wakes all who wait now; they look for themselves at what has changed."""

import asyncio


class Broadcast:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def beat(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()
