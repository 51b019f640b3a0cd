"""Tests of the engine in its own process: answers, cancellation, refusals, draining."""

import asyncio
import gc
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing
from typing import Any

import pytest
from engine_process import (
    LONG,
    SOON,
    collect,
    expected_of,
    greedy,
    is_alive,
    prompt_of,
    tokens_of,
    until,
)
from served import SETTINGS

from slotzero import LLM, SamplingParams
from slotzero.errors import (
    EngineUnavailableError,
    RequestRefusedError,
)
from slotzero.server import client as client_module
from slotzero.server.client import EngineClient
from slotzero.server.messages import (
    Stats,
    TokenDelta,
)
from slotzero.server.stream import Stream

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_gpu")]


class Served:
    """One client and its engine for many tests, with an event loop that runs only during a test."""

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
    """Return whether no request runs or waits, and no request owns a page."""
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
def test_logprobs_cross_the_socket(served: Served, offline: LLM, count: int) -> None:
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


def test_cached_tokens_of_a_known_prompt_are_reported(served: Served) -> None:
    prompt = prompt_of(50, seed=77)
    first = served.ask(prompt, greedy())
    second = served.ask(prompt, greedy())
    assert [part.num_cached for part in first] == [0] * 8
    assert [part.num_cached for part in second] == [48] * 8


def test_a_slow_reader_delays_no_other_request(served: Served, offline: LLM) -> None:
    slow_ask, quick_ask = (prompt_of(9), greedy(100)), (prompt_of(12), greedy(10))

    async def ask() -> tuple[list[int], list[int]]:
        slow = served.client.submit("slow", *slow_ask)
        quick = await tokens_of(served.client.submit("quick", *quick_ask))
        await until(lambda: served.client.num_open == 0)  # the answer is complete before it is read
        return await tokens_of(slow), quick

    slow, quick = served.run(ask())
    assert slow == expected_of(offline, *slow_ask)
    assert quick == expected_of(offline, *quick_ask)


def test_one_id_used_twice_is_two_requests(served: Served, offline: LLM) -> None:
    """The requests run at once, and again while the cancelled one is still in flight."""
    asks = [(prompt_of(n), greedy(12)) for n in (5, 9, 13)]

    async def ask() -> list[list[int]]:
        doomed = served.client.submit("same", *asks[2])
        await anext(doomed)
        await doomed.aclose()
        return await asyncio.gather(
            *(tokens_of(served.client.submit("same", *ask)) for ask in asks)
        )

    assert served.run(ask()) == [expected_of(offline, *ask) for ask in asks]


def test_info_and_stats_describe_the_engine(served: Served, offline: LLM) -> None:
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


# Cancellation


async def by_aclose(stream: Stream) -> None:
    await anext(stream)
    await stream.aclose()
    await stream.aclose()  # a second time has no effect


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
def test_cancelling_frees_everything_and_affects_no_other_request(
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


def test_an_abandoned_stream_is_cancelled(served: Served) -> None:
    async def forget() -> None:
        for begins in (False, True):
            stream = served.client.submit("long", prompt_of(40), LONG)
            if begins:
                await anext(stream)
            del stream
            gc.collect()
            await is_empty(served.client)

    served.run(forget())


def test_requests_that_wait_are_cancelled_too(served: Served) -> None:
    """So many wait that none has its turn before the cancellation, even on a busy machine."""

    async def cancel() -> None:
        running = [served.client.submit(f"{i}", prompt_of(5, seed=i), LONG) for i in range(4)]
        waiting = [served.client.submit(f"waits-{i}", prompt_of(6), LONG) for i in range(80)]
        assert served.client.num_waiting == 84
        await until(lambda: served.client.stats and served.client.stats.waiting > 40)
        for stream in waiting:
            await stream.aclose()
        assert served.client.num_open <= 4
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
        ([1], {"logit_bias": [1, 2]}, "logit_bias=[1, 2]: must map token ids"),
        ([1], {"logit_bias": {"x": 2}}, "logit_bias="),
        ([1], {"colour": "red"}, "'colour' is not a sampling parameter"),
        ([1], {"n": 2}, "'n' is not a sampling parameter"),
        ([1], {"stop": "x"}, "'stop' is not a sampling parameter"),
        ([1], {"detokenize": True}, "'detokenize' is not a sampling parameter"),
        # these cannot even be encoded for the socket
        (["a"], {}, "prompt: Expected `int`, got `str`"),
        ([True], {}, "prompt: Expected `int`, got `bool`"),
        ([2**70], {}, "prompt: "),
        ("text", {}, "prompt: Expected `array`, got `str`"),
        ([1], {"top_k": 3, "seed": 2**70}, "seed: "),
        ([1], {"logit_bias": object()}, "logit_bias: "),
        ([1], {"colour": "\ud800"}, "colour: "),
    ],
)
def test_a_refused_request_affects_no_other(
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


def test_a_request_too_large_for_a_frame_is_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "MAX_FRAME", 100)

    async def ask() -> None:
        with pytest.raises(RequestRefusedError, match=r"prompt: the request has .* bytes, at most"):
            await collect(served.client.submit("bad", [200] * 100, {}))

    served.run(ask())


def test_the_engine_ignores_signals(served: Served, offline: LLM) -> None:
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


def test_draining_finishes_the_requests_that_end_in_time(
    served: Served, offline: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    client, prompt, params = served.client, prompt_of(10), greedy(30)
    monkeypatch.setattr(client, "is_draining", False)  # restored for the next test

    async def drain() -> list[int]:
        short = asyncio.create_task(tokens_of(client.submit("short", prompt, params)))
        longer = [client.submit("long", prompt_of(8, seed=i), LONG) for i in range(80)]
        await anext(longer[0])
        draining = asyncio.create_task(client.drain(2.0))
        await asyncio.sleep(0)
        with pytest.raises(EngineUnavailableError, match="accepts no more requests"):
            client.submit("late", prompt, params)
        assert client.is_draining
        await draining
        assert short.done()
        for stream in longer[-20:]:
            with pytest.raises(EngineUnavailableError, match="the server is stopping"):
                await collect(stream)
        await is_empty(client)
        await client.drain(0)  # no request is left
        return await short

    assert served.run(drain()) == expected_of(offline, prompt, params)
