"""One engine as the HTTP process sees it: submit, cancel, watch. It restarts the engine if it dies.

It lives in one event loop and knows neither text nor torch. The rules it keeps: every request that
was submitted ends, with a finish_reason or an error, or is cancelled by whoever asked; and nobody
waits for a reader that is slow.
"""

import asyncio
import itertools
import json
import logging
import os
import socket
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from slotzero.errors import (
    ConfigError,
    EngineDiedError,
    EngineUnavailableError,
    RankLostError,
    RequestRefusedError,
    SlotzeroError,
)
from slotzero.server.heartbeat import INTERVAL, Patience, Vigil
from slotzero.server.messages import (
    MAX_FRAME,
    Add,
    Beat,
    Cancel,
    Failed,
    Frames,
    FromEngine,
    Loading,
    Progress,
    Ready,
    Refused,
    Stats,
    TokenDelta,
    frame,
)
from slotzero.server.pulse import Broadcast
from slotzero.server.share import WHOLE, Share
from slotzero.server.stream import Mail, Stream

State = Literal["loading", "ready", "unresponsive", "restarting", "failed", "stopped"]

FIRST_PAUSE = 0.25  # seconds before the first restart; each further one waits twice as long
PATIENCE = 5.0  # seconds that the process has to end once its socket is closed
_READ = 1 << 18
_log = logging.getLogger("slotzero.server")


class Process(Protocol):
    """An engine's, wherever it runs."""

    @property
    def pid(self) -> int | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


Launch = Callable[[Mapping[str, Any], Share], Awaitable[tuple[Process, socket.socket]]]
"""Starts an engine's process; -> it, and our end of its socket. Raises ConfigError where that is
hopeless, RankLostError where the next one may live."""


async def launch_here(settings: Mapping[str, Any], share: Share) -> tuple[Process, socket.socket]:
    ours, theirs = socket.socketpair()
    try:
        return await _spawn(theirs, settings, share), ours
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()


@dataclass
class _Open:
    """A request in the engine."""

    request_id: str
    mail: Mail = field(default_factory=asyncio.Queue)
    has_started: bool = False


