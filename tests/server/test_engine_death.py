"""Tests of engine processes that die, fail to start or lose their parent, and of restarts."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

import pytest
from engine_process import (
    LONG,
    SOON,
    STAGES,
    collect,
    expected_of,
    greedy,
    is_alive,
    prompt_of,
    tokens_of,
    until,
)
from served import SETTINGS

from slotzero import LLM
from slotzero.certify.start import start_engine
from slotzero.config import EngineConfig
from slotzero.errors import (
    ConfigError,
    EngineDiedError,
    EngineUnavailableError,
    RankLostError,
)
from slotzero.server import client as client_module
from slotzero.server import process
from slotzero.server.client import EngineClient
from slotzero.server.messages import (
    Frames,
    FromEngine,
)
from slotzero.server.stream import Stream

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gpu")]


def test_a_killed_engine_is_restarted_a_limited_number_of_times(offline: LLM) -> None:
    prompt, params = prompt_of(10), greedy(20)
    expected = expected_of(offline, prompt, params)
    client = EngineClient(SETTINGS, restarts=1)

    async def end_of(stream: Stream) -> str:
        try:
            return (await collect(stream))[-1].finish_reason or ""
        except EngineDiedError as error:
            assert "the engine's process died" in str(error)
            return "died"

    async def kill_under_load() -> list[str]:
        asks = [params] * 5 + [LONG] * 5
        streams = [client.submit(f"{i}", prompt_of(9, seed=i), ask) for i, ask in enumerate(asks)]
        ends = [asyncio.create_task(end_of(stream)) for stream in streams]
        await until(lambda: client.num_open <= 7)
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        return await asyncio.gather(*ends)

    async def live() -> None:
        await client.start()
        with pytest.raises(EngineUnavailableError, match="the engine is loading"):
            client.submit("early", prompt, params)
        await client.ready(SOON)
        first_pid = client.pid
        ends = await kill_under_load()
        assert set(ends) == {"died", "length"}
        assert set(ends[5:]) == {"died"}
        assert client.state == "restarting"
        assert (client.num_open, client.num_waiting, client.stats) == (0, 0, None)
        with pytest.raises(EngineUnavailableError, match="the engine is restarting"):
            client.submit("early", prompt, params)
        await client.ready(SOON)
        assert client.pid != first_pid
        assert client.generation == 1
        assert await tokens_of(client.submit("again", prompt, params)) == expected
        assert "died" in await kill_under_load()
        with pytest.raises(EngineUnavailableError, match=r"ended 2 times in 300 s, last: signal 9"):
            await client.ready(SOON)
        assert client.state == "failed"
        with pytest.raises(EngineUnavailableError, match="ended 2 times"):
            client.submit("late", prompt, params)
        assert client.pid is None
        await client.stop()
        assert client.state == "stopped"

    asyncio.run(live())


def test_an_engine_reports_its_loading_progress() -> None:
    """It reports the weights from none to all, then every captured size."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told = process.LoadingReport(process.Outbox(ours))
        engine = start_engine(
            EngineConfig(**SETTINGS | {"backend": "cpu", "max_num_seqs": 2}), on_progress=told
        )
        ours.shutdown(socket.SHUT_WR)
        data = b"".join(iter(lambda: theirs.recv(1 << 20), b""))
    heard: list[Any] = Frames(FromEngine).feed(data)
    assert list(dict.fromkeys(message.stage for message in heard)) == STAGES
    by_stage = {name: [m for m in heard if m.stage == name] for name in STAGES}
    for messages in by_stage.values():
        assert [m.done for m in messages] == sorted(m.done for m in messages)
        assert messages[-1].done == messages[-1].total
    assert by_stage["recording"][-1].total == len(engine.worker.recorded_keys) > 0


def test_an_engine_that_cannot_start_reports_why() -> None:
    client = EngineClient(SETTINGS | {"model": "tiny:nobody"})

    async def live() -> None:
        await client.start()
        with pytest.raises(EngineUnavailableError, match="nobody") as caught:
            await client.ready(SOON)
        assert client.state == "failed"
        assert client.failure == str(caught.value)
        assert caught.value.exit_code == client.exit_code == 3
        await client.stop()

    asyncio.run(live())


