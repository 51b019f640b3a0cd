"""Tests of connections: timeouts, half-sent requests, the connection limit, log, shutdown."""

import asyncio
import http.client
import json
import logging
import resource
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import PATIENCE, Server, wait_until

from slotzero.cli import main as cli
from slotzero.cli import serve
from slotzero.server.app import make_app
from slotzero.server.connections import Connections, default_limits
from slotzero.server.events import EventStream, event
from slotzero.server.repeats import Repeats
from slotzero.server.settings import ServerSettings
from slotzero.text.tokenizer import Tokenizer

pytestmark = pytest.mark.slow


class StillClient:
    """A fleet that is ready and never receives a request."""

    state, failure, generation = "ready", "", 0
    stats = progress = None

    def __init__(self) -> None:
        self.info: dict[str, Any] = {}
        self.settings: dict[str, Any] = {}
        self.replicas = [self]

    async def start(self) -> None: ...

    async def drain(self, grace: float) -> None: ...

    async def stop(self) -> None: ...


class Running:
    """The HTTP server in a thread, without an engine."""

    def __init__(self, **given: Any) -> None:
        settings = ServerSettings(**{"port": 0} | given)
        listener = serve._listen(settings)
        self.address = listener.getsockname()[:2]
        limit, burst = default_limits()
        self.connections = Connections(settings.max_connections or limit, settings)
        client: Any = StillClient()
        app = make_app(client, Tokenizer.bytes_tokenizer(), settings, None, self.connections)

        @app.get("/slow")
        async def slow() -> str:
            self.num_slow += 1
            while not self.is_released:
                await asyncio.sleep(0.01)
            return "done"

        @app.get("/stream")
        async def stream(holds: bool) -> EventStream:
            async def events() -> AsyncGenerator[bytes, None]:
                yield event(b"begun")
                if holds:
                    await slow()
                yield event(b"ended")

            return EventStream(events())

        self.num_slow, self.is_released = 0, False
        self.front = app.state.slotzero
        self.server = serve._make_server(app, settings, self.connections, burst)
        work = self.server.serve(sockets=[listener])
        self.thread = threading.Thread(target=asyncio.run, args=(work,), daemon=True)
        self.thread.start()
        wait_until(lambda: self.server.started)

    def connect(self, data: bytes = b"") -> socket.socket:
        end = socket.create_connection(self.address, timeout=PATIENCE)
        end.sendall(data)
        return end

    def get(self, path: str = "/health") -> int:
        with closing(http.client.HTTPConnection(*self.address, timeout=PATIENCE)) as connection:
            connection.request("GET", path)
            return connection.getresponse().status

    def end(self) -> None:
        self.is_released = self.server.should_exit = True
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@contextmanager
def running(**given: Any) -> Iterator[Running]:
    made = Running(**given)
    try:
        yield made
    finally:
        made.end()


def read_all(end: socket.socket) -> bytes:
    """Read until the server closes the connection."""
    data = b""
    while more := end.recv(1 << 16):
        data += more
    return data


# Timeouts


def test_a_silent_connection_is_closed() -> None:
    with running(receive_timeout=0.3) as server, server.connect() as end:
        assert read_all(end) == b""


