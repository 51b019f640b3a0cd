"""Tests of `slotzero bench serve`: requests and their timing, statistics, and one real run."""

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import aclosing, closing, contextmanager
from typing import Any

import pytest
from served import KEY, PATIENCE, tiny_server

from slotzero.bench import serve
from slotzero.bench.http import HttpError, Site
from slotzero.bench.serve import Fate, Goal, RequestLoad, arrivals, run_loads, sharegpt, sheets
from slotzero.cli import main as cli
from slotzero.errors import ConfigError

pytestmark = pytest.mark.slow

GOAL = Goal(first_token=1.0, per_token=0.1)
INFO: Any = {"state": "ready", "failure": None, "engine": {"vocab_size": 300}}


class FakeSite:
    """A server that answers once a number of requests have arrived; one chunk is three tokens."""

    name = "test:80"

    def __init__(self, waits_for: int = 0, info: Mapping[str, Any] = INFO) -> None:
        self._waits_for = waits_for
        self._all_asked = asyncio.Event()
        self._info = info
        self.asked: list[dict[str, Any]] = []
        self.asked_at: list[float] = []

    async def get(self, path: str) -> Any:
        return {"/server_info": self._info, "/v1/models": {"data": [{"id": "fake"}]}}[path]

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        self.asked.append(body)
        self.asked_at.append(time.perf_counter())
        if len(self.asked) >= self._waits_for:
            self._all_asked.set()
        async with asyncio.timeout(PATIENCE):
            await self._all_asked.wait()
        for _ in range(body["max_tokens"] // 3):
            yield {"choices": [{"text": "abc"}]}
        if len(self.asked) == 3:
            raise HttpError(self.name, 429, '{"error": {"message": "too many"}}')
        yield {"choices": [], "usage": {"completion_tokens": body["max_tokens"]}}

    async def aclose(self) -> None: ...


def run(site: Any, *loads: RequestLoad) -> Any:
    seen: list[int] = []
    report = asyncio.run(run_loads(site, lambda info: loads, GOAL, seen.append))
    assert sum(seen) == sum(len(load.shapes) for load in loads)
    return report


# Requests


def test_lengths_are_many_short_and_a_few_long() -> None:
    shapes = sharegpt(2000, 0, 4096)
    assert shapes == sharegpt(2000, 0, 4096)
    assert shapes[:10] == sharegpt(10, 0, 4096)
    assert shapes != sharegpt(2000, 1, 4096)
    for lengths in zip(*shapes, strict=True):
        assert min(lengths) >= 1
        assert max(lengths) == serve.LONGEST
        assert 120 < sorted(lengths)[1000] < 180  # e**5 is 148
        assert sum(lengths) / 2000 > 200


@pytest.mark.parametrize("longest", [1, 2, 64, 513])
def test_lengths_fit_the_context(longest: int) -> None:
    shapes = sharegpt(200, 3, longest)
    assert all(min(shape) >= 1 for shape in shapes)
    assert longest == 1 or all(sum(shape) <= longest for shape in shapes)


def test_arrivals_are_as_many_a_second_as_asked_for() -> None:
    load = RequestLoad(8.0, [(1, 1)] * 4000)
    moments = arrivals(load)
    assert moments == arrivals(load)
    assert moments[0] == 0.0
    assert moments == sorted(moments)
    gaps = [b - a for a, b in itertools.pairwise(moments)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.1)
    assert sum(gap < 1 / 8 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.05)  # 1 - 1/e
    assert arrivals(RequestLoad(float("inf"), [(1, 1)] * 3)) == [0.0, 0.0, 0.0]


def test_a_slow_server_delays_no_request() -> None:
    """The server answers only after all requests have arrived; no request is sent before it is
    due."""
    load = RequestLoad(50.0, [(4, 6)] * 20, seed=1)
    site = FakeSite(waits_for=len(load.shapes))
    begin = time.perf_counter()
    (rate,) = run(site, load)["rates"]
    assert rate["failed"] == 0
    late = [at - begin - due for at, due in zip(site.asked_at, arrivals(load), strict=True)]
    assert min(late) >= 0


def test_the_body_of_a_request() -> None:
    site = FakeSite()
    run(site, RequestLoad(float("inf"), [(5, 6), (7, 9)], seed=2))
    assert [len(body.pop("prompt")) for body in site.asked] == [5, 7]
    assert [body.pop("max_tokens") for body in site.asked] == [6, 9]
    assert site.asked[0] == site.asked[1]
    assert site.asked[0] == {
        "model": "fake",
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


# Statistics


def test_tokens_are_counted_from_usage() -> None:
    report = run(FakeSite(), RequestLoad(float("inf"), [(5, 6), (7, 9), (2, 30), (1, 3)]))
    (rate,) = report["rates"]
    assert rate["rate"] == "inf"
    assert (rate["requests"], rate["failed"]) == (4, 1)
    assert rate["first_error"] == "test:80 answered 429: too many"
    assert rate["input_tokens"] == 15
    assert rate["output_tokens"] == 6 + 9 + 3
    assert rate["output_chunks"] == 2 + 3 + 1
    (sheet,) = sheets(report)
    assert sheet.lines[0][:3] == ("inf", "4", "1")
    assert len(sheet.lines[0]) == len(sheet.header)


def test_good_requests_meet_both_goals() -> None:
    fates = [
        Fate(0.0, [0.5, 1.0], num_tokens=6),  # 0.1 s a token: good
        Fate(2.0, [3.5, 4.0], num_tokens=51),  # late
        Fate(4.0, [4.2, 5.0], num_tokens=5),  # slow
        Fate(5.0, [5.1], num_tokens=1),  # good: it has no second token
        Fate(6.0, [6.1], num_tokens=0, error="died"),
        Fate(7.0),
    ]
    made = serve._sum_up(RequestLoad(2.0, [(1, 1)] * 6), fates, 10.0, GOAL)
    assert (made["requests"], made["failed"], made["first_error"]) == (6, 2, "died")
    assert made["requests_per_second"] == 0.4
    assert made["goodput"] == 0.2
    assert made["tokens_per_second"] == 6.3
    assert made["time_to_first_token"]["p50"] == 350.0
    assert made["time_per_token"]["p50"] == 100.0
    assert made["request_latency"]["mean"] == 1025.0


def test_if_all_fail_there_are_no_times() -> None:
    made = serve._sum_up(RequestLoad(1.0, [(1, 1)]), [Fate(0.0, error="x")], 1.0, GOAL)
    assert made["failed"] == 1
    assert made["time_to_first_token"]["p50"] is None
    report = {"model": "m", "url": "u", "rates": [made]}
    assert sheets(report)[0].lines[0][-1] == "-"


def test_an_error_in_the_middle_of_a_stream_is_a_failure() -> None:
    class Dying(FakeSite):
        async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
            yield {"choices": [{"text": "abc"}]}
            yield {"error": {"message": "the engine died"}}

    (rate,) = run(Dying(), RequestLoad(1.0, [(1, 6)]))["rates"]
    assert (rate["failed"], rate["first_error"], rate["output_tokens"]) == (1, "the engine died", 0)


# Failures


@contextmanager
def answering(reply: bytes) -> Iterator[int]:
    """Run a server that sends this reply to every client and closes; yield its port."""

    def serve_all() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with closing(connection):
                connection.recv(1 << 16)
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve_all, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


Stderr = pytest.CaptureFixture[str]


def refusal(capsys: Stderr, *words: str) -> str:
    assert cli.main(["bench", "serve", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("slotzero: error: ")
    assert captured.err.count("\n") == 1
    return captured.err


def test_no_server_there(capsys: Stderr) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    error = refusal(capsys, "--url", f"127.0.0.1:{port}")
    assert f"no server at 127.0.0.1:{port}" in error
    assert "`slotzero serve`" in error


@pytest.mark.parametrize(
    ("state", "failure", "says"),
    [
        ("loading", None, "is loading: wait until /health answers 200"),
        ("restarting", "signal 9", "is restarting: signal 9"),
    ],
)
def test_a_server_that_is_not_ready(
    capsys: Stderr, state: str, failure: str | None, says: str
) -> None:
    body = json.dumps({"state": state, "failure": failure, "engine": {}}).encode()
    with answering(b"HTTP/1.1 200 OK\r\n\r\n" + body) as port:
        assert says in refusal(capsys, "--url", f"http://127.0.0.1:{port}/v1")


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"", "does not answer with valid HTTP"),
        (b"220 mail.example.org ESMTP\r\n", "does not answer with valid HTTP"),
        (b"HTTP/1.1 401 \r\n\r\n" + b'{"error": {"message": "no API key"}}', "401: no API key"),
        (b"HTTP/1.1 404 \r\n\r\n<p>nothing here", "404: <p>nothing here"),
    ],
)
def test_another_kind_of_server_is_refused(capsys: Stderr, reply: bytes, says: str) -> None:
    with answering(reply) as port:
        assert says in refusal(capsys, "--url", f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--url", "https://127.0.0.1:1"], "give http://HOST:PORT"),
        (["--url", "http://127.0.0.1:1/elsewhere"], "give http://HOST:PORT"),
        (["--url", "http://127.0.0.1:x"], "the port is not a number"),
        (["tiny:llama"], "a model: bench serve measures a running server"),
        (["--page-size", "16"], "--page-size: bench serve measures a running server"),
    ],
)
def test_invalid_flags_are_refused(capsys: Stderr, words: list[str], says: str) -> None:
    assert says in refusal(capsys, *words)


