"""Test that speculation changes no distribution: first tokens of many draws with and without it.

    python benchmarks/speculation/distribution.py --draws 200000
    python benchmarks/speculation/distribution.py --speculative-steps 3 --speculative-topk 3

A tiny model answers one prompt many times: equally often with and without speculation, and each
time with another seed. The draft model is the model itself with slightly changed weights, so that
some of its drafts are right and some are wrong. A two-sample chi-square test compares each of the
first three tokens, and all three together. The last line is JSON; the exit status is 1 if any
p-value is below 0.01.
"""

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from near import write_near
from torch import Tensor

from slotzero.checkpoint.tiny import tiny_names
from slotzero.config import BACKENDS, DRAFTERS, EngineConfig
from slotzero.engine.engine import Engine
from slotzero.sampling.params import SamplingParams
from slotzero.system.progress import prompts_bar
from slotzero.tree_shape import places_ahead

NUM_TOKENS = 3
LEAST_P = 0.01
LEAST_COUNT = 10  # per cell, both samples together, so that five are expected in each
PROMPT = [256, *b"Once upon a time,"]  # one page, found in the prefix cache, and two more tokens


class Compared(NamedTuple):
    what: str
    cells: int
    statistic: float
    freedom: int
    p: float


def main() -> int:
    args = parse()
    plain = {
        "model": args.model, "backend": args.backend, "max_num_seqs": args.max_num_seqs,
        "max_model_len": 64, "kv_cache_memory": 64 << 20, "skip_tokenizer_init": True,
        "show_progress": False, "lazy_recording": True,
    }  # fmt: skip
    params = SamplingParams(
        temperature=args.temperature, top_k=args.top_k, ignore_eos=True, detokenize=False
    )
    seeds = range(args.seed, args.seed + 2 * args.draws)
    without, _ = draw(EngineConfig(**plain), params, seeds[: args.draws])
    with tempfile.TemporaryDirectory() as folder:
        guessing = EngineConfig(**plain, **speculation(args, folder))
        sampled, figures = draw(guessing, params, seeds[args.draws :])
    results = compare(without, sampled)
    print("| tokens | cells | chi-square | degrees of freedom | p |\n|---|---|---|---|---|")
    for what, cells, statistic, freedom, p in results:
        print(f"| {what} | {cells} | {statistic:.1f} | {freedom} | {p:.3f} |")
    print(json.dumps(vars(args) | figures | {"results": [result._asdict() for result in results]}))
    return int(any(result.p < LEAST_P for result in results))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--draws", type=int, default=200_000, help="draws with, and as many without"
    )
    parser.add_argument("--model", choices=tiny_names(), default="tiny:llama")
    parser.add_argument("--speculative", choices=DRAFTERS, default="draft")
    parser.add_argument(
        "--off-by", type=float, default=0.03,
        help="noise added to the weights of the draft model; 0: its drafts are always right",
    )  # fmt: skip
    parser.add_argument("--speculative-steps", type=int, default=2)
    parser.add_argument("--speculative-topk", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=1.5)
    parser.add_argument("--top-k", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--backend", choices=BACKENDS, default="auto")
    return parser.parse_args()


def speculation(args: argparse.Namespace, folder: str) -> dict[str, Any]:
    settings = {
        "speculative": args.speculative,
        "speculative_steps": args.speculative_steps,
        "speculative_adaptive": False,
    }
    if args.speculative == "draft":
        write_near(args.model, args.off_by, Path(folder))
        settings["speculative_model"] = folder
    if args.speculative_topk > 1:
        settings["speculative_topk"] = args.speculative_topk
    return settings


def draw(
    config: EngineConfig, params: SamplingParams, seeds: range
) -> tuple[Tensor, dict[str, float]]:
    """Return the first three tokens of every draw, [draws, 3], and statistics of the run.

    All rows start together, so that all of them get drafts. An answer may grow as long as its first
    drafts need, and is cancelled once it has three tokens.
    """
    engine, start = Engine(config), time.perf_counter()
    params = replace(params, max_tokens=max(NUM_TOKENS, 2 + num_candidates(config)))
    drawn = dict[str, list[int]]()
    num_rows = engine.limits.max_num_seqs
    with prompts_bar(True, len(seeds)) as progress:
        for begin in range(0, len(seeds), num_rows):
            group = seeds[begin : begin + num_rows]
            for seed in group:
                engine.add(str(seed), PROMPT, replace(params, seed=seed))
            while engine.has_work:
                for answer in engine.step():
                    if len(answer.token_ids) >= NUM_TOKENS:
                        drawn[answer.request.id] = answer.token_ids[:NUM_TOKENS]
                        engine.cancel(answer.request.id)
            progress(len(group), NUM_TOKENS * len(group))
    engine.check()
    figures = {"draws_per_second": round(len(seeds) / (time.perf_counter() - start))}
    if engine.speculation is not None:
        stats = engine.speculation
        figures |= {
            "draft_tokens": stats.num_draft_tokens,
            "accepted_tokens": stats.num_accepted_tokens,
        }
    return torch.tensor(list(drawn.values())), figures


def num_candidates(config: EngineConfig) -> int:
    if config.speculative is None:
        return 0
    return places_ahead(config.speculative_steps + 1, config.tree)


def compare(one: Tensor, other: Tensor) -> list[Compared]:
    singles = [(f"{i + 1}", slice(i, i + 1)) for i in range(NUM_TOKENS)]
    return [
        chi_square(what, one[:, columns], other[:, columns])
        for what, columns in (*singles, (f"1 to {NUM_TOKENS}", slice(0, NUM_TOKENS)))
    ]


def chi_square(what: str, one: Tensor, other: Tensor) -> Compared:
    """Compare two samples of equal size, one row per draw; rare cells are merged into one."""
    _, cells = torch.cat((one, other)).unique(dim=0, return_inverse=True)
    counts = [torch.bincount(of, minlength=int(cells.max()) + 1) for of in cells.split(len(one))]
    both = torch.stack(counts).double()  # [2, cells]
    both = both[:, both.sum(0).argsort()]
    totals = both.sum(0)
    is_rare = (totals < LEAST_COUNT) | (totals.cumsum(0) - totals < LEAST_COUNT)
    both = torch.cat((both[:, is_rare].sum(1, keepdim=True), both[:, ~is_rare]), 1)
    statistic = (both[0] - both[1]).square().div(both.sum(0)).sum()
    freedom = both.shape[1] - 1
    p = torch.special.gammaincc(torch.tensor(freedom / 2).double(), statistic / 2)
    return Compared(what, both.shape[1], float(statistic), freedom, float(p) if freedom else 1.0)


if __name__ == "__main__":
    sys.exit(main())
