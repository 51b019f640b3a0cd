"""Certify one tiny model of each kind, with mutants, and the formats of weights and KV caches.

    python benchmarks/sanitizer/matrix.py [--parallel 3] [--only llama ...] [--seconds 500]
        [-- --backend eager]

Each job is one `slotzero certify` with a KV cache of 1 GiB, so that several fit one GPU. Flags
after -- are added to every job. A job that has not begun after --seconds is left out. Prints a line
for each job, the output of those that failed, and then one line of JSON.
"""

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

FP8 = "--quantization fp8 --kv-cache-dtype fp8 --dtype bfloat16"
MTP = "--speculative mtp"
JOBS = {
    "llama": "tiny:llama --mutate",
    "gemma3": "tiny:gemma3 --mutate",
    "qwen3-next": "tiny:qwen3-next --mutate",
    "deepseek-v3 mtp": f"tiny:deepseek-v3 {MTP} --mutate",
    "llama fp8": f"tiny:llama {FP8} --mutate",
    "llama int4": "tiny:llama --quantization int4 --dtype bfloat16 --mutate",
    "gemma3 fp8 kv": "tiny:gemma3 --kv-cache-dtype fp8 --dtype bfloat16 --quick",
    "deepseek-v3": "tiny:deepseek-v3 --mutate",
}


def main() -> None:
    words = sys.argv[1:]
    own = words[: words.index("--")] if "--" in words else words
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parallel", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args, more = parser.parse_args(own), words[len(own) + 1 :]
    until = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.parallel) as pool:
        results = list(pool.map(lambda name: run(name, more, until), args.only))
    print(json.dumps(dict(zip(args.only, results, strict=True))))
    sys.exit(any(result["code"] for result in results))


def run(name: str, more: list[str], until: float) -> dict[str, object]:
    begun = time.monotonic()
    if begun > until:
        print(f"{name}: left out", flush=True)
        return {"code": 1, "said": "left out"}
    words = f"certify {JOBS[name]} --kv-cache-memory 1G --no-show-progress".split() + more
    done = subprocess.run(
        [sys.executable, "-m", "slotzero", *words], capture_output=True, text=True
    )
    seconds = time.monotonic() - begun
    said = (done.stdout.strip() or done.stderr.strip()).splitlines()
    print(f"{name}: {said[-1]} ({seconds:.0f} s)", flush=True)
    if done.returncode:
        print(done.stdout, done.stderr[-4000:], flush=True)
    return {"code": done.returncode, "said": said[-1], "seconds": round(seconds)}


if __name__ == "__main__":
    main()