def test_a_stream_that_is_cut_off_is_a_failure() -> None:
    reply = b'HTTP/1.1 200 \r\nTransfer-Encoding: chunked\r\n\r\n10\r\ndata: {"a": 1}\n\n\r\n'

    async def read(site: Site) -> list[Any]:
        return [event async for event in site.events("/v1/completions", {})]

    with answering(reply) as port, pytest.raises(ConfigError, match="does not answer"):
        asyncio.run(read(Site("127.0.0.1", port, {})))
    with answering(reply + b"0\r\n\r\n") as port:
        assert asyncio.run(read(Site("127.0.0.1", port, {}))) == [{"a": 1}]


# Connections


class KeepAlive:
    """A server that keeps connections open, as HTTP/1.1 does.

    After `most` answers it closes a connection without announcing it.
    """

    def __init__(self, most: int = 1000) -> None:
        self.num_accepted = self.num_answered = self.num_open = 0
        self._most = most

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_accepted += 1
        self.num_open += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            for _ in range(self._most):
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                writer.write(self._answer(head.split()[1].decode()))
                self.num_answered += 1
        self.num_open -= 1
        writer.close()

    def _answer(self, path: str) -> bytes:
        known = {"/server_info": INFO, "/v1/models": {"data": [{"id": "fake"}]}}
        if path in known:
            body = json.dumps(known[path]).encode()
            return b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        if path != "/v1/completions":
            return b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\nno"
        data = b'data: {"choices": [{"text": "a"}]}\n\n'
        data += b'data: {"choices": [], "usage": {"completion_tokens": 3}}\n\ndata: [DONE]\n\n'
        chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (len(data), data)
        return b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk


