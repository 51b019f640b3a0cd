"""The engine in its own process: its answers, cancelling, refusals, death, restarts, the end."""

import asyncio
import gc
import json
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import Any

import pytest
from served import SETTINGS

from slotzero import LLM, SamplingParams
from slotzero.certify.start import start_engine
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import (
    CapacityError,
    ConfigError,
    EngineDiedError,
    EngineUnavailableError,
    RankLostError,
    RequestRefusedError,
)
from slotzero.executor.results import Results
from slotzero.grammars.grammar import Grammar
from slotzero.server import client as client_module
from slotzero.server import process
from slotzero.server.client import EngineClient
from slotzero.server.messages import (
    Add,
    Cancel,
    Failed,
    Frames,
    FromEngine,
    Progress,
    Refused,
    Stats,
    TokenDelta,
)
from slotzero.server.share import WHOLE
from slotzero.server.stream import Stream

LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": None}
STAGES = ["kernels", "weights", "recording"]
SOON = 20.0  # seconds: a busy machine is slow, and nothing here may hang


@pytest.fixture(scope="module", autouse=True)
def _without_gpu() -> Iterator[None]:
    """As in conftest.py, for the processes that are started here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(256) for _ in range(length)]


def greedy(max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens} | more


async def collect(stream: Stream) -> list[TokenDelta]:
    async with asyncio.timeout(SOON), aclosing(stream):
        return [grown async for grown in stream]


async def tokens_of(stream: Stream) -> list[int]:
    return [token for grown in await collect(stream) for token in grown.token_ids]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(SOON):
        while not condition():
            await asyncio.sleep(0.01)


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(**SETTINGS)


def expected_of(offline: LLM, prompt: list[int], params: dict[str, Any]) -> list[int]:
    wanted = SamplingParams(**params)
    return offline.generate(prompt, wanted, use_tqdm=False)[0].outputs[0].token_ids


class Served:
    """One client whose engine serves many tests, in a loop that runs while a test does."""

    def __init__(self) -> None:
        self.runner = asyncio.Runner()
        self.client = EngineClient(SETTINGS)
        self.run(self.client.start())
        assert self.client.state == "loading"

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(work)

    def ask(self, prompt: list[int], params: dict[str, Any]) -> list[TokenDelta]:
        async def asked() -> list[TokenDelta]:
            return await collect(self.client.submit("a", prompt, params))

        return self.run(asked())


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    made = Served()
    made.run(made.client.ready(SOON))
    yield made
    pid = made.client.pid
    made.run(made.client.stop())
    made.runner.close()
    assert pid is not None
    assert not is_alive(pid)


async def is_empty(client: EngineClient) -> None:
    """Nobody runs or waits, and pages belong to nobody or to the cache."""
    await until(lambda: client.num_open == 0)
    assert client.num_waiting == 0
    old = client.stats

    def is_idle() -> bool:
        stats = client.stats
        if stats is None or stats is old:
            return False
        return stats.running == stats.waiting == stats.pages_used == 0

    await until(is_idle)


# Answers

SEEDED = {"temperature": 0.9, "top_k": 50, "seed": 7, "max_tokens": 20, "ignore_eos": True}


@pytest.mark.parametrize(
    "params",
    [
        greedy(20),
        SEEDED,
        SEEDED | {"logit_bias": {5: 3.0, 9: -50.0}, "repetition_penalty": 1.2},
        {"temperature": 1.0, "seed": 3, "max_tokens": 60, "logit_bias": {257: 3.0}},
        greedy(30, stop_token_ids=list(range(40, 56))),
    ],
)
def test_tokens_are_those_of_the_offline_engine(
    served: Served, offline: LLM, params: dict[str, Any]
) -> None:
    prompt = prompt_of(20)
    wanted = offline.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    grown = served.ask(prompt, params)
    assert [token for part in grown for token in part.token_ids] == wanted.token_ids
    assert (grown[-1].finish_reason, grown[-1].stop_reason) == (
        wanted.finish_reason,
        wanted.stop_reason,
    )
    assert all(part.finish_reason is None for part in grown[:-1])
    assert {part.id for part in grown} == {"a"}
    assert not any(part.logprobs for part in grown)


@pytest.mark.parametrize("count", [0, 3, 20])
def test_logprobs_cross(served: Served, offline: LLM, count: int) -> None:
    prompt, params = prompt_of(11), greedy(6, logprobs=count)
    output = offline.generate(prompt, SamplingParams(**params), use_tqdm=False)[0].outputs[0]
    grown = served.ask(prompt, params)
    rows = [row for part in grown for row in part.logprobs]
    assert output.logprobs is not None
    assert len(rows) == len(output.token_ids) == 6
    for row, token, by_id in zip(rows, output.token_ids, output.logprobs, strict=True):
        assert len(row.top_ids) == len(row.top_values) == count
        assert row.chosen == pytest.approx(by_id[token].logprob, abs=1e-5)
        for top, value in zip(row.top_ids, row.top_values, strict=True):
            assert value == pytest.approx(by_id[top].logprob, abs=1e-5)


def test_fifty_at_once(served: Served, offline: LLM) -> None:
    rng = random.Random(5)
    asks = [
        (prompt_of(rng.randint(1, 60), seed=i), SEEDED | {"seed": i, "max_tokens": 1 + i % 12})
        for i in range(50)
    ]

    async def ask_all() -> list[list[int]]:
        streams = [served.client.submit(f"{i}", *ask) for i, ask in enumerate(asks)]
        assert served.client.num_waiting == served.client.num_open == 50
        return await asyncio.gather(*map(tokens_of, streams))

    answers = served.run(ask_all())
    assert answers == [expected_of(offline, *ask) for ask in asks]
    served.run(is_empty(served.client))


def test_a_prompt_that_is_known_says_so(served: Served) -> None:
    prompt = prompt_of(50, seed=77)
    first = served.ask(prompt, greedy())
    second = served.ask(prompt, greedy())
    assert [part.num_cached for part in first] == [0] * 8
    assert [part.num_cached for part in second] == [48] * 8


def test_a_slow_reader_holds_up_nobody(served: Served, offline: LLM) -> None:
    slow_ask, quick_ask = (prompt_of(9), greedy(100)), (prompt_of(12), greedy(10))

    async def ask() -> tuple[list[int], list[int]]:
        slow = served.client.submit("slow", *slow_ask)
        quick = await tokens_of(served.client.submit("quick", *quick_ask))
        await until(lambda: served.client.num_open == 0)  # it is done before anybody reads it
        return await tokens_of(slow), quick

    slow, quick = served.run(ask())
    assert slow == expected_of(offline, *slow_ask)
    assert quick == expected_of(offline, *quick_ask)


def test_one_id_used_twice_is_two_requests(served: Served, offline: LLM) -> None:
    """At once, and again while the cancelled one is still in flight."""
    asks = [(prompt_of(n), greedy(12)) for n in (5, 9, 13)]

    async def ask() -> list[list[int]]:
        doomed = served.client.submit("same", *asks[2])
        await anext(doomed)
        await doomed.aclose()
        return await asyncio.gather(
            *(tokens_of(served.client.submit("same", *ask)) for ask in asks)
        )

    assert served.run(ask()) == [expected_of(offline, *ask) for ask in asks]


def test_info_and_stats_tell_what_the_engine_is(served: Served, offline: LLM) -> None:
    info, client = served.client.info, served.client
    assert info["limits"]["max_model_len"] == offline.engine.limits.max_model_len
    assert info["limits"]["num_pages"] == offline.engine.limits.num_pages
    assert info["vocab_size"] == 259
    assert info["eos_token_ids"] == [257]
    assert {size["key"] for size in info["sizes"]["decode"]} >= {"decode[1]", "decode[4]"}
    assert info["versions"]["slotzero"]
    assert info["sanitize"] == "off"

    async def watch() -> list[Stats]:
        seen = []
        async with asyncio.timeout(SOON), aclosing(client.subscribe()) as stats:
            async for one in stats:
                if not seen:
                    asked = asyncio.create_task(
                        tokens_of(client.submit("a", prompt_of(40, seed=3), greedy(30)))
                    )
                seen.append(one)
                if one.generated_tokens - seen[0].generated_tokens == 30 and not one.running:
                    break
        await asked
        return seen

    served.run(is_empty(client))
    seen = served.run(watch())
    first, last = seen[0], seen[-1]
    assert last.prompt_tokens - first.prompt_tokens == 40
    assert last.prefix_asked_tokens - first.prefix_asked_tokens == 40
    assert last.steps - first.steps == 30
    assert last.real_tokens["decode"] - first.real_tokens["decode"] == 29
    assert (last.slots, last.pages) == (4, info["limits"]["num_pages"]["full"] - 1)
    assert last.eager["eager backend"] > 0
    assert (last.failed_sizes, last.replays, last.violations) == ({}, {}, 0)


# Cancelling


async def by_aclose(stream: Stream) -> None:
    await anext(stream)
    await stream.aclose()
    await stream.aclose()  # twice is once


async def by_aclose_before_it_is_read(stream: Stream) -> None:
    await stream.aclose()


async def by_leaving_the_loop(stream: Stream) -> None:
    async with aclosing(stream):
        async for _ in stream:
            break


async def by_a_cancelled_task(stream: Stream) -> None:
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_a_deadline(stream: Stream) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            async for _ in stream:
                pass


async def from_another_task(stream: Stream) -> None:
    task = asyncio.create_task(collect(stream))
    await asyncio.sleep(0.02)
    await stream.aclose()
    assert await task is not None


@pytest.mark.parametrize(
    "how",
    [
        by_aclose,
        by_aclose_before_it_is_read,
        by_leaving_the_loop,
        by_a_cancelled_task,
        by_a_deadline,
        from_another_task,
    ],
)
def test_cancelling_frees_everything_and_disturbs_nobody(
    served: Served, offline: LLM, how: Callable[[Stream], Awaitable[None]]
) -> None:
    neighbour = (prompt_of(30, seed=8), greedy(40))

    async def cancel() -> list[int]:
        kept = asyncio.create_task(tokens_of(served.client.submit("kept", *neighbour)))
        stream = served.client.submit("long", prompt_of(40), LONG)
        await how(stream)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        tokens = await kept
        await is_empty(served.client)
        return tokens

    assert served.run(cancel()) == expected_of(offline, *neighbour)


def test_a_stream_that_is_forgotten_is_cancelled(served: Served) -> None:
    async def forget() -> None:
        for begins in (False, True):
            stream = served.client.submit("long", prompt_of(40), LONG)
            if begins:
                await anext(stream)
            del stream
            gc.collect()
            await is_empty(served.client)

    served.run(forget())


def test_one_that_waits_is_cancelled_too(served: Served) -> None:
    async def cancel() -> None:
        running = [served.client.submit(f"{i}", prompt_of(5, seed=i), LONG) for i in range(4)]
        for stream in running:
            await anext(stream)
        waiting = served.client.submit("waits", prompt_of(6), LONG)
        assert served.client.num_waiting == 1
        await until(lambda: served.client.stats and served.client.stats.waiting == 1)
        await waiting.aclose()
        assert served.client.num_waiting == 0
        await until(lambda: served.client.stats and served.client.stats.waiting == 0)
        for stream in running:
            await stream.aclose()
        await is_empty(served.client)

    served.run(cancel())


# Refusals


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 100_000, {}, "the prompt has 100000 tokens and the context holds"),
        ([1, 259], {}, "prompt: token id 259 is not in the vocabulary"),
        ([1], {"temperature": -1}, "temperature=-1: must be"),
        ([1], {"top_p": "much"}, "top_p='much': must be a number"),
        ([1], {"logit_bias": [1, 2]}, "logit_bias=[1, 2]: keys are token ids"),
        ([1], {"logit_bias": {"x": 2}}, "logit_bias="),
        ([1], {"colour": "red"}, "'colour' is not a sampling parameter"),
        ([1], {"n": 2}, "'n' is not a sampling parameter"),
        ([1], {"stop": "x"}, "'stop' is not a sampling parameter"),
        ([1], {"detokenize": True}, "'detokenize' is not a sampling parameter"),
        # these cannot even cross
        (["a"], {}, "prompt: Expected `int`, got `str`"),
        ([True], {}, "prompt: Expected `int`, got `bool`"),
        ([2**70], {}, "prompt: "),
        ("text", {}, "prompt: Expected `array`, got `str`"),
        ([1], {"top_k": 3, "seed": 2**70}, "seed: "),
        ([1], {"logit_bias": object()}, "logit_bias: "),
        ([1], {"colour": "\ud800"}, "colour: "),
    ],
)
def test_a_refused_request_disturbs_nobody(
    served: Served, offline: LLM, prompt: Any, params: dict[str, Any], message: str
) -> None:
    neighbour = (prompt_of(15), greedy(10))

    async def ask() -> list[int]:
        kept = asyncio.create_task(tokens_of(served.client.submit("kept", *neighbour)))
        stream = served.client.submit("bad", prompt, params)
        with pytest.raises(RequestRefusedError) as caught:
            await collect(stream)
        assert caught.value.error == "RequestError"
        assert caught.value.message.startswith(message)
        assert str(caught.value) == caught.value.message
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        assert served.client.num_waiting <= 1
        return await kept

    assert served.run(ask()) == expected_of(offline, *neighbour)
    assert served.client.state == "ready"


def test_what_is_too_large_for_a_frame_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_FRAME", 100)

    async def ask() -> None:
        with pytest.raises(
            RequestRefusedError, match=r"prompt: a request of .* bytes is too large"
        ):
            await collect(served.client.submit("bad", [200] * 100, {}))

    served.run(ask())


def test_signals_are_not_for_the_engine(served: Served, offline: LLM) -> None:
    prompt, params = prompt_of(7), greedy(60)

    async def ask() -> list[int]:
        assert served.client.pid is not None
        stream = served.client.submit("a", prompt, params)
        first = await anext(stream)
        os.kill(served.client.pid, signal.SIGINT)
        os.kill(served.client.pid, signal.SIGTERM)
        return first.token_ids + await tokens_of(stream)

    assert served.run(ask()) == expected_of(offline, prompt, params)
    assert served.client.state == "ready"


def test_draining_finishes_what_it_can_in_time(
    served: Served, offline: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, prompt, params = served.client, prompt_of(10), greedy(30)
    monkeypatch.setattr(client, "is_draining", False)  # and so it is again for the next test

    async def drain() -> list[int]:
        short = asyncio.create_task(tokens_of(client.submit("short", prompt, params)))
        longer = [client.submit("long", prompt_of(8, seed=i), LONG) for i in range(80)]
        await anext(longer[0])
        draining = asyncio.create_task(client.drain(2.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailableError, match="takes no more requests"):
            client.submit("late", prompt, params)
        assert client.is_draining
        await draining
        assert short.done()
        for stream in longer[-20:]:
            with pytest.raises(EngineUnavailableError, match="the server is stopping"):
                await collect(stream)
        await is_empty(client)
        await client.drain(0)  # nobody is left
        return await short

    assert served.run(drain()) == expected_of(offline, prompt, params)


# Death


def test_a_killed_engine_is_restarted_and_in_the_end_given_up(offline: LLM) -> None:
    prompt, params = prompt_of(10), greedy(20)
    expected = expected_of(offline, prompt, params)
    client = EngineClient(SETTINGS, restarts=1)

    async def end_of(stream: Stream) -> str:
        try:
            return (await collect(stream))[-1].finish_reason or ""
        except EngineDiedError as error:
            assert "the engine's process ended" in str(error)
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


def test_an_engine_says_how_far_loading_is() -> None:
    """Weights from nothing to all, then every size that is recorded."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told = process.LoadingReport(process.Outbox(ours))
        engine = start_engine(
            EngineConfig(**SETTINGS | {"backend": "cpu", "max_num_seqs": 2}), told=told
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


def test_an_engine_that_cannot_start_says_why() -> None:
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


def test_an_engine_that_is_stopped_while_it_loads_is_gone() -> None:
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
    assert time.monotonic() - start < client_module.PATIENCE


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
            assert parent.stdout.readline() == "False\n"  # the HTTP process does not know torch
            assert parent.stdout.readline() == "token\n"
        parent.kill()
    deadline = time.monotonic() + SOON
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


# The supervisor, with processes that are no engines


class Fakes:
    """Runs `code` in place of the engine; fd 0 of sys.argv is its end of the socket."""

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


def test_noise_on_the_socket_ends_that_life(monkeypatch: pytest.MonkeyPatch) -> None:
    send = "import os, sys, time; os.write(int(sys.argv[1]), {!r}); time.sleep(60)"
    monkeypatch.setattr(client_module, "PATIENCE", 0.2)
    for noise in (b"\xff" * 8, b"\x02\x00\x00\x00\x91\xa1"):
        Fakes(send.format(noise), monkeypatch)
        why = asyncio.run(fail(EngineClient({}, restarts=0)))
        assert why.endswith("last: signal 9")  # it did not end when its socket was closed


def test_an_engine_that_cannot_be_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert "/nowhere/python" in asyncio.run(fail(EngineClient(SETTINGS)))


def test_one_that_is_lost_before_it_has_a_socket_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And one that cannot start is not."""
    monkeypatch.setattr(client_module, "FIRST_PAUSE", 0.01)
    errors = [RankLostError("its machine is gone"), ConfigError("no such machine")]

    async def launch(*_: object) -> Any:
        raise errors.pop(0)

    client = EngineClient({}, launch=launch)
    assert asyncio.run(fail(client)) == "no such machine"
    assert (client.exit_code, client.generation, errors) == (2, 1, [])


def test_starting_twice_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    Fakes("import time; time.sleep(60)", monkeypatch)
    monkeypatch.setattr(client_module, "PATIENCE", 0.1)

    async def live() -> None:
        client = EngineClient({})
        await client.stop()  # nothing to stop
        await client.start()
        with pytest.raises(RuntimeError, match="started already"):
            await client.start()
        await client.drain(0)
        await client.stop()
        await client.stop()
        with pytest.raises(EngineUnavailableError):
            await client.ready(1)

    asyncio.run(live())


# The loop of the engine's process, in this one


class Desk:
    """An EngineLoop and the other end of its socket."""

    def __init__(self, **more: Any) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.theirs.setblocking(False)
        self.engine = start_engine(EngineConfig(**SETTINGS | more))
        self.inbox: process.Inbox = queue.SimpleQueue()
        self.outbox = process.Outbox(self.ours)
        self.loop = process.EngineLoop(self.engine, self.inbox, self.outbox)
        self._frames = Frames(FromEngine)

    def turn(self, *messages: Add | Cancel) -> list[Any]:
        for message in messages:
            self.inbox.put(message)
        self.loop.turn()
        return self.read()

    def read(self) -> list[Any]:
        messages: list[Any] = []
        try:
            while data := self.theirs.recv(1 << 20):
                messages += self._frames.feed(data)
        except BlockingIOError:
            pass
        return messages

    def fail_next(self, *errors: Exception) -> None:
        run, left = self.engine.worker.run, list(errors)

        def fragile(step: Any) -> Any:
            if left:
                raise left.pop(0)
            return run(step)

        self.engine.worker.run = fragile  # type: ignore[method-assign]

    def finish(self) -> list[Any]:
        messages = []
        while self.engine.has_work:
            messages += self.turn()
        return messages


MakeDesk = Callable[..., Desk]


@pytest.fixture
def make_desk() -> Iterator[MakeDesk]:
    with ExitStack() as sockets:

        def make(**more: Any) -> Desk:
            desk = Desk(**more)
            sockets.enter_context(desk.ours)
            sockets.enter_context(desk.theirs)
            return desk

        yield make


def kinds(messages: list[Any], kind: type) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


def test_whoever_comes_does_not_stop_those_who_are_there(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it takes to add a request, a step comes between."""
    monkeypatch.setattr(process, "MOST_RECEIVING", 0.0)
    desk = make_desk()
    desk.turn(Add("a", prompt_of(5), dict(LONG)))
    steps = desk.engine.num_steps
    desk.turn(*(Add(f"{i}", prompt_of(5), dict(LONG)) for i in range(3)))
    assert (desk.engine.num_steps, desk.inbox.qsize()) == (steps + 1, 2)
    desk.turn()
    desk.turn()
    assert (desk.engine.num_steps, desk.inbox.qsize()) == (steps + 3, 0)


def test_a_cancelled_request_leaves_its_slot_within_two_steps(make_desk: MakeDesk) -> None:
    desk = make_desk()
    desk.turn(Add("a", prompt_of(40), dict(LONG)))
    for _ in range(3):
        desk.turn()
    steps = desk.engine.num_steps
    after = desk.turn(Cancel("a"), Cancel("nobody"))
    assert desk.engine.lanes.num_running == 0
    assert desk.engine.num_steps <= steps + 2
    assert desk.engine.lanes[0].slots.num_free == 4
    assert not kinds(after + desk.finish(), Progress)
    desk.engine.check()


def test_a_step_that_fails_is_told_to_those_who_lost_and_the_rest_goes_on(
    make_desk: MakeDesk,
) -> None:
    desk = make_desk(max_num_seqs=2)
    asks = [Add(f"{i}", prompt_of(20, seed=i), greedy(5)) for i in range(4)]
    desk.turn(*asks)
    desk.turn()
    desk.fail_next(RuntimeError("the device"))
    messages = desk.turn()
    assert kinds(messages, Failed) == [Failed("RuntimeError", "the device")]
    assert kinds(messages, Refused) == [
        Refused(f"{i}", "RuntimeError", "the device") for i in range(2)
    ]
    ends = [
        (grown.id, grown.finish_reason)
        for progress in kinds(desk.finish(), Progress)
        for grown in progress.grown
        if grown.finish_reason
    ]
    assert ends == [("2", "length"), ("3", "length")]
    assert desk.engine._handles == {}
    desk.engine.check()


def test_who_grew_unseen_in_a_failed_step_is_refused(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens are there and their log probabilities are not: the answer would have a hole."""

    def broken(*_: object) -> None:
        raise RuntimeError("no such row")

    monkeypatch.setattr(Results, "logprobs", broken)
    messages = make_desk().turn(Add("a", prompt_of(5), greedy(1, logprobs=1)))
    assert kinds(messages, Refused) == [Refused("a", "RuntimeError", "no such row")]
    assert not kinds(messages, Progress)


def test_a_grammar_that_fails_is_told_as_a_refusal_after_its_tokens(
    make_desk: MakeDesk, caplog: pytest.LogCaptureFixture
) -> None:
    """It is nobody else's failure, and none of the engine."""
    pytest.importorskip("llguidance")
    desk = make_desk()
    endless = greedy(20, structured_outputs={"regex": "(a|b){4}c{1000000}"})
    messages = desk.turn(Add("bad", prompt_of(5), endless), Add("good", prompt_of(5), greedy(30)))
    messages += desk.finish()
    (refused,) = kinds(messages, Refused)
    assert (refused.id, refused.error) == ("bad", "RequestError")
    assert re.match(r"structured_outputs: regex: .*too many expressions", refused.message)
    assert [record.getMessage() for record in caplog.records] == [
        f"a request was given up: {refused.message}"
    ]
    before = messages[: messages.index(refused)]
    bad = [g for p in kinds(before, Progress) for g in p.grown if g.id == "bad"]
    assert len(bad) == 5 and bad[-1].token_ids == [ord("c")]
    assert not any(grown.finish_reason for grown in bad)
    assert not kinds(messages, Failed)
    good = [g for p in kinds(messages, Progress) for g in p.grown if g.id == "good"]
    assert good[-1].finish_reason == "length"
    assert desk.loop._asked == desk.engine._handles == {}
    desk.engine.check()


def test_a_grammar_that_cannot_be_compiled_is_refused_and_holds_nobody_up(
    make_desk: MakeDesk, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("llguidance")
    desk = make_desk(grammar_timeout=2.0)
    slow = {"json_schema": {"type": "integer", "multipleOf": 99_999_989}}
    messages = desk.turn(
        Add("slow", prompt_of(5), greedy(20, structured_outputs=slow)),
        Add("wrong", prompt_of(5), greedy(20, structured_outputs={"regex": "("})),
        Add("gone", prompt_of(5), greedy(20, structured_outputs={"regex": "a{9}"})),
        Add("good", prompt_of(5), greedy(30)),
    )
    messages += desk.turn(Cancel("gone"))
    while not any(g.finish_reason for p in kinds(messages, Progress) for g in p.grown):
        messages += desk.turn()
    assert "slow" not in [refused.id for refused in kinds(messages, Refused)]
    messages += desk.finish()
    told = {refused.id: refused.message for refused in kinds(messages, Refused)}
    assert told.keys() == {"slow", "wrong"}
    assert told["wrong"] == "structured_outputs: regex: unclosed group"
    limits = "compiling it took more than 2 s", "it needs more than 256 MiB"
    assert any(limit in told["slow"] for limit in limits)  # a fast machine meets the second first
    assert {g.id for p in kinds(messages, Progress) for g in p.grown} == {"good"}
    assert kinds(messages, Stats)[-1].prompt_tokens <= 5
    assert not caplog.records and not kinds(messages, Failed)
    assert desk.loop._asked == desk.engine._handles == {}


def test_broken_logits_give_a_structured_request_up_without_a_word(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(Grammar, "advance", lambda *_: False)
    desk = make_desk()
    asked = greedy(20, structured_outputs={"regex": "[a-z]+"})
    messages = desk.turn(Add("a", prompt_of(5), asked)) + desk.finish()
    assert not kinds(messages, Refused)
    assert kinds(messages, Progress)[-1].grown[0].finish_reason == "abort"


def test_two_failed_steps_in_a_row_are_the_end(make_desk: MakeDesk) -> None:
    desk = make_desk(max_num_seqs=1)
    desk.fail_next(RuntimeError("CUDA error"), RuntimeError("CUDA error, still"))
    for i in range(3):
        desk.inbox.put(Add(f"{i}", prompt_of(5), greedy(2)))
    assert desk.loop.run() == 1
    messages = desk.read()
    assert [failed.message for failed in kinds(messages, Failed)] == [
        "CUDA error",
        "CUDA error, still",
    ]
    assert [refused.id for refused in kinds(messages, Refused)] == ["0", "1"]


def test_out_of_memory_is_not_the_end_of_the_device(make_desk: MakeDesk) -> None:
    desk = make_desk(max_num_seqs=1)
    desk.fail_next(*[CapacityError("out of GPU memory")] * 3)
    messages = desk.turn(*(Add(f"{i}", prompt_of(5), greedy(2)) for i in range(4)))
    messages += desk.finish()
    assert [refused.error for refused in kinds(messages, Refused)] == ["CapacityError"] * 3
    assert desk.loop._num_failures == 0
    assert kinds(messages, Progress)[-1].grown[0].finish_reason == "length"


def test_reports_are_neither_too_many_nor_too_few(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    desk = make_desk()
    assert kinds(desk.turn(), Stats)[0].running == 0
    desk.inbox.put(Add("a", prompt_of(5), dict(LONG)))
    for turn in range(100):  # ten seconds of steps of 0.1 s
        now += 0.1
        assert len(kinds(desk.turn(), Stats)) == ((turn + 1) % 3 == 0)
    desk.turn(Cancel("a"))
    desk.finish()
    now += 0.25
    (last,) = kinds(desk.turn(), Stats)
    assert (last.running, last.pages_used) == (0, 0)
    now += 1.9
    monkeypatch.setattr(process, "LATEST", 1.0)
    assert kinds(desk.turn(), Stats) == [last]  # nothing changed: only a sign of life


def test_an_idle_engine_waits_and_wakes(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LATEST", 0.5)
    desk = make_desk()
    desk.turn()
    start, used = time.monotonic(), time.process_time()
    assert len(desk.turn()) == 1
    assert time.monotonic() - start > 0.4
    assert time.process_time() - used < 0.2
    monkeypatch.setattr(process, "LATEST", 60.0)
    timer = threading.Timer(0.1, desk.inbox.put, [Add("a", prompt_of(5), greedy(2))])
    timer.start()
    assert [type(message) for message in desk.turn()] == [Progress]
    timer.join()
    assert desk.engine.has_work
    assert kinds(desk.finish(), Progress)


def test_a_reader_that_sleeps_stops_no_step(make_desk: MakeDesk) -> None:
    """Far more than a socket holds, and all of it arrives in order."""
    desk = make_desk(max_num_seqs=1)
    desk.inbox.put(Add("a" * 10_000, prompt_of(5), greedy(100, logprobs=20)))
    desk.loop.turn()
    while desk.engine.has_work:
        desk.loop.turn()
    assert len(desk.outbox._unsent) > 0
    messages = desk.read()
    while desk.outbox._unsent:
        desk.outbox.push()
        messages += desk.read()
    grown = [part for progress in kinds(messages, Progress) for part in progress.grown]
    assert len(grown) == 100
    assert all(len(part.token_ids) == len(part.logprobs) == 1 for part in grown)


def test_settings_are_refused_by_name(make_desk: MakeDesk) -> None:
    desk = make_desk()
    for settings, message in (
        ({"colour": 1}, "the engine has no setting 'colour'"),
        ({"page_size": 3}, "page_size is a power of two, got 3"),
    ):
        with pytest.raises(ConfigError, match=message):
            process._start(settings, WHOLE, desk.outbox)
        assert desk.read() == [Failed("ConfigError", message)]


def test_an_unforeseen_error_at_the_start_is_told(
    make_desk: MakeDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk = make_desk()

    def broken(config: EngineConfig, told: Any) -> Engine:
        raise ZeroDivisionError

    monkeypatch.setattr("slotzero.certify.start.Engine", broken)
    with pytest.raises(client_module.SlotzeroError):
        process._start(SETTINGS, WHOLE, desk.outbox)
    assert desk.read() == [Failed("ZeroDivisionError", "ZeroDivisionError")]


def test_stats_follow_the_sanitizer_and_what_could_not_be_recorded(make_desk: MakeDesk) -> None:
    desk = make_desk(sanitize="full")
    desk.turn(Add("a", prompt_of(5), greedy(3)))
    desk.finish()
    runner = desk.engine.worker.decode
    key = next(iter(runner.records))
    runner.records[key] = replace(runner.records[key], failure="no room")
    stats = process.stats_of(desk.engine, 1, 2)
    assert stats.steps_watched == 3
    assert stats.failed_sizes == {str(key): "no room"}
    assert (stats.prompt_tokens, stats.generated_tokens) == (1, 2)