@pytest.mark.parametrize("head", [b"G", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_half_a_head_is_answered_with_408(head: bytes) -> None:
    with running(receive_timeout=0.3) as server, server.connect(head) as end:
        reply = read_all(end)
    assert reply.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    body = json.loads(reply.partition(b"\r\n\r\n")[2])
    assert body["error"]["code"] == "receive_timeout"


def test_half_a_second_head_is_answered_too() -> None:
    """The second request has its own timeout."""
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(receive_timeout=0.3) as server, server.connect(whole) as end:
        assert b"200 OK" in end.recv(1 << 16)
        end.sendall(b"GET /hea")
        assert b"HTTP/1.1 408 " in read_all(end)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("key", [(), ("secret",)])
def test_half_a_body_is_answered_with_408(path: str, key: tuple[str, ...]) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    half = f'{head}Content-Length: 100\r\n\r\n{{"model":'.encode()
    with running(receive_timeout=0.3, api_key=key) as server, server.connect(half) as end:
        reply = read_all(end)
        assert server.get() == 200
    assert reply.startswith(b"HTTP/1.1 408 ")
    assert b"connection: close" in reply.lower()
    assert json.loads(reply.partition(b"\r\n\r\n")[2])["error"]["code"] == "receive_timeout"


def test_an_idle_connection_is_closed_after_its_answer() -> None:
    whole = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(keep_alive_timeout=0.3) as server, server.connect(whole) as end:
        reply = read_all(end)
    assert reply.startswith(b"HTTP/1.1 200 OK")
    assert reply.endswith(b"}")


def test_an_answer_may_take_longer_than_the_timeouts() -> None:
    whole = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    given = {"receive_timeout": 0.2, "keep_alive_timeout": 0.2}
    with running(**given) as server, server.connect(whole) as end:
        wait_until(lambda: server.num_slow == 1)
        time.sleep(1.0)
        server.is_released = True
        assert b"done" in read_all(end)


def test_the_second_of_two_pipelined_streams_may_take_longer_too() -> None:
    """It begins before the application has returned from the first one."""
    head = "GET /stream?holds={} HTTP/1.1\r\nHost: x\r\n\r\n"
    both = (head.format(0) + head.format(1)).encode()
    with running(keep_alive_timeout=0.2) as server, server.connect(both) as end:
        wait_until(lambda: server.num_slow == 1)
        time.sleep(1.0)
        server.is_released = True
        reply = read_all(end)  # the connection is closed once it is idle
        wait_until(lambda: server.connections.num_open == 0)
    assert reply.count(b"HTTP/1.1 200 OK") == 2
    assert reply.count(b"data: begun") == reply.count(b"data: ended") == 2
    assert reply.endswith(b"\r\n0\r\n\r\n")


# The connection limit


def test_a_connection_too_many_closes_the_longest_idle() -> None:
    with running(max_connections=5) as server, ExitStack() as opened:
        ends = [opened.enter_context(server.connect()) for _ in range(20)]
        for end in ends[:15]:
            assert read_all(end) == b""
        assert server.connections.num_open == 5
        assert server.get() == 200


def test_a_busy_connection_is_not_closed() -> None:
    whole = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(max_connections=5) as server, ExitStack() as opened:
        slow = opened.enter_context(server.connect(whole))
        wait_until(lambda: server.num_slow == 1)
        for _ in range(20):
            opened.enter_context(server.connect())
        assert server.get() == 200
        server.is_released = True
        assert slow.recv(1 << 16).startswith(b"HTTP/1.1 200 OK")


def test_if_nearly_all_are_busy_requests_get_503_but_health_is_answered() -> None:
    whole = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    with running(max_connections=5) as server, ExitStack() as opened:
        for i in range(4):
            opened.enter_context(server.connect(whole))
            wait_until(lambda i=i: server.num_slow == i + 1)  # type: ignore[misc]
        url = "http://{}:{}".format(*server.address)
        reply = httpx.get(f"{url}/v1/models", timeout=PATIENCE)
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "too_many_connections"
        assert (reply.headers["retry-after"], reply.headers["connection"]) == ("1", "close")
        assert server.get() == server.get("/metrics") == 200
        server.is_released = True
        wait_until(lambda: server.get("/v1/models") == 200)


def test_a_client_that_disconnects_no_longer_counts() -> None:
    whole = b"GET /slow HTTP/1.1\r\nHost: x\r\n\r\n"
    with running() as server:
        with server.connect(whole), server.connect():
            wait_until(lambda: server.num_slow == 1)
            wait_until(lambda: server.connections.num_open == 2)
        wait_until(lambda: server.connections.num_open == 0)
        server.is_released = True
        assert server.get("/slow") == 200
        wait_until(lambda: server.connections.num_open == 0)


def test_the_limit_follows_the_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def given(num_files: int) -> tuple[int, int]:
        monkeypatch.setattr(resource, "getrlimit", lambda which: (num_files, num_files))
        return default_limits()

    for num_files in (64, 200, 1024, 65536):
        limit, burst = given(num_files)
        assert limit >= 2
        assert limit + 2 * burst <= num_files - 24, num_files
    assert given(1024)[0] >= 700
    assert given(resource.RLIM_INFINITY)[0] > 100_000
    assert given(16)[0] >= 2


def test_more_connections_than_files_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "tiny:llama", "--port", "0", "--max-connections", "9999999"]) == 2
    assert "max_connections=9999999" in capsys.readouterr().err


