"""Engines side by side, as the rest of the server sees them: one that is as ready as its best.

Each is an EngineClient with a process of its own, knows nothing of the others, and is restarted by
itself; router.py says which of them a request goes to. One alone is a fleet too.

The rules: a request whose engine died before it said anything is sent once more, to any that is
ready, or the first that will be; once, so that one that kills engines does not kill them all. One
that has begun ends with EngineDiedError, since nobody could take its answer up. And an engine that
is given up stays out, while the others serve on.

A request without a seed is given one here, not by its engine: engines that draw from one seed would
draw the same numbers. So seeds are independent across engines and their restarts, and with --seed
the n-th request has the same seed in every run, whichever engine it goes to.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

from slotzero.engine.router import Load, Router
from slotzero.errors import EngineDiedError, OverloadedError
from slotzero.server.broadcast import Broadcast
from slotzero.server.client import EngineClient, Launch, State, launch_here
from slotzero.server.heartbeat import Patience
from slotzero.server.messages import Loading, Stats, TokenDelta
from slotzero.server.share import Share
from slotzero.server.stream import Stream
from slotzero.server.sum_stats import sum_stats

MAX_MOVES = 1
PAUSE = 0.5  # seconds before a move: engines that die of one cause are not noticed all at once
_BEST_FIRST: tuple[State, ...] = (
    "ready", "restarting", "loading", "unresponsive", "stopped", "failed",
)  # fmt: skip


class Fleet:
    def __init__(
        self,
        settings: Mapping[str, Any],
        size: int = 1,
        *,
        max_waiting: int = 512,
        restarts: int = 3,
        restart_window: float = 300.0,
        patience: Patience | None = None,
        launch: Launch = launch_here,
    ) -> None:
        """`settings` are fields of EngineConfig, the same for each; restarts are of each too."""
        self.settings = dict(settings)
        self.max_waiting = max_waiting
        self.pulse = Broadcast()
        self.num_moving = 0
        """Requests that no engine has, and that wait for one."""
        self.replicas = tuple(
            EngineClient(
                settings,
                name=f"engine {i}" if size > 1 else "the engine",
                share=Share(i, size),
                pulse=self.pulse,
                restarts=restarts,
                restart_window=restart_window,
                patience=patience,
                launch=launch,
            )
            for i in range(size)
        )
        self._router = Router(size)
        self._seeds = random.Random(settings.get("seed"))  # None: entropy of the operating system
        self._next_seed = self._seeds.getrandbits(63)

    async def start(self) -> None:
        for replica in self.replicas:
            await replica.start()

    @property
    def _best(self) -> EngineClient:
        return min(self.replicas, key=lambda replica: _BEST_FIRST.index(replica.state))

    @property
    def state(self) -> State:
        return self._best.state

    @property
    def failure(self) -> str:
        """Why none is ready; else empty."""
        return self._best.failure

    @property
    def progress(self) -> Loading | None:
        """How far the best is, while it loads."""
        return self._best.progress

    @property
    def exit_code(self) -> int:
        """Of the first, once all have failed; else 0."""
        return min(replica.exit_code for replica in self.replicas) and self.replicas[0].exit_code

    @property
    def info(self) -> Mapping[str, Any]:
        return self._best.info

    @property
    def stats(self) -> Stats | None:
        """Of all together."""
        return sum_stats([replica.stats for replica in self.replicas if replica.stats is not None])

    @property
    def is_draining(self) -> bool:
        return any(replica.is_draining for replica in self.replicas)

    @property
    def num_ready(self) -> int:
        return sum(replica.state == "ready" for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Submitted and without a first token."""
        return self.num_moving + sum(replica.num_waiting for replica in self.replicas)

    def admit(self) -> None:
        """Before whoever comes submits anything: one that asks for many answers comes once."""
        if self.num_ready and not self.is_draining and self.num_waiting >= self.max_waiting:
            raise OverloadedError(f"{self.num_waiting} requests wait already: try again later")

    def submit(
        self, request_id: str, prompt: list[int], params: Mapping[str, Any]
    ) -> "RoutedRequest":
        """Refuses at once (EngineUnavailableError); the errand raises the rest."""
        if params.get("seed") is not None:
            return RoutedRequest(self, request_id, prompt, params)
        errand = RoutedRequest(self, request_id, prompt, {**params, "seed": self._next_seed})
        self._next_seed = self._seeds.getrandbits(63)  # only now: a refused request uses none
        return errand

    def send(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> Stream:
        """To one that is ready; where none is, the best says why not."""
        loads = {i: _load(r) for i, r in enumerate(self.replicas) if r.state == "ready"}
        replica = self.replicas[self._router.choose(prompt, loads)] if loads else self._best
        return replica.submit(request_id, prompt, params)

    async def drain(self, grace: float) -> None:
        """Takes no more requests; those still open after `grace` seconds end with an error."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(replica.drain(grace))

    async def stop(self) -> None:
        """All processes are gone when this returns."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(replica.stop())


class RoutedRequest(AsyncIterator[TokenDelta]):
    """One request, wherever it runs. Whoever stops reading cancels it, as with a Stream."""

    def __init__(
        self, fleet: Fleet, request_id: str, prompt: list[int], params: Mapping[str, Any]
    ) -> None:
        self._fleet = fleet
        self._asked = request_id, prompt, params
        self._stream = fleet.send(*self._asked)
        self._moves_left = MAX_MOVES  # 0 too once it has begun
        self._is_closed = False

    async def __anext__(self) -> TokenDelta:
        while True:
            try:
                grown = await anext(self._stream)
            except EngineDiedError as died:
                if not self._moves_left:
                    raise
                self._moves_left -= 1
                await self._move(died)
            else:
                self._moves_left = 0
                return grown

    async def aclose(self) -> None:
        self._is_closed = True
        self._fleet.pulse.beat()  # for another task that waits here
        await self._stream.aclose()

    async def _move(self, died: EngineDiedError) -> None:
        fleet = self._fleet
        fleet.num_moving += 1
        try:
            await asyncio.sleep(PAUSE)
            while not (fleet.num_ready or self._is_closed):
                if fleet.is_draining or fleet.state in ("failed", "stopped"):
                    raise died
                await fleet.pulse.wait()
        finally:
            fleet.num_moving -= 1
        if self._is_closed:
            return  # the old stream is at its end
        if fleet.is_draining:
            raise died
        self._stream = fleet.send(*self._asked)


def _load(replica: EngineClient) -> Load:
    waiting = replica.num_waiting
    slots = replica.info["limits"]["max_num_seqs"] * replica.info["lanes"]
    return Load(replica.generation, replica.num_open - waiting, waiting, slots)