def test_an_engine_stopped_while_loading_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "EXIT_SECONDS", SOON)
    client = EngineClient(SETTINGS)

    async def live() -> int:
        await client.start()
        with pytest.raises(EngineUnavailableError, match=r"not ready after 0\.3 s"):
            await client.ready(0.3)
        await until(lambda: client.pid)
        pid = client.pid
        await client.stop()
        assert client.state == "stopped"
        assert pid is not None
        return pid

    start = time.monotonic()
    assert not is_alive(asyncio.run(live()))
    assert time.monotonic() - start < SOON, "it was not killed after the time to exit"


PARENT = """
import asyncio, json, sys
from slotzero.server.client import EngineClient

async def live():
    client = EngineClient(json.loads(sys.argv[1]))
    await client.start()
    while client.pid is None:
        await asyncio.sleep(0.01)
    print(client.pid, flush=True)
    await client.ready()
    print("torch" in sys.modules, flush=True)
    async for _ in client.submit("long", [1, 2, 3], json.loads(sys.argv[2])):
        print("token", flush=True)
        await asyncio.Event().wait()

asyncio.run(live())
"""


@pytest.mark.parametrize("when", ["it loads", "it works"])
def test_the_engine_dies_with_its_parent(when: str) -> None:
    command = [sys.executable, "-c", PARENT, json.dumps(SETTINGS), json.dumps(LONG)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        if when == "it works":
            assert parent.stdout.readline() == "False\n"  # the HTTP process does not import torch
            assert parent.stdout.readline() == "token\n"
        parent.kill()
    deadline = time.monotonic() + SOON
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


# The supervisor, with fake engine processes


class Fakes:
    """Runs `code` instead of an engine; fd 0 of sys.argv is its end of the socket."""

    def __init__(self, code: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times: list[float] = []

        async def spawn(theirs: socket.socket, *_: object) -> asyncio.subprocess.Process:
            self.times.append(time.monotonic())
            fd = theirs.fileno()
            return await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", code, f"{fd}", pass_fds=[fd]
            )

        monkeypatch.setattr(client_module, "_spawn", spawn)
        monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.1)


async def fail(client: EngineClient) -> str:
    await client.start()
    with pytest.raises(EngineUnavailableError):
        await client.ready(SOON)
    assert client.state == "failed"
    await client.stop()
    return client.failure


def test_restarts_are_bounded_and_wait_longer_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes("raise SystemExit(7)", monkeypatch)
    client = EngineClient({}, restarts=2)
    assert asyncio.run(fail(client)).endswith("ended 3 times in 300 s, last: exit code 7")
    assert client.exit_code == 7
    assert len(fakes.times) == 3
    first, second = fakes.times[1] - fakes.times[0], fakes.times[2] - fakes.times[1]
    assert first >= 0.1
    assert second >= 0.2


def test_deaths_long_ago_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = Fakes("raise SystemExit(7)", monkeypatch)
    client = EngineClient({}, restarts=1, restart_window=0.001)

    async def live() -> None:
        await client.start()
        await until(lambda: len(fakes.times) >= 4)
        await client.stop()

    asyncio.run(live())


def test_invalid_data_on_the_socket_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    send = "import os, sys, time; os.write(int(sys.argv[1]), {!r}); time.sleep(60)"
    monkeypatch.setattr(client_module, "EXIT_SECONDS", 0.2)
    for noise in (b"\xff" * 8, b"\x02\x00\x00\x00\x91\xa1"):
        Fakes(send.format(noise), monkeypatch)
        why = asyncio.run(fail(EngineClient({}, restarts=0)))
        assert why.endswith("last: signal 9")  # it had not ended when its socket was closed


def test_a_process_that_cannot_be_spawned_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "/nowhere/python" in asyncio.run(fail(EngineClient(SETTINGS)))


def test_a_process_lost_before_it_has_a_socket_is_restarted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A process that cannot start is not restarted."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)
    errors = [RankLostError("its machine is gone"), ConfigError("no such machine")]

    async def launch(*_: object) -> Any:
        raise errors.pop(0)

    client = EngineClient({}, launch=launch)
    assert asyncio.run(fail(client)) == "no such machine"
    assert (client.exit_code, client.generation, errors) == (2, 1, [])


def test_starting_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes("import time; time.sleep(60)", monkeypatch)
    monkeypatch.setattr(client_module, "EXIT_SECONDS", 0.1)

    async def live() -> None:
        client = EngineClient({})
        await client.stop()  # there is nothing to stop
        await client.start()
        with pytest.raises(RuntimeError, match="already started"):
            await client.start()
        await client.drain(0)
        await client.stop()
        await client.stop()
        with pytest.raises(EngineUnavailableError):
            await client.ready(1)

    asyncio.run(live())
