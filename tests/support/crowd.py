"""Load test of a server with two engines, one of which is killed while many clients wait."""

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from served import PATIENCE, Server

NUM_CLIENTS = 24
NUM_SLOTS = 2  # of each engine, so that most clients wait
NUM_STEADY = 4  # clients that continue while an engine restarts: more would slow it down
PAUSE = 0.2  # seconds between a client's requests
LETTERS = {str(ord(letter)): 100 for letter in "abcdefghijklmnopqrstuvwxyz"}  # one token, one byte
BODY: dict[str, Any] = {
    "model": "tiny:llama",
    "max_tokens": 24,
    "temperature": 0,
    "stream": True,
    "ignore_eos": True,
    "logit_bias": LETTERS,
}


@dataclass
class Seen:
    """The results of all clients."""

    answers: dict[str, set[str]] = field(default_factory=dict)  # by prompt
    ended_at: list[float] = field(default_factory=list)
    died_after: list[int] = field(default_factory=list)  # letters received before the engine died
    odd: list[str] = field(default_factory=list)  # answers that are neither whole nor cut by death


async def ask(http: httpx.AsyncClient, prompt: str, seen: Seen) -> None:
    text, code = "", None
    async with http.stream("POST", "/v1/completions", json=BODY | {"prompt": prompt}) as got:
        if got.status_code != 200:
            seen.odd.append(f"{got.status_code} {await got.aread()!r}")
            return
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                code = event.get("error", {}).get("code")
                text += "".join(choice["text"] for choice in event.get("choices", ()))
    if code == "engine_died" and len(text) < BODY["max_tokens"]:
        seen.died_after.append(len(text))
    elif code is None and len(text) == BODY["max_tokens"]:
        seen.answers.setdefault(prompt, set()).add(text)
        seen.ended_at.append(time.monotonic())
    else:
        seen.odd.append(f"{code} {text!r}")


async def load(
    http: httpx.AsyncClient, i: int, seen: Seen, is_full: asyncio.Event, is_over: asyncio.Event
) -> None:
    """Send requests until it is over; most clients do so only while the load is full."""
    while not is_over.is_set():
        await ask(http, f"client {i} of many", seen)
        await asyncio.sleep(PAUSE)
        if i >= NUM_STEADY:
            await is_full.wait()


def engines(url: str) -> list[str]:
    found: list[str] = httpx.get(f"{url}/health").json()["engines"]
    return found


def kill_one_under_load(server: Server, victim: int) -> None:
    """Kill one of two engines under load, and check that only the requests running on it are lost.

    `victim` is the process id of the engine.
    """
    seen = Seen()
    killed, back = asyncio.run(_abuse(server.url, victim, seen))
    print(
        f"{len(seen.ended_at)} answers complete, {len(seen.died_after)} cut off, "
        f"engine restarted in {back - killed:.1f} s"
    )
    assert seen.odd == []
    assert all(num > 0 for num in seen.died_after), "a request without output was not rerouted"
    assert len(seen.died_after) <= NUM_SLOTS, "a request of the other engine was lost"
    assert len(seen.answers) == NUM_CLIENTS
    assert all(len(answers) == 1 for answers in seen.answers.values()), "the engines disagree"
    assert any(killed < at < back for at in seen.ended_at), "the other engine did not answer"
    metrics = httpx.get(f"{server.url}/metrics").text
    restarts = [
        f'slotzero_engine_restarts_total{{engine="{i}"}} {n}.0' for i in (0, 1) for n in (0, 1)
    ]
    assert sum(line in metrics for line in restarts) == 2
    log = server.log.read_text()
    assert "process ended (signal 9) and is restarted" in log
    assert "Traceback" not in log


async def _abuse(url: str, victim: int, seen: Seen) -> tuple[float, float]:
    """Kill an engine under load, wait until it is back, and load it again.

    Both before the kill and after the restart, the load continues until every client has an answer
    and both engines have a queue. Returns when the engine was killed and when it was ready again.
    """
    is_full, is_over = asyncio.Event(), asyncio.Event()
    is_full.set()
    # no idle connections: the server may close one just when the client uses it again
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        asyncio.timeout(PATIENCE),
        httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for i in range(NUM_CLIENTS):
            tasks.create_task(load(http, i, seen, is_full, is_over))
        await _until_busy(http, seen)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        while "restarting" not in await _states(http):
            await asyncio.sleep(0.02)
        is_full.clear()
        while await _states(http) != ["ready", "ready"]:
            await asyncio.sleep(0.1)
        back = time.monotonic()
        is_full.set()
        await _until_busy(http, seen)
        is_over.set()
    return killed, back


async def _until_busy(http: httpx.AsyncClient, seen: Seen) -> None:
    before = len(seen.ended_at)
    while len(seen.ended_at) < before + NUM_CLIENTS or len(seen.answers) < NUM_CLIENTS:
        await asyncio.sleep(0.05)
    while min(await _waiting(http)) < 3:
        await asyncio.sleep(0.05)


async def _waiting(http: httpx.AsyncClient) -> list[int]:
    info = (await http.get("/server_info")).json()
    return [engine["pools"]["waiting"] for engine in info["engines"]]


async def _states(http: httpx.AsyncClient) -> list[str]:
    health = await http.get("/health")
    assert health.status_code == 200, "the other engine does not serve"
    states: list[str] = health.json()["engines"]
    return states
