"""Tests of the heartbeat: an engine that hangs gets no requests, and is replaced after a while."""

import asyncio
import contextlib
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hanging import FILE
from served import SETTINGS, Server, descendants, wait_until

from slotzero.errors import EngineDiedError, EngineUnavailableError
from slotzero.server import client as client_module
from slotzero.server import heartbeat
from slotzero.server.client import EngineClient
from slotzero.server.heartbeat import INTERVAL, HeartbeatMonitor, HeartbeatSender, ResponseLimits
from slotzero.server.messages import Beat, EngineReady, Loading, TokenDelta, frame
from slotzero.server.share import Share
from slotzero.system.stacks import SIGNAL

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gpu")]

GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": 40}
LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": None}
SOON = 120.0  # seconds: enough for a busy machine, and a limit for a test that hangs


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.02)


# Limits, with a fake clock


def passed(monitor: HeartbeatMonitor, seconds: float) -> str:
    for _ in range(round(seconds / INTERVAL)):
        monitor.pass_time(INTERVAL)
    return monitor.trouble


def test_silence_is_trouble_and_a_word_ends_it() -> None:
    monitor = HeartbeatMonitor(ResponseLimits(heartbeat=10, unresponsive=5))
    assert passed(monitor, 9) == ""
    monitor.hear()
    assert passed(monitor, 9) == ""
    assert passed(monitor, 1) == "no heartbeat for 10 s"
    passed(monitor, 3)
    assert not monitor.is_hopeless
    monitor.hear()
    assert passed(monitor, 9) == ""
    passed(monitor, 4)
    assert not monitor.is_hopeless, "it counts anew"
    passed(monitor, 2)
    assert monitor.is_hopeless


def test_a_step_that_takes_too_long_is_trouble_until_it_ends() -> None:
    monitor = HeartbeatMonitor(ResponseLimits(heartbeat=10, unresponsive=5))
    monitor.take(Beat())
    assert passed(monitor, 1) == ""
    monitor.take(Beat("decode[8] takes long"))
    assert passed(monitor, 5) == "decode[8] takes long"
    assert monitor.is_hopeless
    assert not monitor.is_silent
    monitor.take(Beat())
    assert passed(monitor, 1) == ""
    assert not monitor.is_hopeless


def test_without_limits_there_is_no_trouble() -> None:
    monitor = HeartbeatMonitor(ResponseLimits(0, 0))
    assert passed(monitor, 10_000) == ""
    monitor = HeartbeatMonitor(ResponseLimits(heartbeat=10, unresponsive=0))
    assert passed(monitor, 10_000)
    assert not monitor.is_hopeless


def test_time_in_which_the_server_did_not_run_does_not_count() -> None:
    monitor = HeartbeatMonitor(ResponseLimits(heartbeat=10))
    monitor.pass_time(3600.0)
    assert monitor.trouble == ""


def test_a_heartbeat_names_the_step_that_takes_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.01)
    beats: list[Beat] = []
    is_over = threading.Event()

    def send(beat: Beat) -> None:
        if is_over.is_set():
            raise BrokenPipeError
        beats.append(beat)

    heartbeats = HeartbeatSender(send)
    heartbeats.start()
    wait_until(lambda: len(beats) > 3)
    assert {*beats} == {Beat()}, "while it loads"
    heartbeats.overdue = lambda: "decode[8] takes long"
    wait_until(lambda: beats[-1] == Beat("decode[8] takes long"))
    is_over.set()


# A real engine


class Stopped:
    """An engine whose process is stopped in the middle of an answer."""

    def __init__(self, response_limits: ResponseLimits) -> None:
        self.client = EngineClient(SETTINGS, response_limits=response_limits)
        self.stream: Any = None

    async def __aenter__(self) -> "Stopped":
        await self.client.start()
        await self.client.ready(SOON)
        self.stream = self.client.submit("a", [1, 2, 3], LONG)
        await anext(self.stream)
        assert self.client.pid is not None
        os.kill(self.client.pid, signal.SIGSTOP)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.stop()


