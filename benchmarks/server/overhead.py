"""Overhead of HTTP: tokens per second of streams, compared with offline generation.

    python benchmarks/server/overhead.py MODEL [--streams 32] [--port 8123] [engine flags]

The script runs the same requests twice: with `slotzero bench throughput`, and with `slotzero bench
serve` against a `slotzero serve` that it starts, all requests at once, best of three. It prints a
table and a line of JSON.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from slotzero.bench.http import HttpError, Site
from slotzero.bench.sheets import Report, Sheet, print_sheets
from slotzero.errors import ConfigError

RUNS = 3
PATIENCE = 180.0  # seconds for loading and capturing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=512)
    parser.add_argument("--port", type=int, default=8123)
    args, flags = parser.parse_known_args()
    shape = [
        *("--num-prompts", str(args.streams), "--input-len", str(args.input_len)),
        *("--output-len", str(args.output_len)),
    ]
    offline = bench("throughput", args.model, *shape, *flags)["tokens_per_second"]
    serve = [*slotzero("serve", args.model), "--port", str(args.port), *flags]
    serve.append("--no-enable-prefix-caching")  # as offline, since all runs have the same prompts
    server = subprocess.Popen(serve, stdout=subprocess.DEVNULL)
    try:
        asyncio.run(until_healthy(Site("127.0.0.1", args.port, {})))
        url = ["--url", f"http://127.0.0.1:{args.port}", "--rate", "inf"]
        runs = [bench("serve", *url, *shape)["rates"][0] for _ in range(RUNS)]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    best = max(runs, key=lambda run: run["tokens_per_second"])
    report: Report = {
        "benchmark": "http_overhead",
        "model": args.model,
        "streams": args.streams,
        "offline_tokens_per_second": offline,
        "served_tokens_per_second": best["tokens_per_second"],
        "lost_share": round(1 - best["tokens_per_second"] / offline, 4),
        "tokens_per_chunk": round(best["output_tokens"] / best["output_chunks"], 2),
        "failed": sum(run["failed"] for run in runs),
    }
    lines = [(name.replace("_", " "), f"{value}") for name, value in report.items()]
    print_sheets(report, [Sheet("HTTP against offline", lines)])


def slotzero(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "slotzero", *arguments]


def bench(*arguments: str) -> Report:
    command: Sequence[str] = slotzero("bench", *arguments, "--no-show-progress")
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    report: Report = json.loads(done.stdout.splitlines()[-1])
    return report


async def until_healthy(site: Site) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            await site.get("/health")
            return
        except (HttpError, OSError, ConfigError):
            if time.monotonic() > end:
                raise
            await asyncio.sleep(0.5)


if __name__ == "__main__":
    main()
