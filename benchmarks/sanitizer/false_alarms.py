"""False alarms of the live sanitizer: random batches on the CPU, every step watched.

    python benchmarks/sanitizer/false_alarms.py --batches 1000 --seed 0

The script raises at the first violation. The last line is JSON.
"""

import argparse
import itertools
import json
import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))
from traffic import SHAPES, draw_batch, engine_of, send, settings_of

from slotzero.checkpoint.tiny import tiny_configs
from slotzero.models.families.family import parse_config

BACKENDS = ("cpu", "eager")
STATE_BYTES = 4 << 20  # for the recurrent states of a tiny model, and snapshots of them


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batches", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    kinds = list(itertools.product(tiny_configs(), BACKENDS, SHAPES))
    rows, start = [], time.perf_counter()
    for i, kind in enumerate(kinds):
        num_batches = args.batches * (i + 1) // len(kinds) - args.batches * i // len(kinds)
        rows.append(run(kind, num_batches, random.Random(f"{args.seed} {kind}")))
        done = sum(row["batches"] for row in rows)
        print(f"{done} of {args.batches} batches, {time.perf_counter() - start:.0f} s", flush=True)
    print_table(kinds, rows)
    total = {name: sum(row[name] for row in rows) for name in rows[0]}
    total["seconds"] = round(time.perf_counter() - start)
    print(json.dumps(total))


def run(kind: tuple[str, str, str], num_batches: int, rng: random.Random) -> dict[str, int]:
    family, backend, shape = kind
    settings = settings_of(family, shape)
    if parse_config(tiny_configs()[family]).recurrent is not None:
        settings["kv_cache_memory"] += STATE_BYTES
    settings |= {"backend": backend, "sanitize": "full", "sanitize_action": "raise"}
    engine = engine_of(family, shape, **settings)
    assert engine.sanitizer is not None
    answers = []
    for _ in range(num_batches):
        answers += send(engine, draw_batch(rng, engine.limits.max_model_len))
    return {
        "batches": num_batches,
        "requests": len(answers),
        "cancelled": sum(answer.finish_reason == "abort" for answer in answers),
        "preemptions": engine.schedulers.num_preemptions,
        "prefix_hit_tokens": engine.schedulers[0].ledger.cache.stats.num_hit_tokens,
        "steps": engine.num_steps,
        "replays": sum(runner.counts.replays for runner in engine.worker.runners),
        "steps_watched": engine.sanitizer.steps_watched,
        "violations": engine.sanitizer.violations,
    }


def print_table(kinds: list[tuple[str, str, str]], rows: list[dict[str, int]]) -> None:
    names = list(rows[0])
    print("| model | backend | shape | " + " | ".join(names) + " |")
    print("|---" * (3 + len(names)) + "|")
    for kind, row in zip(kinds, rows, strict=True):
        print("| " + " | ".join([*kind, *(f"{row[name]:,}" for name in names)]) + " |")


if __name__ == "__main__":
    main()
