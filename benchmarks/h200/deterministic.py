"""Deterministic mode: its price, and the proof that no answer depends on its batch.

    python benchmarks/h200/deterministic.py path/to/qwen3-0.6b path/to/llama-3.1-8b

Sections, each with its own processes, in this order:

- `kinds`: S10 and its mutants over a tiny model of each kind, in both 16-bit types and with an FP8
  KV cache.
- `answers`: prompts through the default model, each alone and then batched: arriving at random,
  preempted, with chunked prefill and cached prefixes; then the same with its EAGLE head. The number
  of answers that differ in a token or in a bit of a log probability.
- `cells`: the workloads of slotzero/bench/workloads.py with random weights, default against
  deterministic in turn, better of two runs.
- `products`: the time of each matrix product by every tile of deterministic mode, for several
  numbers of shares, beside the default; to choose the constants of tiles_fixed.py.

Results are written to --out after every part, so that an interrupted run keeps what it has. --small
tries everything with tiny sizes, on any machine.
"""

import argparse
import json
import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from prompts import held_out, written
from run import NAMES, measure
from stack import apart

from slotzero.bench.clock import device_seconds
from slotzero.bench.workloads import WORKLOADS
from slotzero.certify.batch_invariance import (
    RequestSpec,
    Round,
    ServedAnswer,
    check_batch_invariance,
    serve_alone,
)
from slotzero.certify.order_faults import mutate_order
from slotzero.certify.start import start_engine
from slotzero.config import EngineConfig
from slotzero.errors import SlotzeroError
from slotzero.kernels.types import Activation, Normed
from slotzero.sampling.params import SamplingParams