class EngineClient:
    def __init__(
        self,
        settings: Mapping[str, Any],
        *,
        name: str = "the engine",
        share: Share = WHOLE,
        pulse: Broadcast | None = None,
        restarts: int = 3,
        restart_window: float = 300.0,
        patience: Patience | None = None,
        launch: Launch = launch_here,
    ) -> None:
        """`settings` are fields of EngineConfig. At most `restarts` within so many seconds. `pulse`
        is that of others, for whoever waits for any of them."""
        self.settings = dict(settings)
        self.name = name
        self.share = share
        self.restarts = restarts
        self.restart_window = restart_window
        self.patience = patience or Patience()
        self.state: State = "stopped"
        self.failure = ""
        """Why it is unresponsive, is started again, or will not be; else empty."""
        self.progress: Loading | None = None
        """How far the process is that loads; None before it says so, and once it is ready."""
        self.exit_code = 0
        """What `failed` means for a command that waits for the engine."""
        self.info: Mapping[str, Any] = {}
        self.stats: Stats | None = None
        self.pid: int | None = None
        self.generation = 0
        """How many processes were replaced by another; the counts in Stats begin again in each."""
        self.is_draining = False
        self._launch = launch
        self._keeper: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pulse = pulse or Broadcast()
        self._last_words: Failed | None = None
        self._vigil = Vigil(self.patience)
        self._given_up = ""  # why we killed the process
        # On the wire a request has a number of ours, never used twice: what an engine still says
        # about one that was cancelled cannot reach another of the same id.
        self._numbers = itertools.count()
        self._open: dict[str, _Open] = {}
        self._num_waiting = 0  # of _open, those that have not started

    async def start(self) -> None:
        if self._keeper is not None:
            raise RuntimeError(f"{self.name} was started already")
        self.is_draining, self.info = False, {}
        self._enter("loading")
        self._keeper = asyncio.create_task(self._keep())

    @property
    def num_waiting(self) -> int:
        """Submitted and without a first token."""
        return self._num_waiting

    @property
    def num_open(self) -> int:
        """Submitted and not at an end."""
        return len(self._open)

    async def ready(self, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self.state in ("loading", "restarting", "unresponsive"):
                    await self._pulse.wait()
        except TimeoutError:
            raise EngineUnavailableError(f"{self.name} is not ready after {timeout} s") from None
        if self.state != "ready":
            raise self._unavailable()

    def submit(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> Stream:
        """Refuses at once (EngineUnavailableError); the stream raises the rest."""
        if self.state != "ready" or self.is_draining or self._writer is None:
            raise self._unavailable()
        number = f"{next(self._numbers)}"
        request = _Open(request_id)
        stream = Stream(request.mail, partial(self._cancel, number))
        try:
            data = _add_frame(number, prompt, params)
        except RequestRefusedError as error:
            request.mail.put_nowait(error)
            return stream
        self._open[number] = request
        self._num_waiting += 1
        self._writer.write(data)
        return stream

    async def drain(self, grace: float) -> None:
        """Takes no more requests; those still open after `grace` seconds end with an error."""
        self.is_draining = True
        self._pulse.beat()
        try:
            async with asyncio.timeout(grace):
                while self._open:
                    await self._pulse.wait()
        except TimeoutError:
            _log.warning(
                "%d requests of %s did not end within %g s", len(self._open), self.name, grace
            )
            for number in list(self._open):
                self._send_cancel(number)
                self._end(number, EngineUnavailableError("the server is stopping: ask again later"))

    async def stop(self) -> None:
        """The process is gone when this returns; what is still open ends with EngineDiedError."""
        if self.state != "failed":
            self.failure = ""
        self._enter("stopped")
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            await asyncio.gather(keeper, return_exceptions=True)
        self._enter("stopped")

    async def subscribe(self) -> AsyncGenerator[Stats, None]:
        """The newest Stats whenever there are some, until the engine has failed or is stopped."""
        seen = None
        while self.state not in ("failed", "stopped"):
            if self.stats is not None and self.stats is not seen:
                seen = self.stats
                yield seen
            else:
                await self._pulse.wait()

    # The process

    async def _keep(self) -> None:
        """Runs the engine's process, again and again if need be."""
        deaths: deque[float] = deque()
        try:
            while not self.is_draining:
                code = await self._live()
                if self.is_draining:
                    break
                now = time.monotonic()
                while deaths and deaths[0] < now - self.restart_window:
                    deaths.popleft()
                words = self._last_words if code > 0 else None  # one that was killed said nothing
                why = self._given_up or (words.message if words else _ending(code))
                if words and not self.info:
                    return self._fail(why, code)  # it could not start, and said so: it never will
                if len(deaths) >= self.restarts:
                    times = f"{len(deaths) + 1} times in {self.restart_window:g} s"
                    return self._fail(f"{self.name}'s process ended {times}, last: {why}", code)
                deaths.append(now)
                _log.error("%s's process ended (%s) and is started again", self.name, why)
                self.failure = why
                self._enter("restarting")
                await asyncio.sleep(FIRST_PAUSE * 2 ** (len(deaths) - 1))
                self.generation += 1
            self._enter("stopped")
        except Exception as error:  # it could not even be spawned
            _log.exception("%s's process is not looked after any more", self.name)
            self._fail(str(error), 1)

    async def _live(self) -> int:
        """One life of the process; -> how it ended"""
        self._last_words = None
        self._given_up = ""
        self._vigil = Vigil(self.patience)
        try:
            process, ours = await self._launch(self.settings, self.share)
        except ConfigError as error:
            self._last_words = Failed(type(error).__name__, str(error))
            return error.exit_code
        except RankLostError as error:  # it was lost before it could say anything
            _log.error("%s: %s", self.name, error)
            return error.exit_code
        self.pid = process.pid
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            watching = asyncio.create_task(self._watch(process))
            try:
                await self._listen(reader)
            finally:
                watching.cancel()
        finally:
            self._mourn()  # which closes the socket: the process ends, if it has not
            code = await _reap(process)
            self.pid = None
        return code

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        frames = Frames(FromEngine)
        try:
            while data := await reader.read(_READ):
                self._vigil.hear()
                for message in frames.feed(data):
                    self._take(message)
        except OSError:  # of another machine it may be that it does not answer any more
            pass
        except (msgspec.DecodeError, ValueError):
            _log.exception("%s's process sent what is no message", self.name)

    async def _watch(self, process: Process) -> None:
        """Notices that a process hangs, and that it does not any more. One that loads may take as
        long as it likes: it gets no requests."""
        before = time.monotonic()
        while not self._given_up:
            await asyncio.sleep(INTERVAL)
            now = time.monotonic()
            self._vigil.pass_time(now - before)
            before = now
            trouble = self._vigil.trouble
            if self.state == "ready" and trouble:
                _log.error("%s is unresponsive: %s", self.name, trouble)
                self.failure = trouble
                self._enter("unresponsive")
            elif self.state == "unresponsive" and not trouble:
                _log.info("%s responds again", self.name)
                self.failure = ""
                self._enter("ready")
            elif self.state == "unresponsive" and self._vigil.is_hopeless:
                seconds = self.patience.unresponsive
                self._given_up = f"{trouble}; it was killed after {seconds:g} s more"
                with suppress(ProcessLookupError):  # it has just ended
                    process.kill()

    def _mourn(self) -> None:
        """From here on nothing comes from this process."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        self.stats = self.progress = None
        if self.state in ("ready", "unresponsive"):
            self._enter("restarting")
        for number in list(self._open):
            self._end(number, EngineDiedError("the engine's process ended with this request in it"))

    def _fail(self, why: str, code: int) -> None:
        self.failure = why
        self.exit_code = code if code > 0 else 1
        _log.error("%s is not available any more: %s", self.name, why)
        self._enter("failed")

    def _enter(self, state: State) -> None:
        self.state = state
        self._pulse.beat()

    def _unavailable(self) -> EngineUnavailableError:
        if self.is_draining or self.state == "stopped":
            return EngineUnavailableError("the server is stopping and takes no more requests")
        if self.state == "failed":
            return EngineUnavailableError(self.failure, self.exit_code)
        return EngineUnavailableError(f"{self.name} is {self.state}: try again later")

    # Messages

    def _take(self, message: FromEngine) -> None:
        match message:
            case Progress():
                self._last_words = None  # it went on
                for grown in message.grown:
                    self._deliver(grown)
            case Refused():
                parts = message.error, message.message, message.param, message.label
                self._end(message.id, RequestRefusedError(*parts))
            case Stats():
                self.stats = message
                self._pulse.beat()
            case Beat():
                self._vigil.take(message)
            case Loading():
                self.progress = message
                self._pulse.beat()
            case Ready():
                self.info, self.failure, self.progress = message.info, "", None
                _log.info("%s is ready", self.name)
                self._enter("ready")
            case Failed():
                self._last_words = message

    def _deliver(self, grown: TokenDelta) -> None:
        request = self._open.get(grown.id)
        if request is None:
            return  # cancelled, and the engine did not know it yet
        if not request.has_started:
            request.has_started = True
            self._num_waiting -= 1
        request.mail.put_nowait(msgspec.structs.replace(grown, id=request.request_id))
        if grown.finish_reason is not None:
            self._forget(grown.id)

    def _end(self, number: str, error: SlotzeroError) -> None:
        request = self._forget(number)
        if request is not None:
            request.mail.put_nowait(error)

    def _cancel(self, number: str) -> None:
        if self._forget(number) is not None:
            self._send_cancel(number)

    def _send_cancel(self, number: str) -> None:
        if self._writer is not None:
            self._writer.write(frame(Cancel(number)))

    def _forget(self, number: str) -> _Open | None:
        request = self._open.pop(number, None)
        if request is not None:
            self._num_waiting -= not request.has_started
            self._pulse.beat()
        return request


def _add_frame(number: str, prompt: list[int], params: Mapping[str, Any]) -> bytes:
    """Whatever cannot cross is refused here: over there it would end the process."""
    try:
        tokens = msgspec.convert(prompt, list[int])
        data = frame(Add(number, tokens, msgspec.convert(dict(params), dict[str, Any])))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        param = _culprit(params)
        raise RequestRefusedError("RequestError", f"{param}: {error}", param) from None
    if len(data) > MAX_FRAME:
        raise RequestRefusedError(
            "RequestError", f"prompt: a request of {len(data)} bytes is too large", "prompt"
        )
    return data


def _culprit(params: Mapping[str, Any]) -> str:
    for name, value in params.items():
        try:
            msgspec.msgpack.encode({name: value})
        except (TypeError, ValueError, OverflowError):
            return name
    return "prompt"


async def _spawn(
    theirs: socket.socket, settings: Mapping[str, Any], share: Share
) -> asyncio.subprocess.Process:
    # -P and the path: it imports what we would, and nothing that lies where we happen to stand.
    # A session of its own: Ctrl-C in our terminal is for us
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "slotzero.server.process"),
        *(f"{theirs.fileno()}", json.dumps(settings, default=os.fspath), f"{share}"),
        stdin=asyncio.subprocess.PIPE,  # by which it knows that we are there
        pass_fds=[theirs.fileno()],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


async def _reap(process: Process) -> int:
    try:
        return await asyncio.wait_for(process.wait(), PATIENCE)
    except TimeoutError:
        process.kill()
        return await process.wait()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
