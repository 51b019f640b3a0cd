"""Client of one engine's process: submits and cancels requests, and restarts a dead engine.

It lives in one event loop and knows neither text nor torch. The rules: every submitted request ends
with a finish_reason or an error, or is cancelled by its caller; and a slow reader delays no other
request.
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
from slotzero.server.broadcast import Broadcast
from slotzero.server.heartbeat import INTERVAL, HeartbeatMonitor, ResponseLimits
from slotzero.server.messages import (
    MAX_FRAME,
    Action,
    Add,
    AdminReply,
    AdminRequest,
    Beat,
    Cancel,
    EngineReady,
    Failed,
    Frames,
    FromEngine,
    Loading,
    Progress,
    Refused,
    Stats,
    TokenDelta,
    frame,
)
from slotzero.server.share import WHOLE, Share
from slotzero.server.stream import Mail, Stream
from slotzero.system.stacks import SIGNAL

State = Literal["loading", "ready", "unresponsive", "restarting", "failed", "stopped"]

FIRST_PAUSE = 0.25  # seconds before the first restart; each further one waits twice as long
EXIT_SECONDS = 5.0  # seconds for the process to exit once its socket is closed
_READ = 1 << 18
_log = logging.getLogger("slotzero.server")


class Process(Protocol):
    """An engine's process, local or on another machine."""

    @property
    def pid(self) -> int | None: ...
    async def wait(self) -> int: ...
    def kill(self) -> None: ...


Launch = Callable[[Mapping[str, Any], Share], Awaitable[tuple[Process, socket.socket]]]
"""Starts an engine's process, and returns it with this side's end of its socket. Raises ConfigError
if a retry is useless, RankLostError if a retry may succeed."""


async def launch_here(settings: Mapping[str, Any], share: Share) -> tuple[Process, socket.socket]:
    local, remote = socket.socketpair()
    try:
        return await _spawn(remote, settings, share), local
    except BaseException:
        local.close()
        raise
    finally:
        remote.close()