def test_a_stopped_engine_is_unresponsive_until_it_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def live() -> None:
        async with Stopped(ResponseLimits(heartbeat=10, unresponsive=0)) as stopped:
            client = stopped.client
            await until(lambda: client.state == "unresponsive")
            assert client.failure == "no heartbeat for 10 s"
            with pytest.raises(EngineUnavailableError, match="the engine is unresponsive"):
                client.submit("b", [1], GREEDY)
            assert client.num_open == 1, "the running request waits"
            await asyncio.sleep(2 * INTERVAL)
            pid = client.pid
            assert pid is not None
            os.kill(pid, signal.SIGCONT)
            await until(lambda: client.state == "ready")
            assert (client.failure, client.generation, client.pid) == ("", 0, pid)
            async with asyncio.timeout(SOON), aclosing(stopped.stream):
                grown: list[TokenDelta] = [part async for part in stopped.stream]
            assert grown[-1].finish_reason == "length"

    with caplog.at_level(logging.INFO, "slotzero.server"):
        asyncio.run(live())
    lines = [record.getMessage() for record in caplog.records]
    lost = lines.count("the engine is unresponsive: no heartbeat for 10 s")
    found = lines.count("the engine is responsive again")
    assert found >= 1
    assert lost - found in (0, 1), "each change is logged once"  # a busy machine may cause more


def test_an_engine_that_stays_unresponsive_is_replaced() -> None:
    async def live() -> None:
        async with Stopped(ResponseLimits(heartbeat=10, unresponsive=5)) as stopped:
            client, pid = stopped.client, stopped.client.pid
            with pytest.raises(EngineDiedError):
                async with asyncio.timeout(SOON):
                    async for _ in stopped.stream:
                        pass
            await until(lambda: client.state == "restarting")
            killed = "no heartbeat for 10 s; killed"
            await until(lambda: client.failure.startswith(killed))
            await client.ready(SOON)
            assert client.generation == 1
            assert client.pid != pid
            async with asyncio.timeout(SOON):
                tokens = [
                    t async for part in client.submit("b", [1], GREEDY) for t in part.token_ids
                ]
            assert len(tokens) == 40

    asyncio.run(live())


def test_the_health_route_reports_an_unresponsive_engine(tmp_path: Path) -> None:
    words = ["tiny:llama", "--backend", "eager", "--heartbeat-timeout", "10"]
    server = Server([*words, "--unresponsive-timeout", "0"], tmp_path / "log")

    def health() -> httpx.Response:
        return httpx.get(f"{server.url}/health", timeout=SOON)

    def is_up() -> str:
        text = httpx.get(f"{server.url}/metrics", timeout=SOON).text
        return text.partition('slotzero_engine_up{engine="0"} ')[2][:3]

    (engine,) = descendants(server.process.pid, "slotzero.server.process")
    try:
        assert (health().status_code, is_up()) == (200, "1.0")
        os.kill(engine, signal.SIGSTOP)
        wait_until(lambda: health().status_code == 503)
        reason = "no heartbeat for 10 s"
        told = {"status": "unresponsive", "engines": ["unresponsive"], "reason": reason}
        assert (health().json(), is_up()) == (told, "0.0")
        body = {"model": "tiny:llama", "prompt": "x"}
        refused = httpx.post(f"{server.url}/v1/completions", json=body, timeout=SOON)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        time.sleep(2 * INTERVAL)
        os.kill(engine, signal.SIGCONT)
        wait_until(lambda: health().status_code == 200)
        wait_until(lambda: is_up() == "1.0")
        assert server.end() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(engine, signal.SIGCONT)
        server.kill()
    assert "is unresponsive" in server.log.read_text()


