"""Throughput of every workload in slotzero/bench/workloads.py, random weights, best of two runs.

    python benchmarks/h200/run.py path/to/qwen3-0.6b path/to/llama-3.1-8b --out results.json

A path is a folder with a config.json. Each model runs in its own engine and process, with prefix
caching off and at most 256 rows. The name of a result is the model's folder and the workload. The
script prints a table, then one line of JSON.
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stack import apart

from slotzero.bench.session import BenchSession
from slotzero.bench.workloads import WORKLOADS

NAMES = {"qwen3-0.6b": "Qwen3-0.6B", "llama-3.1-8b": "Llama-3.1-8B"}
REPEATS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, float] = {}
    for model in args.models:
        name = NAMES.get(model.name, model.name)
        results |= apart(measure, model, args.workloads, name, {})
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def measure(
    model: Path, workloads: list[str], name: str, settings: Mapping[str, Any]
) -> dict[str, float]:
    """Return output tokens per second by workload; of prefill, which has one output token for each
    request, requests per second."""
    common = {"load_format": "dummy", "enable_prefix_caching": False, "show_progress": False}
    session = BenchSession(str(model), common | settings)
    results: dict[str, float] = {}
    num_sizes = len(session.engine.worker.recorded_keys)
    print(
        f"{name}: loaded in {session.load_seconds:.1f} s, {num_sizes} sizes captured in "
        f"{session.record_seconds:.1f} s, bandwidth {session.read_bandwidth / 1e9:,.0f} GB/s",
        flush=True,
    )
    for workload_name in workloads:
        workload = session.draw(WORKLOADS[workload_name])
        session.warm_up(workload)
        runs = [session.measure(workload) for _ in range(REPEATS)]
        best = min(runs, key=lambda run: run.seconds)
        speeds = [run.num_tokens / run.seconds for run in runs]
        share = session.bytes_read(workload, best.num_steps) / best.seconds / session.read_bandwidth
        first = max(best.first_tokens())
        results[f"{name}/{workload_name}"] = round(max(speeds), 1)
        print(
            f"  {workload_name:6}"
            f"{max(speeds):10,.0f} tok/s (runs {', '.join(f'{s:,.0f}' for s in speeds)}), "
            f"{best.num_steps} steps in {best.seconds:.3f} s, all first tokens after "
            f"{1000 * first:.1f} ms, {share:.0%} of the bandwidth limit",
            flush=True,
        )
    return results


if __name__ == "__main__":
    main()
