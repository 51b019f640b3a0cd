"""Soak test of a server: many streams at once, clients that disconnect, an engine that is killed.

    python benchmarks/server/soak.py [--clients 200] [--seconds 60] [--model tiny:llama]

The script starts `slotzero serve` on a free port of the loopback interface. It has three parts: (1)
All clients stream for the whole time. Every prompt has a nonce, and every answer must equal that of
offline generation. (2) Half of all streams are closed at a random moment; afterwards all slots and
pages must be free again. (3) The engine's process is killed under load: every client must get an
answer or an error, and the server must serve again. Prints a table and a line of JSON; the exit
status is 1 if anything failed.
"""

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from slotzero import LLM, SamplingParams
from slotzero.bench.http import HttpError, Site
from slotzero.bench.sheets import Report, Sheet, print_sheets

NUM_TOKENS = 24
NUM_PROMPTS = 256
RESTART_BOUND = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--model", default="tiny:llama")
    args = parser.parse_args()
    expected = offline(args.model)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "slotzero", "serve", args.model, "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        report = asyncio.run(soak(port, server.pid, expected, args.clients, args.seconds))
    finally:
        server.send_signal(signal.SIGTERM)
        report_exit = server.wait(timeout=60)
    report |= {"model": args.model, "clients": args.clients, "exit_code": report_exit}
    failures = [name for name, ok in checks(report).items() if not ok]
    lines = [(name.replace("_", " "), json.dumps(value)) for name, value in report.items()]
    print_sheets(report | {"failures": failures}, [Sheet("soak", lines)])
    return 1 if failures else 0


def offline(model: str) -> dict[str, str]:
    """Return prompts, each with a nonce, and the one right answer to each."""
    rng = random.Random(1)
    prompts = [f"nonce {rng.getrandbits(40):x} says" for _ in range(NUM_PROMPTS)]
    llm = LLM(model, show_progress=False)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return {p: output.outputs[0].text for p, output in zip(prompts, outputs, strict=True)}


async def soak(
    port: int, pid: int, expected: dict[str, str], clients: int, seconds: float
) -> Report:
    site = Site("127.0.0.1", port, {})
    await healthy(site, 120)
    model = (await site.get("/v1/models"))["data"][0]["id"]
    steady = Counter[str]()
    memory: list[int] = []

    async def watch() -> None:
        while True:
            await asyncio.sleep(seconds / 6)
            memory.append(resident(pid))

    watcher = asyncio.create_task(watch())
    end = time.monotonic() + seconds
    await asyncio.gather(
        *(stream(site, model, expected, i, end, steady, 0.0) for i in range(clients))
    )
    watcher.cancel()
    leaving = Counter[str]()
    end = time.monotonic() + seconds / 4
    await asyncio.gather(
        *(stream(site, model, expected, i, end, leaving, 0.5) for i in range(clients))
    )
    idle = await idle_within(site, 10)
    killed = Counter[str]()
    end = time.monotonic() + seconds / 4
    tasks = [
        asyncio.create_task(stream(site, model, expected, i, end, killed, 0.0))
        for i in range(clients)
    ]
    await asyncio.sleep(seconds / 16)
    os.kill(engine_of(pid), signal.SIGKILL)
    fell = time.monotonic()
    await asyncio.sleep(0.5)
    await healthy(site, RESTART_BOUND)
    back = time.monotonic() - fell
    await asyncio.gather(*tasks)
    return {
        "steady": dict(steady),
        "memory_mib": [round(value / 2**20) for value in memory],
        "leaving": dict(leaving),
        "idle_afterwards": idle,
        "killed": dict(killed),
        "seconds_until_back": round(back, 2),
    }


async def stream(
    site: Site,
    model: str,
    expected: dict[str, str],
    seed: int,
    end: float,
    fates: Counter[str],
    leave: float,
) -> None:
    """Send requests one after another until the time is over, and count how each ended."""
    rng = random.Random(seed)
    while time.monotonic() < end:
        prompt = rng.choice(list(expected))
        body = {
            "model": model, "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0,
            "stream": True, "ignore_eos": True,
        }  # fmt: skip
        most = rng.randrange(1, NUM_TOKENS) if rng.random() < leave else NUM_TOKENS + 1
        text, num, error = "", 0, ""
        try:
            events = site.events("/v1/completions", body)
            async for event in events:
                if "error" in event:
                    error = "error in the stream"
                    break
                text += "".join(choice["text"] for choice in event.get("choices", ()))
                num += 1
                if num >= most:
                    await events.aclose()
                    break
        except HttpError as failure:
            error = f"status {failure.status}"
        except Exception as failure:  # connections that break are what this part looks for
            error = type(failure).__name__
        if error:
            fates[error] += 1
            await asyncio.sleep(0.2)
        elif num >= most:
            fates["left"] += 1
        else:
            fates["right" if text == expected[prompt] else "wrong"] += 1


async def healthy(site: Site, within: float) -> None:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            await site.get("/health")
            return
        except Exception:  # the server does not listen yet, or answers 503
            await asyncio.sleep(0.1)
    raise SystemExit(f"the server was not healthy within {within:.0f} s")


async def idle_within(site: Site, seconds: float) -> bool:
    """Wait until no request runs, waits or holds a slot or a page; return whether that happened."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        text = await site.text("/metrics")
        lines = [line.rsplit(" ", 1) for line in text.splitlines() if line[:1] not in ("", "#")]
        values = {name: float(value) for name, value in lines}
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        if all(values.get(f'slotzero_{name}{{engine="0"}}', 1.0) == 0 for name in names):
            return True
        await asyncio.sleep(0.25)
    return False


def engine_of(pid: int) -> int:
    """Return the process id of the engine, the server's only child."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0])


def resident(pid: int) -> int:
    """Return the resident bytes of the server and its engine."""
    total = 0
    for process in (pid, engine_of(pid)):
        fields = Path(f"/proc/{process}/statm").read_text().split()
        total += int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
    return total


def checks(report: Report) -> dict[str, bool]:
    memory = report["memory_mib"]
    return {
        "steady: all right": set(report["steady"]) == {"right"},
        "memory is flat": memory[-1] <= 1.05 * memory[1] + 8,
        "leaving: nobody else was hurt": set(report["leaving"]) <= {"right", "left"},
        "slots and pages came back": report["idle_afterwards"],
        "killed: no wrong answer": "wrong" not in report["killed"] and "right" in report["killed"],
        "back within the bound": report["seconds_until_back"] <= RESTART_BOUND,
        "ended with 0": report["exit_code"] == 0,
    }


if __name__ == "__main__":
    sys.exit(main())
