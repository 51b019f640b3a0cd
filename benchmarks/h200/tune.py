"""Times every tile of every product inside the whole decode step, and prints the best as JSON.

    python benchmarks/h200/tune.py path/to/model... --out slotzero/kernels/triton/tuned.json

Start-up times an unknown shape by itself, in a chain of equal products; here each candidate is put
into the recorded step of a model with random weights, product after product, the others staying at
the best so far. What is in the file already is kept where a model has other shapes.
"""

import argparse
import gc
import json
from pathlib import Path

import torch

from slotzero.bench.clock import device_seconds
from slotzero.bench.rows import standing
from slotzero.config import EngineConfig
from slotzero.engine import Engine
from slotzero.kernels.triton.kernels import CUBLAS, TritonKernels
from slotzero.kernels.triton.tiles import tiles_for

ROWS = (1, 8, 16, 64)
CONTEXT = 384
REPEATS = 5
PRODUCTS = (("qkv", "linear"), ("out", "add"), ("gate_up", "gated"), ("down", "add"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--rows", nargs="+", type=int, default=ROWS)
    parser.add_argument("--rounds", type=int, default=1)
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
            )
        )  # fmt: skip
        for rows in args.rows:
            for _ in range(args.rounds):
                best |= tune(engine, rows, best)
            if args.out:
                args.out.write_text(json.dumps(best, indent=1, sort_keys=True) + "\n")
        del engine
        gc.collect()
        torch.cuda.empty_cache()
    print(json.dumps(best, sort_keys=True))


def tune(engine: Engine, rows: int, known: dict[str, str]) -> dict[str, str]:
    kernels, registry = engine.worker.kernels, engine.worker.registry
    assert isinstance(kernels, TritonKernels)
    head = "head" if any(e.name == "weight.head" for e in registry.entries()) else "embedding"
    keys = []
    for product, kind in (*PRODUCTS, (head, "logits")):
        weight = registry[f"weight.{product}"]
        out, inner = weight.shape[-2:]
        keys.append(kernels.key(kind, out, inner, rows))
    chosen = {key: known.get(key, CUBLAS) for key in keys}
    compile_all(engine, rows, keys)
    for key in keys:
        candidates = [CUBLAS, *map(str, tiles_for(rows, adds="/add/" in key))]
        seconds = {name: step_seconds(engine, rows, {**chosen, key: name}) for name in candidates}
        ranked = sorted(seconds, key=seconds.__getitem__)
        if seconds[ranked[0]] == float("inf"):
            raise RuntimeError(f"{key}: nothing could be timed")
        chosen[key] = ranked[0]
        shown = "; ".join(f"{1000 * seconds[name]:.4f} {name}" for name in ranked[:4])
        print(f"{key}: {shown}", flush=True)
    return chosen


def compile_all(engine: Engine, rows: int, keys: list[str]) -> None:
    """Side by side: products without a choice ask for all their tiles."""
    worker = engine.worker
    worker.kernels.choices.choose(dict.fromkeys(keys, "unknown"))
    with torch.inference_mode():
        worker.kernels.prepare(lambda: worker.decode.rehearse(worker.decode.pick(rows, rows)))


def step_seconds(engine: Engine, rows: int, choices: dict[str, str]) -> float:
    worker = engine.worker
    worker.kernels.choices.choose(choices)
    key = worker.decode.pick(rows, rows)
    try:
        with torch.inference_mode():
            worker.decode.record(key)
        with standing(engine, worker.decode, key, CONTEXT) as standing_rows:
            device = worker.registry.device
            return device_seconds(
                standing_rows.replay, standing_rows.rewind, REPEATS, device, lead=0.01
            )
    except Exception as error:  # a tile that this card cannot hold
        print(f"  {error}", flush=True)
        return float("inf")


if __name__ == "__main__":
    main()
