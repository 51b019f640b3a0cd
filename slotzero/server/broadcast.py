"""Wakes all tasks that wait; each checks for itself what has changed."""

import asyncio


class Broadcast:
    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        await self._event.wait()