def test_few_files_and_many_idle_connections(tmp_path: Path) -> None:
    """230 silent connections go to a server that may open 200 files."""
    words = ["tiny:llama", "--backend", "eager", "--receive-timeout", "600"]
    server = Server(words, tmp_path / "log", num_files=200)
    host, port = server.url.removeprefix("http://").split(":")
    try:
        with ExitStack() as opened:
            for _ in range(230):
                address = host, int(port)
                opened.enter_context(socket.create_connection(address, timeout=PATIENCE))
            assert httpx.get(f"{server.url}/health", timeout=PATIENCE).status_code == 200
        assert server.end() == 0
    finally:
        server.kill()
    log = server.log.read_text()
    assert "closing the one that is idle longest" in log
    assert len(log) < 20_000, log


# The log


def test_repeated_lines_are_counted() -> None:
    clock = 0.0
    repeats = Repeats(10.0, now=lambda: clock)

    def said(text: str, *args: object) -> str | None:
        record = logging.LogRecord("asyncio", logging.ERROR, "", 0, text, args, None)
        return record.getMessage() if repeats.filter(record) else None

    assert said("no %s", "files") == "no files"
    assert said("no %s", "memory") == "no memory"
    assert [said("no files") for _ in range(1000)] == [None] * 1000
    clock = 11.0
    assert said("no files") == "no files (repeated 1000 times since)"
    assert said("no files") is None
    clock = 30.0
    assert said("no memory") == "no memory"
    assert said("no files") == "no files (repeated 1 times since)"
    for i in range(10_000):
        said(f"{i}")
    assert len(repeats._seen) < 1000


# Shutdown


def test_while_it_drains_new_requests_get_503(tmp_path: Path) -> None:
    """This holds on new connections and on old ones, until the running requests have finished."""
    words = ["tiny:llama", "--backend", "eager", "--max-num-seqs", "1", "--grace", "120"]
    server = Server(words, tmp_path / "log")
    body = {"model": "tiny:llama", "prompt": "x", "max_tokens": 3}
    url = f"{server.url}/v1/completions"
    try:
        with httpx.Client(timeout=PATIENCE) as kept:
            assert kept.post(url, json=body).status_code == 200
            running = iter(
                server.client().completions.create(
                    model="tiny:llama", prompt="x", max_tokens=900, n=4, stream=True,
                    extra_body={"ignore_eos": True},
                )
            )  # fmt: skip
            next(running)
            server.process.send_signal(signal.SIGTERM)
            wait_until(lambda: httpx.get(f"{server.url}/health").status_code == 503)
            assert httpx.get(f"{server.url}/health").json()["status"] == "stopping"
            for reply in (httpx.post(url, json=body, timeout=PATIENCE), kept.post(url, json=body)):
                assert reply.status_code == 503
                assert "accepts no more requests" in reply.json()["error"]["message"]
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.headers["connection"] == "close"
            ends = [chunk.choices[0].finish_reason for chunk in running]
        assert ends.count("length") == 4
        assert server.process.wait(PATIENCE) == 0
    finally:
        server.kill()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
    assert "Traceback" not in server.log.read_text()
