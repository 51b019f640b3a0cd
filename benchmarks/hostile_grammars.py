"""Time per output token of one plain request, alone and beside a stream of hostile grammars.

    python benchmarks/hostile_grammars.py --model smollm2 --tokens 200 --hostile 12

The script starts a server on a free port and streams one request without a grammar. Then it does
the same while a few clients send structured outputs that are slow or large to compile, each
different from the others. They start when the plain request has a few tokens; at most `--hostile`
are sent, and they are cancelled when the plain request ends. Prints a table, then one line of JSON.
"""

import argparse
import contextlib
import http.client
import itertools
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

CLIENTS = 4
NAME = "benchmark"
JSON = {"Content-Type": "application/json"}
PRIMES = (999_983, 999_979, 999_961, 999_959, 999_953, 999_931, 999_917, 999_907)


def hostile(i: int) -> tuple[str, dict[str, Any]]:
    """Return kind and schema of the i-th hostile grammar; no two are the same grammar."""
    match i % 4:
        case 0:
            number = PRIMES[i // 4 % len(PRIMES)] + i // 32
            return "multipleOf", {"type": "integer", "multipleOf": number}
        case 1:
            patterns = {f"^{i}a{j}[a-z]+$": {"type": "integer"} for j in range(300)}
            return "patternProperties", {"type": "object", "patternProperties": patterns}
        case 2:
            parts = [{"pattern": f"^(.*{chr(97 + j)}){{3}}.*{i}?$"} for j in range(16)]
            return "allOf", {"type": "string", "allOf": parts}
        case _:
            wide = "|".join(f"(.*{c}.{{{11 + j}}}{i % 10})" for j, c in enumerate("abcdefgh"))
            return "pattern", {"type": "string", "pattern": f"^({wide})$"}


@contextlib.contextmanager
def served(model: str) -> Iterator[int]:
    """Run a server, and yield its port when it is ready."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
    command = [sys.executable, "-m", "slotzero", "serve", model]
    command += ["--port", str(port), "--served-model-name", NAME]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 300
        while not is_ready(port):
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server did not start: {' '.join(command)}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def is_ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


def stream(port: int, num_tokens: int, at_work: Callable[[], None] = lambda: None) -> list[float]:
    """Return the seconds between the tokens of one request; call `at_work` after the first few."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    body = {
        "model": NAME, "prompt": "Once upon a time", "max_tokens": num_tokens, "stream": True,
        "ignore_eos": True, "temperature": 0,
    }  # fmt: skip
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), JSON)
        response = connection.getresponse()
        if response.status != 200:
            raise SystemExit(f"the plain request failed: {response.read().decode()}")
        times = []
        for line in response:
            if line.startswith(b'data: {"'):
                times.append(time.perf_counter())
                if len(times) == 4:
                    at_work()
        return [after - before for before, after in itertools.pairwise(times)]
    finally:
        connection.close()


def attack(port: int, numbers: Iterator[int], is_over: threading.Event, seen: list[str]) -> None:
    for i in numbers:
        if is_over.is_set():
            return
        kind, schema = hostile(i)
        body = {
            "model": NAME, "prompt": "A value:", "max_tokens": 16,
            "structured_outputs": {"json": schema},
        }  # fmt: skip
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), JSON)
            seen.append(f"{kind}: {connection.getresponse().status}")
        except OSError as error:
            seen.append(f"{kind}: {type(error).__name__}")
        finally:
            connection.close()


def stream_attacked(port: int, num_tokens: int, num_hostile: int) -> tuple[list[float], list[str]]:
    is_over, seen, lock = threading.Event(), list[str](), threading.Lock()
    counter = iter(range(num_hostile))

    def numbers() -> Iterator[int]:
        while True:
            with lock:
                i = next(counter, None)
            if i is None:
                return
            yield i

    threads = [
        threading.Thread(target=attack, args=(port, numbers(), is_over, seen), daemon=True)
        for _ in range(CLIENTS)
    ]

    def begin() -> None:
        for thread in threads:
            thread.start()

    gaps = stream(port, num_tokens, begin)
    is_over.set()
    return gaps, seen


def summary(gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    return {
        "median_ms": round(1e3 * statistics.median(ordered), 2),
        "p99_ms": round(1e3 * ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))], 2),
        "max_ms": round(1e3 * ordered[-1], 2),
        "total_s": round(sum(ordered), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of the plain request")
    parser.add_argument(
        "--hostile", type=int, default=12, help="maximum number of hostile requests"
    )
    wanted = parser.parse_args()
    with served(wanted.model) as port:
        stream(port, 16)
        alone = summary(stream(port, wanted.tokens))
        gaps, seen = stream_attacked(port, wanted.tokens, wanted.hostile)
        attacked = summary(gaps)
    print(f"{'':<24}{'median':>10}{'p99':>10}{'max':>10}{'total':>10}")
    for name, found in (("alone", alone), ("beside hostile grammars", attacked)):
        times = "".join(f"{found[key]:>7.1f} ms" for key in ("median_ms", "p99_ms", "max_ms"))
        print(f"{name:<24}{times}{found['total_s']:>8.1f} s")
    for what, num in sorted(Counter(seen).items()):
        print(f"  {num} x {what}")
    print(json.dumps({"alone": alone, "attacked": attacked, "answered": Counter(seen)}))


if __name__ == "__main__":
    main()
