"""Load test of a running server with requests that arrive at random times.

The load is open-loop: arrivals are a Poisson process of a given rate, whether the server keeps up
or not, so that a server that falls behind shows it. Lengths are drawn before the first request is
sent. The server is used only through its API.
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from slotzero.bench.http import Site
from slotzero.bench.report import summary
from slotzero.bench.sheets import Report, Sheet, rounded
from slotzero.errors import ConfigError

SHAREGPT = (5.0, 1.1, 5.0, 1.0)  # mean and deviation of log length: of prompts, then of answers
LONGEST = 1024
_FIRST_ID = 10

Seen = Callable[[int], None]


@dataclass(frozen=True)
class RequestLoad:
    """A request rate, and the lengths of every request."""

    rate: float  # requests per second; inf: all at once
    shapes: Sequence[tuple[int, int]]  # tokens in, tokens out
    seed: int = 0


@dataclass(frozen=True)
class Goal:
    """Time limits in seconds; a request is good if it meets both."""

    first_token: float
    per_token: float


@dataclass
class Fate:
    """Result of one request; times are seconds since the load began."""

    arrival: float
    """When it was due, so that a delay of the load test itself counts too."""
    chunks: list[float] = field(default_factory=list)
    """When each event arrived; one can contain many tokens."""
    num_tokens: int = 0
    error: str = ""

    @property
    def is_whole(self) -> bool:
        return not self.error and bool(self.chunks) and self.num_tokens > 0

    @property
    def first(self) -> float:
        return self.chunks[0] - self.arrival

    @property
    def latency(self) -> float:
        return self.chunks[-1] - self.arrival

    @property
    def per_token(self) -> float:
        return (self.chunks[-1] - self.chunks[0]) / max(1, self.num_tokens - 1)


def sharegpt(num: int, seed: int, longest: int) -> list[tuple[int, int]]:
    """Return lengths like those of ShareGPT's conversations: many short, a few long. Prompt and
    answer together have at most `longest` tokens."""
    rng = random.Random(seed)
    in_mean, in_spread, out_mean, out_spread = SHAREGPT
    most = min(LONGEST, longest // 2)

    def draw(mean: float, spread: float) -> int:
        return max(1, min(most, round(rng.lognormvariate(mean, spread))))

    return [(draw(in_mean, in_spread), draw(out_mean, out_spread)) for _ in range(num)]


def arrivals(load: RequestLoad) -> list[float]:
    """Return when each request is sent, in seconds after the first."""
    rng = random.Random(load.seed)
    gaps = (rng.expovariate(load.rate) if load.rate != float("inf") else 0.0 for _ in load.shapes)
    return list(itertools.accumulate(gaps, initial=0.0))[: len(load.shapes)]


async def run_loads(
    site: Site,
    make: Callable[[Mapping[str, Any]], Sequence[RequestLoad]],
    goal: Goal,
    seen: Seen,
) -> Report:
    """Run one load after the other; `make` gets the server's /server_info."""
    async with aclosing(site):
        info = await site.get("/server_info")
        if info["state"] != "ready":
            why = info["failure"] or "wait until /health answers 200"
            raise ConfigError(f"the server at {site.name} is {info['state']}: {why}")
        models = await site.get("/v1/models")
        model = models["data"][0]["id"]
        rates = []
        for load in make(info):
            start = time.perf_counter()
            fates = await _run(site, model, load, info["engine"]["vocab_size"], seen)
            rates.append(_sum_up(load, fates, time.perf_counter() - start, goal))
        return {
            "benchmark": "serve",
            "model": model,
            "url": f"http://{site.name}",
            "goal": {
                "first_token_ms": 1000 * goal.first_token,
                "per_token_ms": 1000 * goal.per_token,
            },
            "rates": rates,
        }


async def _run(
    site: Site, model: str, load: RequestLoad, vocab_size: int, seen: Seen
) -> list[Fate]:
    rng = random.Random(load.seed)
    prompts = [[rng.randrange(_FIRST_ID, vocab_size) for _ in range(n)] for n, _ in load.shapes]
    begin = time.perf_counter()
    tasks = []
    for arrival, prompt, (_, num_out) in zip(arrivals(load), prompts, load.shapes, strict=True):
        await asyncio.sleep(begin + arrival - time.perf_counter())
        fate = Fate(arrival)
        tasks.append(asyncio.create_task(_one(site, model, prompt, num_out, begin, fate, seen)))
    return list(await asyncio.gather(*tasks))


async def _one(
    site: Site, model: str, prompt: list[int], num_out: int, begin: float, fate: Fate, seen: Seen
) -> Fate:
    body = {
        "model": model, "prompt": prompt, "max_tokens": num_out, "temperature": 0, "stream": True,
        "ignore_eos": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    try:
        async for event in site.events("/v1/completions", body):
            if "error" in event:
                fate.error = event["error"]["message"]
            elif event.get("choices"):
                fate.chunks.append(time.perf_counter() - begin)
            elif event.get("usage"):
                fate.num_tokens = event["usage"]["completion_tokens"]
    except ConfigError as error:
        fate.error = str(error)
    seen(1)
    return fate


def _sum_up(
    load: RequestLoad, fates: Sequence[Fate], seconds: float, goal: Goal
) -> Mapping[str, Any]:
    whole = [fate for fate in fates if fate.is_whole]
    good = [f for f in whole if f.first <= goal.first_token and f.per_token <= goal.per_token]
    errors = [fate.error for fate in fates if fate.error]
    num_tokens = sum(fate.num_tokens for fate in whole)
    return {
        "rate": load.rate if load.rate != float("inf") else "inf",
        "requests": len(fates),
        "failed": len(fates) - len(whole),
        "first_error": errors[0] if errors else "",
        "seconds": rounded(seconds),
        "input_tokens": sum(n for n, _ in load.shapes),
        "output_tokens": num_tokens,
        "output_chunks": sum(len(fate.chunks) for fate in whole),
        "tokens_per_second": rounded(num_tokens / seconds),
        "requests_per_second": rounded(len(whole) / seconds),
        "goodput": rounded(len(good) / seconds),
        "time_to_first_token": summary([fate.first for fate in whole]),
        "time_per_token": summary([fate.per_token for fate in whole if fate.num_tokens > 1]),
        "request_latency": summary([fate.latency for fate in whole]),
    }


def sheets(report: Report) -> list[Sheet]:
    header = (
        "requests/s", "sent", "failed", "served/s", "good/s", "tokens/s", "first p50", "p99 ms",
        "token p50", "p99 ms", "whole p50", "p99 ms",
    )  # fmt: skip
    lines = []
    for rate in report["rates"]:
        spread = [
            _shown(rate[name][which])
            for name in ("time_to_first_token", "time_per_token", "request_latency")
            for which in ("p50", "p99")
        ]
        lines.append((
            str(rate["rate"]), str(rate["requests"]), str(rate["failed"]),
            f"{rate['requests_per_second']:.2f}", f"{rate['goodput']:.2f}",
            f"{rate['tokens_per_second']:.1f}", *spread,
        ))  # fmt: skip
    return [Sheet(f"serve of {report['model']} at {report['url']}", lines, header)]


def _shown(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{milliseconds:.1f}"