def test_an_engine_whose_step_hangs_is_named_and_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator never ends: the step is named, its stack is in the log, and clients are told."""
    hang, log = tmp_path / "hang", tmp_path / "log"
    monkeypatch.setenv(FILE, str(hang))
    named = r"on rank 0 has taken more than 5 s \(see --step-timeout\)"

    async def launch(settings: Any, share: Share) -> Any:
        local, remote = socket.socketpair()
        words = (f"{remote.fileno()}", json.dumps(settings), f"{share}")
        with remote, log.open("a") as file:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "hanging", *words),
                stdin=asyncio.subprocess.PIPE,
                stderr=file,
                pass_fds=[remote.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            )
        return process, local

    async def live() -> None:
        limits = ResponseLimits(heartbeat=0, unresponsive=2)
        client = EngineClient(
            SETTINGS | {"step_timeout": 5.0}, response_limits=limits, launch=launch
        )
        await client.start()
        await client.ready(SOON)
        stream = client.submit("a", [1, 2, 3], LONG)
        await anext(stream)
        hang.touch()
        await until(lambda: client.state == "unresponsive")
        assert re.match(rf"running decode\[1\] with 1 row {named}", client.failure)
        with pytest.raises(
            EngineDiedError, match=rf"while it ran this request: running .* {named}"
        ):
            async with asyncio.timeout(SOON):
                async for _ in stream:
                    pass
        hang.unlink()
        await until(lambda: client.generation == 1)
        await client.ready(SOON)
        async with asyncio.timeout(SOON):
            tokens = [t async for part in client.submit("b", [1], GREEDY) for t in part.token_ids]
        assert len(tokens) == 40
        await client.stop()

    asyncio.run(live())
    written = log.read_text()
    assert "has taken more than 5 s; stacks of all threads:" in written
    assert "in endless" in written


def test_an_engine_that_holds_the_interpreter_writes_its_stacks_too(tmp_path: Path) -> None:
    """It sends no heartbeat, and no thread of it can write: a signal handler does."""
    code = (
        "import ctypes; from slotzero.system.stacks import write_bare_stacks_when_asked as w; w()\n"
        "def endless():\n    print('ready', flush=True); ctypes.PyDLL(None).sleep(60)\n"
        "endless()"
    )
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=file, text=True
        )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(SIGNAL)
        wait_until(lambda: "in endless" in log.read_text())
    finally:
        process.kill()
        process.wait()


# Fake engine processes


def say(monkeypatch: pytest.MonkeyPatch, *messages: Any) -> None:
    """Replace the engine by a process that sends these messages and is silent then."""
    data = b"".join(map(frame, messages))
    code = f"import os, sys, time; os.write(int(sys.argv[1]), {data!r}); time.sleep(600)"

    async def spawn(theirs: socket.socket, *_: object) -> asyncio.subprocess.Process:
        fd = theirs.fileno()
        command = (sys.executable, "-S", "-c", code, f"{fd}")
        return await asyncio.create_subprocess_exec(*command, pass_fds=[fd])

    monkeypatch.setattr(client_module, "_spawn", spawn)
    monkeypatch.setattr(client_module, "EXIT_SECONDS", 0.1)


def test_a_loop_that_hangs_in_a_living_process_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    say(
        monkeypatch,
        EngineReady({"kv_cache": {"dtype": "float32", "tokens": 4096}}),
        Beat("decode[8] takes long"),
    )

    async def live() -> None:
        client = EngineClient({}, response_limits=ResponseLimits(heartbeat=0, unresponsive=0))
        await client.start()
        await until(lambda: client.state == "unresponsive")
        assert client.failure == "decode[8] takes long"
        await client.stop()

    asyncio.run(live())


def test_a_loading_engine_may_be_silent_and_reports_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say(monkeypatch, Loading("weights", 3, 7), Loading("recording", 2, 9))
    monkeypatch.setattr(client_module, "INTERVAL", 0.01)

    async def live() -> None:
        client = EngineClient({}, response_limits=ResponseLimits(heartbeat=0.05, unresponsive=0.05))
        await client.start()
        await until(lambda: client.progress == Loading("recording", 2, 9))
        await asyncio.sleep(0.5)
        assert (client.state, client.failure, client.generation) == ("loading", "", 0)
        await client.stop()
        assert client.progress is None

    asyncio.run(live())
