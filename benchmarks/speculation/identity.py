"""Test that speculation changes no token: greedy answers with every drafter and without one.

    python benchmarks/speculation/identity.py
    python benchmarks/speculation/identity.py --model tiny:qwen3 --drafter eagle3 --backend eager

Every tiny model, on every backend, answers the same random prompts: first without a drafter, then
with each drafter, for several numbers of steps, as a chain and as a tree. `draft` is the model
itself, which is always right; `near` is the model with slightly changed weights, which is sometimes
right. A row of the table sums up all settings of a drafter. The last line is JSON; the exit status
is 1 if any answer differs. A near-tie can resolve differently without a fault, so the script shows
how close the two tokens were.
"""

import argparse
import itertools
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from near import write_near

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.tiny import tiny_names
from slotzero.config import BACKENDS
from slotzero.system.progress import prompts_bar

DRAFTERS = ("ngram", "eagle", "eagle3", "draft", "near")
COLUMNS = ("settings", "requests", "drafts", "accepted", "differ")
TEXT = 256  # the token ids below this are bytes, in a tiny model
LONGEST = 96  # length of the longest prompt
OFF_BY = 0.03  # noise on the weights of `near`, as a share of their spread
Progress = Callable[[int, int], None]


def main() -> int:
    args, start = parse(), time.perf_counter()
    total, differences = Counter[str](), list[dict[str, Any]]()
    chains = len(args.steps) * len(args.topk)
    num_settings = sum(len(args.steps) if name == "ngram" else chains for name in args.drafter)
    num_engines = len(args.model) * len(args.backend) * (1 + num_settings)
    print("| model | backend | drafter | " + " | ".join(COLUMNS) + " |")
    print("|---" * (3 + len(COLUMNS)) + "|")
    with prompts_bar(True, num_engines * args.prompts) as progress:
        for model, backend in itertools.product(args.model, args.backend):
            for drafter, row, found in compare(model, backend, args, progress):
                total += row
                differences += found
                figures = " | ".join(f"{row[name]:,}" for name in COLUMNS)
                print(f"| {model} | {backend} | {drafter} | {figures} |", flush=True)
    for found in differences:
        print(found)
    told = {name: total[name] for name in COLUMNS}
    print(json.dumps(vars(args) | told | {"seconds": round(time.perf_counter() - start)}))
    return int(total["differ"] > 0)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", choices=tiny_names(), default=tiny_names())
    parser.add_argument("--drafter", nargs="+", choices=DRAFTERS, default=DRAFTERS)
    parser.add_argument("--backend", nargs="+", choices=BACKENDS, default=("eager", "cpu"))
    parser.add_argument("--steps", nargs="+", type=int, default=(1, 3, 6))
    parser.add_argument("--topk", nargs="+", type=int, default=(1, 3), help="above 1: draft trees")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def compare(model: str, backend: str, args: argparse.Namespace, progress: Progress):
    """Yield the name, the figures and the differences of each drafter."""
    rng = random.Random(f"{args.seed} {model}")
    prompts = draw_prompts(rng, args.prompts)
    params = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    common = {
        "backend": backend, "max_num_seqs": args.max_num_seqs, "dtype": "float32",
        "max_model_len": LONGEST + args.max_tokens, "kv_cache_memory": 16 << 20,
        "skip_tokenizer_init": True, "show_progress": False, "lazy_recording": True,
    }  # fmt: skip
    plain = LLM(model, **common)
    expected = answers(plain, prompts, params, progress)
    with tempfile.TemporaryDirectory() as folder:
        write_near(model, OFF_BY, Path(folder))
        for drafter in args.drafter:
            row, found = Counter[str](), list[dict[str, Any]]()
            for steps, topk in itertools.product(args.steps, args.topk):
                if drafter == "ngram" and topk > 1:
                    continue
                guessing = LLM(model, **common, **speculation(model, drafter, steps, topk, folder))
                got = answers(guessing, prompts, params, progress)
                stats = guessing.engine.speculation
                assert stats is not None
                differing = [i for i, tokens in enumerate(expected) if tokens != got[i]]
                row["settings"] += 1
                row["requests"] += len(got)
                row["drafts"] += stats.num_draft_tokens
                row["accepted"] += stats.num_accepted_tokens
                row["differ"] += len(differing)
                for i in differing:
                    told = {"model": model, "backend": backend, "drafter": drafter}
                    told |= {"steps": steps, "topk": topk, "prompt": i}
                    found.append(told | describe(plain, prompts[i], params, expected[i], got[i]))
            yield drafter, row, found


def speculation(model: str, drafter: str, steps: int, topk: int, near: str) -> dict[str, Any]:
    settings: dict[str, Any] = {"speculative_steps": steps, "speculative_adaptive": False}
    if topk > 1:
        settings["speculative_topk"] = topk
    if drafter in ("draft", "near"):
        source = model if drafter == "draft" else near
        return settings | {"speculative": "draft", "speculative_model": source}
    return settings | {"speculative": drafter}


def draw_prompts(rng: random.Random, num: int) -> list[list[int]]:
    """Draw prompts, one in three with a common prefix that is found in the prefix cache."""
    prompts: list[list[int]] = []
    for _ in range(num):
        start = rng.choice(prompts) if prompts and rng.random() < 1 / 3 else []
        start = start[: rng.randint(0, len(start))]
        more = rng.randint(1, LONGEST - min(len(start), LONGEST - 1))
        prompts.append((start + [rng.randrange(TEXT) for _ in range(more)])[:LONGEST])
    return prompts


def answers(
    llm: LLM, prompts: list[list[int]], params: SamplingParams, progress: Progress
) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.engine.check()
    made = [output.outputs[0].token_ids for output in outputs]
    progress(len(made), sum(map(len, made)))
    return made


def describe(
    plain: LLM, prompt: list[int], params: SamplingParams, expected: list[int], got: list[int]
) -> dict[str, Any]:
    """Describe where an answer first differs, and how close the two tokens are without drafts."""
    pairs = zip(expected, got, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
    tokens = prompt + expected[:place]
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=20, ignore_eos=True)
    (output,) = plain.generate(tokens, one, use_tqdm=False)
    (by_id,) = output.outputs[0].logprobs or [{}]
    ours, theirs = (by_id.get(tokens[place]) for tokens in (expected, got))
    apart = ours.logprob - theirs.logprob if ours and theirs else None
    return {"token": place, "apart": apart}


if __name__ == "__main__":
    sys.exit(main())
