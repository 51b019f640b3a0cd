"""Many clients of a server of two engines, of which one is killed: what they all see."""

import asyncio
import json
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from served import PATIENCE, Server

NUM_CLIENTS = 50
NUM_SLOTS = 2  # of each engine: most clients wait
PAUSE = 1.0  # seconds of a client between two answers: an engine that starts needs the machine too
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
    """What all clients saw."""

    answers: dict[str, set[str]] = field(default_factory=dict)  # by prompt
    ended_at: list[float] = field(default_factory=list)
    died_after: list[int] = field(default_factory=list)  # letters
    odd: list[str] = field(default_factory=list)


async def ask(http: httpx.AsyncClient, prompt: str, seen: Seen) -> None:
    text, code = "", None
    async with http.stream("POST", "/v1/completions", json=BODY | {"prompt": prompt}) as got:
        if got.status_code != 200:
            seen.odd.append(f"{got.status_code} {await got.aread()!r}")
            return
        async for line in got.aiter_lines():
            if line.startswith("data: {"):
                told = json.loads(line.removeprefix("data: "))
                code = told.get("error", {}).get("code")
                text += "".join(choice["text"] for choice in told.get("choices", ()))
    if code == "engine_died" and len(text) < BODY["max_tokens"]:
        seen.died_after.append(len(text))
    elif code is None and len(text) == BODY["max_tokens"]:
        seen.answers.setdefault(prompt, set()).add(text)
        seen.ended_at.append(time.monotonic())
    else:
        seen.odd.append(f"{code} {text!r}")


async def load(http: httpx.AsyncClient, i: int, seen: Seen, is_over: asyncio.Event) -> None:
    while not is_over.is_set():
        await ask(http, f"client {i} of many", seen)
        await asyncio.sleep(PAUSE)


def engines(url: str) -> list[str]:
    found: list[str] = httpx.get(f"{url}/health").json()["engines"]
    return found


def kill_one_under_load(server: Server, victim: int) -> None:
    """Of two engines whose processes are anybody's; nothing but what ran on it is lost."""
    seen = Seen()
    killed, back = asyncio.run(_abuse(server.url, victim, seen))
    print(f"{len(seen.ended_at)} whole, {len(seen.died_after)} died, back in {back - killed:.1f} s")
    assert seen.odd == []
    assert all(num > 0 for num in seen.died_after), "who had nothing yet was sent elsewhere"
    assert len(seen.died_after) <= NUM_SLOTS, "they were all on the one that died"
    assert len(seen.answers) == NUM_CLIENTS
    assert all(len(answers) == 1 for answers in seen.answers.values()), "whoever answered"
    assert any(killed < at < back for at in seen.ended_at), "the other one answered"
    metrics = httpx.get(f"{server.url}/metrics").text
    restarts = [
        f'slotzero_engine_restarts_total{{engine="{i}"}} {n}.0' for i in (0, 1) for n in (0, 1)
    ]
    assert sum(line in metrics for line in restarts) == 2
    log = server.log.read_text()
    assert "process ended (signal 9) and is restarted" in log
    assert "Traceback" not in log


async def _abuse(url: str, victim: int, seen: Seen) -> tuple[float, float]:
    """Load, until all have an answer and both engines a queue, and so again once the one that is
    killed is back -> when it was killed, and when it was back"""
    is_over = asyncio.Event()
    # an idle connection may be closed by the server just when it is used again
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with (
        asyncio.timeout(PATIENCE),
        httpx.AsyncClient(base_url=url, timeout=PATIENCE, limits=limits) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for i in range(NUM_CLIENTS):
            tasks.create_task(load(http, i, seen, is_over))
        await _until_busy(http, seen)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        while "restarting" not in await _states(http):
            await asyncio.sleep(0.02)
        while await _states(http) != ["ready", "ready"]:
            await asyncio.sleep(0.1)
        back = time.monotonic()
        await _until_busy(http, seen)
        is_over.set()
    return killed, back


async def _until_busy(http: httpx.AsyncClient, seen: Seen) -> None:
    before = len(seen.ended_at)
    while len(seen.ended_at) < before + NUM_CLIENTS or len(seen.answers) < NUM_CLIENTS:
        await asyncio.sleep(0.02)
    while min(await _waiting(http)) < 5:
        await asyncio.sleep(0.02)


async def _waiting(http: httpx.AsyncClient) -> list[int]:
    info = (await http.get("/server_info")).json()
    return [engine["pools"]["waiting"] for engine in info["engines"]]


async def _states(http: httpx.AsyncClient) -> list[str]:
    health = await http.get("/health")
    assert health.status_code == 200, "the other one serves"
    told: list[str] = health.json()["engines"]
    return told