async def load(server: KeepAlive, work: Callable[[Site], Coroutine[Any, Any, Any]]) -> Any:
    async with (
        asyncio.timeout(PATIENCE),
        await asyncio.start_server(server.accept, "127.0.0.1", 0) as listening,
    ):
        made = await work(Site("127.0.0.1", listening.sockets[0].getsockname()[1], {}))
        while server.num_open:
            await asyncio.sleep(0.01)
        return made


def test_connections_are_reused() -> None:
    """One connection is enough for requests one after another, including refused ones."""
    server = KeepAlive()

    async def work(site: Site) -> None:
        assert (await site.get("/server_info")) == INFO
        for _ in range(5):
            events = [event async for event in site.events("/v1/completions", {})]
            assert len(events) == 2
            with pytest.raises(HttpError, match="404: no"):
                await site.text("/nowhere")
        await site.aclose()

    asyncio.run(load(server, work))
    assert (server.num_accepted, server.num_answered) == (1, 11)


def test_a_load_has_as_many_connections_as_requests_at_once() -> None:
    server = KeepAlive()

    async def work(site: Site) -> Any:
        loads = [RequestLoad(float("inf"), [(2, 3)] * 4)] * 5
        return await run_loads(site, lambda info: loads, GOAL, lambda more: None)

    report = asyncio.run(load(server, work))
    assert [rate["failed"] for rate in report["rates"]] == [0] * 5
    assert server.num_answered == 2 + 5 * 4
    assert server.num_accepted <= 4


def test_a_connection_that_the_server_closed_is_replaced() -> None:
    server = KeepAlive(most=2)

    async def work(site: Site) -> None:
        for _ in range(7):
            assert (await site.get("/server_info")) == INFO
        await site.aclose()

    asyncio.run(load(server, work))
    assert (server.num_accepted, server.num_answered) == (4, 7)


def test_an_abandoned_answer_closes_its_connection() -> None:
    server = KeepAlive()

    async def work(site: Site) -> None:
        async with aclosing(site.events("/v1/completions", {})) as events:
            await anext(events)
        assert (await site.get("/server_info")) == INFO
        await site.aclose()

    asyncio.run(load(server, work))
    assert server.num_accepted == 2


def test_hosts_are_written_as_in_urls() -> None:
    assert Site.at("http://[::1]:8000", None).name == "[::1]:8000"
    assert Site.at("localhost", "k") == Site("localhost", 80, {"Authorization": "Bearer k"})


# A real run


def test_a_real_run(capsys: Stderr, tmp_path_factory: pytest.TempPathFactory) -> None:
    with tiny_server(tmp_path_factory.mktemp("served")) as server:
        assert "API key" in refusal(capsys, "--url", server.url)
        words = f"--url {server.url} --api-key {KEY} --rate 40,inf"
        shape = "--num-prompts 6 --input-len 9 --output-len 5"
        assert cli.main(f"bench serve {words} {shape}".split()) == 0
        server.wait_until_idle()
    out = capsys.readouterr().out
    assert "serve of tiny at" in out
    report = json.loads(out.splitlines()[-1])
    assert report["url"] == server.url
    assert [rate["rate"] for rate in report["rates"]] == [40.0, "inf"]
    for rate in report["rates"]:
        assert (rate["requests"], rate["failed"], rate["first_error"]) == (6, 0, "")
        assert (rate["input_tokens"], rate["output_tokens"]) == (54, 30)
        assert rate["time_to_first_token"]["p50"] > 0