@dataclass
class _OpenRequest:
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
        changes: Broadcast | None = None,
        restarts: int = 3,
        restart_window: float = 300.0,
        response_limits: ResponseLimits | None = None,
        launch: Launch = launch_here,
    ) -> None:
        """`settings` are fields of EngineConfig. The process is restarted at most `restarts` times
        within `restart_window` seconds. `changes` may be shared with other clients, to wait for a
        change in any of them."""
        self.settings = dict(settings)
        self.name = name
        self.share = share
        self.restarts = restarts
        self.restart_window = restart_window
        self.response_limits = response_limits or ResponseLimits()
        self.state: State = "stopped"
        self.failure = ""
        """Why the engine is unresponsive, restarting or failed; else empty."""
        self.progress: Loading | None = None
        """Progress of loading; None before the first report, and once the engine is ready."""
        self.exit_code = 0
        """Exit code for a command that waits for the engine, if its state is "failed"."""
        self.info: Mapping[str, Any] = {}
        self.stats: Stats | None = None
        self.pid: int | None = None
        self.generation = 0
        """Number of processes that were replaced; the counters in Stats restart in each."""
        self.is_draining = False
        self._launch = launch
        self._supervisor: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._changes = changes or Broadcast()
        self._last_report: Failed | None = None
        self._monitor = HeartbeatMonitor(self.response_limits)
        self._given_up = ""  # why this client killed the process
        # On the wire a request has a number that is never reused: a late message about a cancelled
        # request cannot reach another request with the same id.
        self._numbers = itertools.count()
        self._open: dict[str, _OpenRequest] = {}
        self._num_waiting = 0  # requests in _open that have not started
        self._actions: dict[str, asyncio.Future[None]] = {}
        self._restoring: asyncio.Task[None] | None = None
        self.restores: tuple[Action, ...] = ()
        """What a restarted process does before it is ready."""
        self.lost_weights = ""
        """Why a restarted process would serve other weights, so that none is; else empty."""

    async def start(self) -> None:
        if self._supervisor is not None:
            raise RuntimeError(f"{self.name} is already started")
        self.is_draining, self.info = False, {}
        self._enter("loading")
        self._supervisor = asyncio.create_task(self._supervise())

    @property
    def num_waiting(self) -> int:
        """Requests that are submitted and have no first token yet."""
        return self._num_waiting

    @property
    def num_open(self) -> int:
        """Requests that are submitted and not finished."""
        return len(self._open)

    async def ready(self, timeout: float | None = None) -> None:
        try:
            async with asyncio.timeout(timeout):
                while self.state in ("loading", "restarting", "unresponsive"):
                    await self._changes.wait()
        except TimeoutError:
            raise EngineUnavailableError(f"{self.name} is not ready after {timeout} s") from None
        if self.state != "ready":
            raise self._unavailable()

    def submit(self, request_id: str, prompt: list[int], params: Mapping[str, Any]) -> Stream:
        """Submit a request. Raises EngineUnavailableError at once; the stream raises all other
        errors."""
        if self.state != "ready" or self.is_draining or self._writer is None:
            raise self._unavailable()
        number = f"{next(self._numbers)}"
        request = _OpenRequest(request_id)
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

    async def perform(self, action: Action) -> None:
        """Let the engine perform an action of an administrator."""
        if self.state != "ready" or self._writer is None:
            raise self._unavailable()
        await self._send_action(action)

    async def _send_action(self, action: Action) -> None:
        assert self._writer is not None
        number = f"{next(self._numbers)}"
        data = frame(AdminRequest(number, action))
        if len(data) > MAX_FRAME:
            raise RequestRefusedError(
                "RequestError",
                f"the tensors have {len(data)} bytes, at most {MAX_FRAME} at once: send fewer, or "
                "write them to a .safetensors file",
            )
        self._actions[number] = asyncio.get_running_loop().create_future()
        self._writer.write(data)
        try:
            await self._actions[number]
        finally:
            del self._actions[number]

    async def _restore(self) -> None:
        """Bring a restarted process to the state of the one before."""
        try:
            for action in self.restores:
                await self._send_action(action)
        except EngineDiedError:
            pass  # the next process tries again
        except RequestRefusedError as error:
            self.lost_weights = f"a restarted engine could not take the newest weights: {error}"
            if self._writer is not None:
                self._writer.transport.abort()
        else:
            self._enter("ready")

    async def drain(self, grace: float) -> None:
        """Accept no more requests; those still open after `grace` seconds end with an error."""
        self.is_draining = True
        self._changes.notify()
        try:
            async with asyncio.timeout(grace):
                while self._open:
                    await self._changes.wait()
        except TimeoutError:
            _log.warning(
                "%d requests in %s did not finish within %g s (--grace) and are cancelled",
                len(self._open),
                self.name,
                grace,
            )
            for number in list(self._open):
                self._send_cancel(number)
                self._end(number, EngineUnavailableError("the server is stopping: try again later"))

    async def stop(self) -> None:
        """Stop the process and wait for its exit. Open requests end with EngineDiedError."""
        if self.state != "failed":
            self.failure = ""
        self._enter("stopped")
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
        self._enter("stopped")

    async def subscribe(self) -> AsyncGenerator[Stats, None]:
        """Yield new Stats as they arrive, until the engine has failed or is stopped."""
        seen = None
        while self.state not in ("failed", "stopped"):
            if self.stats is not None and self.stats is not seen:
                seen = self.stats
                yield seen
            else:
                await self._changes.wait()

    # The process

    async def _supervise(self) -> None:
        """Run the engine's process, and restart it when it dies."""
        deaths: deque[float] = deque()
        try:
            while not self.is_draining:
                code = await self._run_process()
                if self.is_draining:
                    break
                now = time.monotonic()
                while deaths and deaths[0] < now - self.restart_window:
                    deaths.popleft()
                words = self._last_report if code > 0 else None  # a killed process reports nothing
                why = self._given_up or (words.message if words else _ending(code))
                if self.lost_weights:
                    return self._fail(f"{why}; {self.lost_weights}", code)
                if words and not self.info:
                    return self._fail(why, code)  # it reported why it cannot start
                if len(deaths) >= self.restarts:
                    times = f"{len(deaths) + 1} times in {self.restart_window:g} s"
                    return self._fail(f"{self.name}'s process ended {times}, last: {why}", code)
                deaths.append(now)
                _log.error("%s's process ended (%s) and is restarted", self.name, why)
                self.failure = why
                self._enter("restarting")
                await asyncio.sleep(FIRST_PAUSE * 2 ** (len(deaths) - 1))
                self.generation += 1
            self._enter("stopped")
        except Exception as error:  # it could not even be spawned
            _log.exception("%s's process could not be started or supervised", self.name)
            self._fail(str(error), 1)

    async def _run_process(self) -> int:
        """Start the process, serve until it ends, and return its exit code."""
        self._last_report = None
        self._given_up = ""
        self._monitor = HeartbeatMonitor(self.response_limits)
        try:
            process, end = await self._launch(self.settings, self.share)
        except ConfigError as error:
            self._last_report = Failed(type(error).__name__, str(error))
            return error.exit_code
        except RankLostError as error:  # it was lost before its first message
            _log.error("%s: %s", self.name, error)
            return error.exit_code
        self.pid = process.pid
        try:
            reader, self._writer = await asyncio.open_connection(sock=end)
            watching = asyncio.create_task(self._watch(process))
            try:
                await self._listen(reader)
            finally:
                watching.cancel()
        finally:
            self._disconnect()  # closes the socket, which ends the process
            code = await _reap(process)
            self.pid = None
        return code

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        frames = Frames(FromEngine)
        try:
            while data := await reader.read(_READ):
                self._monitor.hear()
                for message in frames.feed(data):
                    self._take(message)
        except OSError:  # another machine may have stopped responding
            pass
        except (msgspec.DecodeError, ValueError):
            _log.exception("%s's process sent a malformed message", self.name)

    async def _watch(self, process: Process) -> None:
        """Detect that a process hangs, and that it responds again. Loading has no time limit, as an
        engine that loads gets no requests."""
        before = time.monotonic()
        while not self._given_up:
            await asyncio.sleep(INTERVAL)
            now = time.monotonic()
            self._monitor.pass_time(now - before)
            before = now
            trouble = self._monitor.trouble
            if self.state == "ready" and trouble:
                _log.error("%s is unresponsive: %s", self.name, trouble)
                if self._monitor.is_silent and self.pid is not None:
                    with suppress(ProcessLookupError):  # a step that hangs is written by itself
                        os.kill(self.pid, SIGNAL)
                self.failure = trouble
                self._enter("unresponsive")
            elif self.state == "unresponsive" and not trouble:
                _log.info("%s is responsive again", self.name)
                self.failure = ""
                self._enter("ready")
            elif self.state == "unresponsive" and self._monitor.is_hopeless:
                seconds = self.response_limits.unresponsive
                self._given_up = f"{trouble}; killed after another {seconds:g} s"
                with suppress(ProcessLookupError):  # it has just ended
                    process.kill()

    def _disconnect(self) -> None:
        """End the connection to this process, and all requests in it."""
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None
        self.stats = self.progress = None
        for reply in self._actions.values():
            if not reply.done():
                reply.set_exception(EngineDiedError("the engine's process died meanwhile"))
        if self.state in ("ready", "unresponsive"):
            self._enter("restarting")
        died = "the engine's process died while it ran this request"
        if self._given_up:
            died = f"{died}: {self._given_up}"
        elif self._last_report is not None and self._last_report.error == RankLostError.__name__:
            died = f"{died}: {self._last_report.message}"
        for number in list(self._open):
            self._end(number, EngineDiedError(died))

    def _fail(self, why: str, code: int) -> None:
        self.failure = why
        self.exit_code = code if code > 0 else 1
        if self.info or self.share.size > 1:  # otherwise the server ends at once and says why
            _log.error("%s has failed and is not restarted: %s", self.name, why)
        self._enter("failed")

    def _enter(self, state: State) -> None:
        self.state = state
        self._changes.notify()

    def _unavailable(self) -> EngineUnavailableError:
        if self.is_draining or self.state == "stopped":
            return EngineUnavailableError("the server is stopping and accepts no more requests")
        if self.state == "failed":
            return EngineUnavailableError(self.failure, self.exit_code)
        return EngineUnavailableError(f"{self.name} is {self.state}: try again later")

    # Messages

    def _take(self, message: FromEngine) -> None:
        match message:
            case Progress():
                self._last_report = None  # the engine survived the failed step
                for grown in message.grown:
                    self._deliver(grown)
            case Refused():
                parts = message.error, message.message, message.param, message.label
                self._end(message.id, RequestRefusedError(*parts))
            case Stats():
                self.stats = message
                self._changes.notify()
            case Beat():
                self._monitor.take(message)
            case Loading():
                self.progress = message
                self._changes.notify()
            case EngineReady():
                self.info, self.failure, self.progress = message.info, "", None
                kv = message.info["kv_cache"]
                _log.info(
                    "%s is ready: KV cache in %s for %d tokens",
                    self.name,
                    kv["dtype"],
                    kv["tokens"],
                )
                if self.restores:
                    self._restoring = asyncio.create_task(self._restore())
                else:
                    self._enter("ready")
            case AdminReply():
                self._settle(message)
            case Failed():
                self._last_report = message

    def _settle(self, reply: AdminReply) -> None:
        future = self._actions.get(reply.id)
        if future is None or future.done():
            return  # its caller has gone
        if reply.error:
            future.set_exception(RequestRefusedError(reply.error, reply.message))
        else:
            future.set_result(None)

    def _deliver(self, grown: TokenDelta) -> None:
        request = self._open.get(grown.id)
        if request is None:
            return  # cancelled, but the engine had not noticed yet
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

    def _forget(self, number: str) -> _OpenRequest | None:
        request = self._open.pop(number, None)
        if request is not None:
            self._num_waiting -= not request.has_started
            self._changes.notify()
        return request


