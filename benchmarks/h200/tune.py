"""Tuning of matrix products: times every tile inside the captured step, prints the best as JSON.

    python benchmarks/h200/tune.py path/to/model... --out slotzero/kernels/triton/linear/tuned.json

At start-up, an engine times an unknown shape in isolation, in a chain of equal products. This
script instead tries each candidate in the captured step of a model with random weights, one product
after another, while the other products use the best tile so far. The rows are those of decode
steps. With --quantization fp8, products of codes in float8 are tuned. With --speculative and a
drafter, the drafter's products are timed in the draft and draft-extend passes. Entries of the file
for other shapes are kept.
"""

import argparse
import gc
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from slotzero.bench.clock import device_seconds
from slotzero.bench.rows import standing
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.graph import GraphKey, Runner
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.linear.tiles import PADDED_ROWS

CONTEXT = 384
REPEATS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rows", nargs="+", type=int, default=PADDED_ROWS)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--speculative")
    parser.add_argument("--speculative-model")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    best: dict[str, str] = {}
    if args.out and args.out.exists():
        best = json.loads(args.out.read_text())
    for model in args.models:
        engine = Engine(
            EngineConfig(
                model=str(model), load_format="dummy", skip_tokenizer_init=True,
                show_progress=False, lazy_recording=True, max_model_len=1024,
                kv_cache_memory=30 << 30, enable_prefix_caching=False,
                quantization=args.quantization,
                speculative=args.speculative, speculative_model=args.speculative_model,
            )
        )  # fmt: skip
        decode, *others = engine.worker.runners
        drafting = [runner for runner in others if runner.spec.name.startswith("draft")]
        timed: set[str] = set()
        for rows in args.rows:
            for _ in range(args.rounds):
                best |= tune(engine, decode, rows, best, timed)
            timed |= set(requested(engine, decode, decode.pick(rows, rows)))
        for runner in drafting:
            for rows in args.rows:
                best |= tune(engine, runner, rows, best, timed)
                timed |= set(requested(engine, runner, runner.pick(rows, rows)))
        if args.out:
            args.out.write_text(json.dumps(best, indent=1, sort_keys=True) + "\n")
        del engine, decode, others, drafting
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(best, sort_keys=True))


def tune(
    engine: Engine, runner: Runner, rows: int, known: dict[str, str], done: set[str]
) -> dict[str, str]:
    """Return the best choice for each product of one size of a runner, except those in `done`."""
    size = runner.pick(rows, rows)
    products = {k: names for k, names in requested(engine, runner, size).items() if k not in done}
    chosen = {key: known.get(key, names[0]) for key, names in products.items()}
    compile_all(engine, runner, size, list(products))
    for key, candidates in products.items():
        seconds = {
            name: step_seconds(engine, runner, size, {**chosen, key: name}) for name in candidates
        }
        ranked = sorted(seconds, key=seconds.__getitem__)
        if seconds[ranked[0]] == float("inf"):
            raise RuntimeError(f"{key}: no candidate could be timed")
        chosen[key] = ranked[0]
        shown = "; ".join(f"{1000 * seconds[name]:.4f} {name}" for name in ranked)
        print(f"{size}: {key}: {shown}", flush=True)
    engine.worker.kernels.choices.choose(chosen)
    return chosen


def requested(engine: Engine, runner: Runner, size: GraphKey) -> dict[str, Sequence[str]]:
    """Return the choices that a step of this size looks up, with their candidates."""
    choices = engine.worker.kernels.choices
    products: dict[str, Sequence[str]] = {}

    def note(key: str, candidates: Sequence[str]) -> str:
        products[key] = candidates
        return candidates[0]

    choices.known, known = note, choices.known
    try:
        with torch.inference_mode():
            runner.rehearse(size)
    finally:
        choices.known = known
    return products


def compile_all(engine: Engine, runner: Runner, size: GraphKey, keys: list[str]) -> None:
    """Compile all tiles in parallel.

    A product without a choice compiles its likely tiles, and here all tiles count as likely.
    """
    kernels = engine.worker.kernels
    assert isinstance(kernels, TritonKernels)
    choices = kernels.choices
    choices.choose(dict.fromkeys(keys, "unknown"))
    choices.likely, likely = lambda key, candidates: list(candidates), choices.likely
    try:
        with torch.inference_mode():
            kernels.prepare(lambda: runner.rehearse(size))
    finally:
        choices.likely = likely


def step_seconds(engine: Engine, runner: Runner, size: GraphKey, choices: dict[str, str]) -> float:
    worker = engine.worker
    worker.kernels.choices.choose(choices)
    try:
        with torch.inference_mode():
            runner.record(size)
        device = worker.registry.device
        if runner is not worker.decode:  # an empty step: its products take the same time
            replay = partial(runner.replay, size)
            return device_seconds(replay, _nothing, REPEATS, device, lead=0.01)
        with standing(engine, runner, size, CONTEXT) as rows:
            return device_seconds(rows.replay, rows.rewind, REPEATS, device, lead=0.01)
    except Exception as error:  # a tile that does not fit this GPU
        print(f"  {error}", flush=True)
        return float("inf")


def _nothing() -> None:
    """Prepare nothing before a replay."""


if __name__ == "__main__":
    main()
