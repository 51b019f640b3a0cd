"""Helpers for tests of an engine in its own process: prompts, parameters, and waiting."""

import asyncio
import random
from collections.abc import Callable
from contextlib import aclosing
from typing import Any

from slotzero import LLM, SamplingParams
from slotzero.server.messages import (
    TokenDelta,
)
from slotzero.server.stream import Stream

LONG = {"temperature": 0, "ignore_eos": True, "max_tokens": None}
STAGES = ["kernels", "weights", "recording"]
SOON = 120.0  # seconds: enough for a busy machine, and a limit for a test that hangs


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


def expected_of(offline: LLM, prompt: list[int], params: dict[str, Any]) -> list[int]:
    wanted = SamplingParams(**params)
    return offline.generate(prompt, wanted, use_tqdm=False)[0].outputs[0].token_ids
