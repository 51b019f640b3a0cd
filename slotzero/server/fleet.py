"""Several engines that serve in parallel, as one client whose state is that of the best engine.

Each is an EngineClient with its own process, knows nothing of the others, and restarts by itself;
engine/router.py chooses the engine of a request. A single engine is a fleet too.

The rules: a request whose engine died before its first token is sent once more, to any engine that
is ready or to the first that becomes ready; only once, so that a request that kills engines does
not kill all. A request that has begun ends with EngineDiedError, since no other engine can continue
its answer. An engine that has failed for good stays out while the others keep serving.

A request without a seed gets one here, not from its engine: engines with the same seed would draw
the same numbers. So seeds are independent across engines and restarts, and with --seed the n-th
request has the same seed in every run, whichever engine it goes to.
"""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from typing import Any

from msgspec import structs

from slotzero.engine.router import RouteLoad, Router
from slotzero.errors import EngineDiedError, EngineUnavailableError, OverloadedError
from slotzero.server.broadcast import Broadcast
from slotzero.server.client import EngineClient, Launch, State, launch_here
from slotzero.server.heartbeat import ResponseLimits
from slotzero.server.messages import Action, JoinGroup, Loading, Stats, TokenDelta
from slotzero.server.share import Share
from slotzero.server.stream import Stream
from slotzero.server.sum_stats import sum_stats

MAX_MOVES = 1
PAUSE = 0.5  # seconds before a move: engines that die of one cause do not die at the same instant
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
        response_limits: ResponseLimits | None = None,
        launch: Launch = launch_here,
    ) -> None:
        """`settings` are fields of EngineConfig, the same for each engine. `restarts` and
        `restart_window` apply to each engine separately."""
        self.settings = dict(settings)
        self.max_waiting = max_waiting
        self.changes = Broadcast()
        self.num_moving = 0
        """Requests that wait to be sent to another engine."""
        self.replicas = tuple(
            EngineClient(
                settings,
                name=f"engine {i}" if size > 1 else "the engine",
                share=Share(i, size),
                changes=self.changes,
                restarts=restarts,
                restart_window=restart_window,
                response_limits=response_limits,
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
        """Why no engine is ready; empty if one is."""
        return self._best.failure

    @property
    def progress(self) -> Loading | None:
        """Progress of the best engine while it loads."""
        return self._best.progress

    @property
    def exit_code(self) -> int:
        """Exit code of the first engine once all have failed; else 0."""
        return min(replica.exit_code for replica in self.replicas) and self.replicas[0].exit_code

    @property
    def info(self) -> Mapping[str, Any]:
        return self._best.info

    @property
    def stats(self) -> Stats | None:
        """Sum of all engines' statistics."""
        return sum_stats([replica.stats for replica in self.replicas if replica.stats is not None])

    @property
    def is_draining(self) -> bool:
        return any(replica.is_draining for replica in self.replicas)

    @property
    def num_ready(self) -> int:
        return sum(replica.state == "ready" for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        """Requests that are submitted and have no first token yet."""
        return self.num_moving + sum(replica.num_waiting for replica in self.replicas)

    def admit(self) -> None:
        """Refuse an HTTP request if too many wait. Called once for all its answers."""
        if self.num_ready and not self.is_draining and self.num_waiting >= self.max_waiting:
            raise OverloadedError(
                f"{self.num_waiting} requests are waiting already: try again later"
            )

    def submit(
        self, request_id: str, prompt: list[int], params: Mapping[str, Any]
    ) -> "RoutedRequest":
        """Submit a request. Raises EngineUnavailableError at once; reading the request raises all
        other errors."""
        if params.get("seed") is not None:
            return RoutedRequest(self, request_id, prompt, params)
        routed = RoutedRequest(self, request_id, prompt, {**params, "seed": self._next_seed})
        self._next_seed = self._seeds.getrandbits(63)  # only now: a refused request uses no seed
        return routed

    def send(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> Stream:
        """Send a request to an engine that is ready; if none is, the best one raises why."""
        loads = {i: _load(r) for i, r in enumerate(self.replicas) if r.state == "ready"}
        replica = self.replicas[self._router.choose(prompt, loads)] if loads else self._best
        return replica.submit(request_id, prompt, params)

    async def perform(self, action: Action) -> None:
        """Let all engines perform an action; wait for all, then raise the first one's error."""
        for replica in self.replicas:
            if replica.state != "ready":
                raise EngineUnavailableError(
                    f"{replica.name} is {replica.state}: an action needs all engines; try again "
                    "later"
                )
        work = [replica.perform(_for(i, action)) for i, replica in enumerate(self.replicas)]
        for outcome in await asyncio.gather(*work, return_exceptions=True):
            if outcome is not None:
                raise outcome

    def restore_by(self, *actions: Action) -> None:
        """Let an engine that restarts perform these actions before it is ready."""
        for replica in self.replicas:
            replica.restores = actions

    def lose_weights(self, why: str) -> None:
        """Let an engine that ends stay out, because a restarted one has other weights; an empty
        string lets it restart again."""
        for replica in self.replicas:
            replica.lost_weights = why

    async def drain(self, grace: float) -> None:
        """Accept no more requests; those still open after `grace` seconds end with an error."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(replica.drain(grace))

    async def stop(self) -> None:
        """Stop all processes and wait for their exit."""
        async with asyncio.TaskGroup() as tasks:
            for replica in self.replicas:
                tasks.create_task(replica.stop())


class RoutedRequest(AsyncIterator[TokenDelta]):
    """One request, whichever engine runs it. As with a Stream, it is cancelled if its reader
    stops."""

    def __init__(
        self, fleet: Fleet, request_id: str, prompt: list[int], params: Mapping[str, Any]
    ) -> None:
        self._fleet = fleet
        self._arguments = request_id, prompt, params
        self._stream = fleet.send(*self._arguments)
        self._moves_left = MAX_MOVES  # 0 once it has begun
        self._is_closed = False

    async def __anext__(self) -> TokenDelta:
        while True:
            try:
                delta = await anext(self._stream)
            except EngineDiedError as died:
                if not self._moves_left:
                    raise
                self._moves_left -= 1
                await self._move(died)
            else:
                self._moves_left = 0
                return delta

    async def aclose(self) -> None:
        self._is_closed = True
        self._fleet.changes.notify()  # wakes another task that waits here
        await self._stream.aclose()

    async def _move(self, died: EngineDiedError) -> None:
        fleet = self._fleet
        fleet.num_moving += 1
        try:
            await asyncio.sleep(PAUSE)
            while not (fleet.num_ready or self._is_closed):
                if fleet.is_draining or fleet.state in ("failed", "stopped"):
                    raise died
                await fleet.changes.wait()
        finally:
            fleet.num_moving -= 1
        if self._is_closed:
            return  # the old stream has ended
        if fleet.is_draining:
            raise died
        self._stream = fleet.send(*self._arguments)


def _for(index: int, action: Action) -> Action:
    """Return the action for one engine: each has a rank of its own in a group."""
    if isinstance(action, JoinGroup):
        return structs.replace(action, rank=action.rank + index)
    return action


def _load(replica: EngineClient) -> RouteLoad:
    waiting = replica.num_waiting
    slots = replica.info["limits"]["max_num_seqs"] * replica.info["num_schedulers"]
    return RouteLoad(replica.generation, replica.num_open - waiting, waiting, slots)
