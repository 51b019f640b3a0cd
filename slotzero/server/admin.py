"""Actions of administrators on all engines: pausing, and replacing weights.

Routes of different APIs are adapters over this one class. It knows the fleet, not HTTP. The rules:
an update is checked by every engine before the first one applies it; and an engine that restarts
gets the weights of the last update from its folder, or stays out if they came as tensors.
"""

import asyncio
from collections.abc import Collection
from contextlib import suppress
from typing import Literal

from slotzero.errors import RequestError, SlotzeroError
from slotzero.server.generation import Client
from slotzero.server.messages import (
    AbortAll,
    Action,
    CheckWeights,
    DropStaged,
    JoinGroup,
    LeaveGroup,
    Pause,
    ResetPrefixCache,
    Resume,
    RunningAction,
    Sleep,
    UpdateWeights,
    WakeUp,
)

Tag = Literal["weights", "kv_cache"]
TAGS: tuple[Tag, ...] = "weights", "kv_cache"
LOST = (
    "its weights came as tensors, changed in part or sleep, and a new process would have older "
    "ones: restart the server, and update its weights"
)


class Admin:
    def __init__(self, client: Client) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._num_updates = 0
        self._folder: tuple[Action, ...] = ()  # restores the weights of a restarted engine
        self.is_paused = False
        self.asleep: frozenset[Tag] = frozenset()
        """The memory that was given back: weights, kv_cache."""
        self._sleep: Sleep | None = None
        self._has_staged = False  # whether tensors wait for the end of an update
        self._staged_version: str | None = None
        self.weight_version = "0"

    async def reset_prefix_cache(self) -> None:
        await self._client.perform(ResetPrefixCache())

    async def abort(self) -> None:
        """End all requests, with the tokens that they have."""
        await self._client.perform(AbortAll())

    async def pause(self, running: RunningAction) -> None:
        async with self._lock:
            await self._client.perform(Pause(running))
            self.is_paused = True
            self._remember()

    async def resume(self) -> None:
        async with self._lock:
            await self._client.perform(Resume())
            self.is_paused = False
            self._remember()

    async def join_group(self, name: str, address: tuple[str, int], rank: int, size: int) -> None:
        """Let the engines join a trainer's group, from this rank on."""
        num = len(self._client.replicas)
        if rank < 1 or rank + num > size:
            raise RequestError(
                f"world_size: {num} engines from rank_offset {rank} on do not fit into {size}; "
                "the trainer is rank 0",
                "world_size",
            )
        async with self._lock:
            await self._client.perform(JoinGroup(name, *address, rank, size))

    async def leave_group(self, name: str) -> None:
        async with self._lock:
            await self._client.perform(LeaveGroup(name))

    async def sleep(self, level: Literal[1, 2], running: RunningAction = "abort") -> None:
        """Give back the memory of the KV cache, and at level 2 also of the weights."""
        async with self._lock:
            sleep = Sleep(level, running)
            await self._client.perform(sleep)
            self._sleep, self.asleep = sleep, frozenset(TAGS)
            if level == 2:
                self._folder = ()
                self._client.lose_weights(LOST)
            self._remember()

    async def wake_up(self, tags: Collection[Tag] = TAGS) -> None:
        async with self._lock:
            await self._client.perform(WakeUp(list(tags)))
            self.asleep -= set(tags)
            self._remember()

    async def stage(self, action: Action, version: str | None = None) -> None:
        """Send tensors for the next update, which has this version. If they cannot be read, those
        that were sent before are dropped too."""
        async with self._lock:
            self._has_staged, self._staged_version = True, version
            try:
                await self._client.perform(action)
            except SlotzeroError:
                await self._drop_staged()
                raise

    async def drop_staged(self) -> None:
        async with self._lock:
            if self._has_staged:
                await self._drop_staged()

    async def update_staged(
        self, *, version: str | None = None, running: RunningAction = "hold"
    ) -> str:
        """Replace the weights of which tensors were sent, if any; return their version."""
        if not self._has_staged:
            return self.weight_version
        version = self._staged_version if version is None else version
        return await self.update(None, partial=True, running=running, version=version)

    async def update(
        self,
        path: str | None,
        *,
        partial: bool = False,
        running: RunningAction = "hold",
        version: str | None = None,
    ) -> str:
        """Replace the weights by those of a folder or file, or by the tensors that were sent;
        return their version. Tensors that were sent are dropped, whether they fit or not."""
        async with self._lock:
            version = str(self._num_updates + 1) if version is None else version
            update = UpdateWeights(path, partial, running, version)
            try:
                if len(self._client.replicas) > 1:
                    await self._client.perform(CheckWeights(path, partial))
                    self._will_have(update)
                await self._client.perform(update)
            except SlotzeroError:
                if path is None:
                    await self._drop_staged()
                raise
            self._will_have(update)
            self._num_updates += 1
            self._has_staged &= path is not None
            self.weight_version = version
            return version

    async def _drop_staged(self) -> None:
        self._has_staged = False
        with suppress(SlotzeroError):  # then the tensors are gone too
            await self._client.perform(DropStaged())

    def _will_have(self, update: UpdateWeights) -> None:
        path = update.path
        is_whole = not (path is None or path.endswith(".safetensors") or update.is_partial)
        self._folder = (update,) if is_whole else ()
        self._client.lose_weights("" if is_whole else LOST)
        self._remember()

    def _remember(self) -> None:
        state: list[Action] = [Pause("hold")] if self.is_paused else []
        if self._sleep is not None and self.asleep:
            awake = [tag for tag in TAGS if tag not in self.asleep]
            state += [self._sleep, WakeUp(awake)]
        self._client.restore_by(*self._folder, *state)