def _add_frame(number: str, prompt: list[int], params: Mapping[str, Any]) -> bytes:
    """Encode a request. Whatever cannot be encoded is refused here, as decoding it would end the
    engine's process."""
    try:
        tokens = msgspec.convert(prompt, list[int])
        data = frame(Add(number, tokens, msgspec.convert(dict(params), dict[str, Any])))
    except (msgspec.ValidationError, TypeError, ValueError, OverflowError) as error:
        param = _culprit(params)
        raise RequestRefusedError("RequestError", f"{param}: {error}", param) from None
    if len(data) > MAX_FRAME:
        raise RequestRefusedError(
            "RequestError",
            f"prompt: the request has {len(data)} bytes, at most {MAX_FRAME}",
            "prompt",
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
    remote: socket.socket, settings: Mapping[str, Any], share: Share
) -> asyncio.subprocess.Process:
    # -P and PYTHONPATH: import the same modules as this process, and none from the current folder.
    # A session of its own: Ctrl-C in the terminal goes to this process only.
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "slotzero.server.process"),
        *(f"{remote.fileno()}", json.dumps(settings, default=os.fspath), f"{share}"),
        stdin=asyncio.subprocess.PIPE,  # its end tells the process that this one has died
        pass_fds=[remote.fileno()],
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )


async def _reap(process: Process) -> int:
    try:
        return await asyncio.wait_for(process.wait(), EXIT_SECONDS)
    except TimeoutError:
        process.kill()
        return await process.wait()


def _ending(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