SECTIONS = ("kinds", "answers", "cells", "products")
KINDS = ("llama", "gemma3", "gpt-oss", "qwen3-moe", "falcon-h1", "qwen3-next", "deepseek-v3")
AT_ONCE = 4
VARIANTS = ({"dtype": "bfloat16"}, {"dtype": "float16"}, {"kv_cache_dtype": "fp8"})
MODES: tuple[dict[str, Any], ...] = ({}, {"deterministic": True})
COLD_BYTES = 512 << 20  # of the copies of a weight: more than the L2 cache holds
ROUNDS = (
    Round("all at once", is_preempted=True),
    Round("arriving at random, preempted", is_reversed=True, is_staggered=True, is_preempted=True,
          keeps_cache=True),
)  # fmt: skip
LONGEST = 900  # tokens of a prompt: more than the budget of a step
BUDGET = 512
ROWS = (1, 8, 64, 256, 2048)
SHARES = (1, 2, 4, 8)
SHAPES = {  # kind, output features, input features
    "Qwen3-0.6B": (("linear", 4096, 1024), ("add", 1024, 2048), ("gated", 6144, 1024),
                   ("add", 1024, 3072), ("logits", 151936, 1024)),
    "Llama-3.1-8B": (("linear", 6144, 4096), ("add", 4096, 4096), ("gated", 28672, 4096),
                     ("add", 4096, 14336), ("logits", 128256, 4096)),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--small", action="store_true", help="try everything with tiny sizes")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    results: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {}

    def keep(section: str, name: str, result: Any) -> None:
        results.setdefault(section, {})[name] = result
        print(f"{section}: {name}: {json.dumps(result)}", flush=True)
        args.out.write_text(json.dumps(results, indent=1) + "\n")

    for section in args.only:
        start = time.perf_counter()
        RUN[section](args, keep)
        print(f"{section}: {time.perf_counter() - start:.0f} s", flush=True)


def run_kinds(args: argparse.Namespace, keep: Any) -> None:
    """Several engines share the GPU: nothing is timed, and kernels are compiled on the host."""
    cases = [(family, variant) for family in KINDS for variant in VARIANTS]
    if args.small:  # a CPU has no 16-bit types
        cases = [case for case in cases if "dtype" not in case[1]][:1]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        runs = [pool.submit(apart, certified, *case, case[1] is VARIANTS[0]) for case in cases]
        for (family, variant), run in zip(cases, runs, strict=True):
            keep("kinds", f"{family}, {', '.join(variant.values())}", run.result())


def certified(family: str, variant: dict[str, Any], with_mutants: bool) -> dict[str, Any]:
    """Return the violations of S10 and what became of its mutants, or why the mode is refused."""
    config = EngineConfig(
        model=f"tiny:{family}", deterministic=True, skip_tokenizer_init=True, show_progress=False,
        gpu_memory_utilization=0.2, max_num_seqs=7, max_num_batched_tokens=96, max_model_len=128,
        kv_cache_memory=1 << 24, snapshot_interval=16, **variant,
    )  # fmt: skip
    try:
        engine = start_engine(config)
    except SlotzeroError as error:
        return {"refused": str(error)}
    made: dict[str, Any] = {"violations": [str(found) for found in check_batch_invariance(engine)]}
    if with_mutants and not made["violations"]:
        made["mutants"] = [str(mutant) for mutant in mutate_order(engine)]
    return made


def run_answers(args: argparse.Namespace, keep: Any) -> None:
    prompts, tokens = (3, 8) if args.small else (args.prompts, args.tokens)
    alone = None
    for speculative in (None, "eagle3"):
        found, alone = apart(answered, speculative, prompts, tokens, alone)
        keep("answers", f"smollm2, {speculative or 'no'} drafts", found)


def answered(
    speculative: str | None, num: int, num_tokens: int, alone: list[ServedAnswer] | None
) -> tuple[dict[str, Any], list[ServedAnswer]]:
    """Return what differs from the answers alone, which are computed if not given."""
    engine = start_engine(
        EngineConfig(
            deterministic=True, show_progress=False, max_num_batched_tokens=BUDGET,
            max_num_seqs=min(256, num), max_model_len=2048, lazy_recording=num < 256,
            kv_cache_memory=(16 << 30) if torch.cuda.is_available() else (1 << 28),
            speculative=speculative,
        )
    )  # fmt: skip
    assert engine.tokenizer is not None
    rng, texts = random.Random(0), [*written(), *held_out()]
    requests = []
    for i in range(num):
        text = " ".join(rng.sample(texts, rng.choice((1, 1, 3, 20))))
        prompt = engine.tokenizer.encode(text, add_special_tokens=False)[:LONGEST]
        params = SamplingParams(
            temperature=0.0 if i % 4 else 1.0, seed=i, max_tokens=num_tokens, ignore_eos=True,
            logprobs=2,
        )  # fmt: skip
        requests.append(RequestSpec(prompt, params))
    alone = serve_alone(engine, requests) if alone is None else alone
    found, stats = check_batch_invariance(engine, ROUNDS, requests, alone), engine.speculation
    made = {
        "prompts": num,
        "tokens": num_tokens,
        "rounds": [one.name for one in ROUNDS],
        "answers that differ": len(found),
        "first": [str(violation) for violation in found[:5]],
        "preemptions": engine.schedulers.num_preemptions,
        "cached tokens found": engine.schedulers[0].ledger.cache.stats.num_hit_tokens,
        "drafts accepted": stats and [stats.num_accepted_tokens, stats.num_draft_tokens],
    }
    return made, alone


def run_cells(args: argparse.Namespace, keep: Any) -> None:
    """Measure all workloads of a model in one mode and, right after it, in the other."""
    models, workloads, more = args.models, args.workloads, dict[str, Any]()
    if args.small:
        models, workloads = [Path("tiny:llama")], []
        more = {"backend": "eager", "kv_cache_memory": 1 << 26}
    for model in models:
        name = NAMES.get(model.name, model.name)
        default, fixed = (apart(measure, model, workloads, name, mode | more) for mode in MODES)
        for cell, speed in default.items():
            share = round(fixed[cell] / speed, 3)
            keep("cells", cell, {"default": speed, "deterministic": fixed[cell], "share": share})


def run_products(args: argparse.Namespace, keep: Any) -> None:
    if args.small:
        return  # the kernels run on a GPU only
    for name, shapes in SHAPES.items():
        for kind, features, inner in shapes:
            keep("products", f"{name} {kind} {features}x{inner}",
                 apart(timed_product, kind, features, inner))  # fmt: skip


def timed_product(kind: str, features: int, inner: int) -> dict[str, Any]:
    """Return microseconds by rows: of the default product, and of every tile with some shares."""
    from slotzero.kernels.triton.linear.tiles_fixed import shares_of

    copies = max(1, COLD_BYTES // (2 * features * inner))
    shape, on = (features, inner), {"device": "cuda", "dtype": torch.bfloat16}
    weights = [torch.randn(shape, **on) for _ in range(copies)]
    made: dict[str, Any] = {"shares": 1 if kind == "gated" else shares_of(features, inner)}
    return made | {f"{rows} rows": timed_rows(kind, rows, weights) for rows in ROWS}


def timed_rows(kind: str, rows: int, weights: list[torch.Tensor]) -> dict[str, float]:
    from slotzero.kernels.triton.kernels import TritonKernels
    from slotzero.kernels.triton.linear.tiles_fixed import fixed_tiles_for
    from slotzero.kernels.weights import DenseWeight

    (features, inner), kernels = weights[0].shape, TritonKernels()
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    out = x.new_empty(rows, features // 2 if kind == "gated" else features)

    def default(weight: torch.Tensor) -> None:
        dense = DenseWeight(weight, None, features)
        if kind == "gated":
            kernels.linear_gated(Normed(x), dense, "silu")
        else:
            kernels.linear(Normed(x), dense)

    made = {"default": microseconds(default, weights)}
    activation: Activation | None = "silu" if kind == "gated" else None
    for shares in (1,) if kind == "gated" else SHARES:
        for tile in fixed_tiles_for(rows, x.dtype, shares):
            run = partial(fixed_product, x, out, tile, activation)
            made[str(tile)] = microseconds(run, weights)
    return made


def fixed_product(x: Any, out: Any, tile: Any, activation: Any, weight: torch.Tensor) -> None:
    from slotzero.kernels.triton.linear import linear_fixed
    from slotzero.kernels.triton.linear.operands import Operands

    linear_fixed.product(Operands(x, weight, None), out, tile, activation=activation)


def microseconds(run: Callable[[torch.Tensor], None], weights: list[torch.Tensor]) -> float:
    """Return the time of a product, captured as a chain over weights that the L2 cache does not
    hold."""
    run(weights[0])
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            run(weight)
    seconds = device_seconds(graph.replay, lambda: None, 5, torch.device("cuda"), lead=0.01)
    return round(1e6 * seconds / len(weights), 2)


RUN = {"kinds": run_kinds, "answers": run_answers, "cells": run_cells, "products": run_products}

if __name__ == "__main__":
    main()
