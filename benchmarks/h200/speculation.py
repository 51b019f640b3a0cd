"""What speculation brings: a model with and without an EAGLE-3 head, in one run.

    python benchmarks/h200/speculation.py [MODEL] [--head FOLDER] [--steps 4] [--topk 1]

Two sets of prompts, see prompts.py, through the chat template, greedy, 256 tokens each, end of text
ignored, in batches of 1, 8 and 64. Prints a table, then one JSON line: tokens per second, tokens
that a verification brings, and how many answers are the same to the last token.
"""

import argparse
import json
import time

from prompts import held_out, written

from slotzero import LLM, SamplingParams

BATCHES = {1: 8, 8: 4, 64: 4}  # and how often each is tried
PARAMS = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--head", help="a folder; default: what comes with the model")
    parser.add_argument("--kind", default="eagle3")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fixed", action="store_true", help="always guess, however much it costs")
    parser.add_argument("--kv-cache-memory", type=int, default=8 << 30)
    args = parser.parse_args()
    settings = {"max_num_seqs": 64, "max_model_len": 1024, "show_progress": False}
    settings |= {"kv_cache_memory": args.kv_cache_memory, "enable_prefix_caching": False}
    settings |= {"dtype": args.dtype}
    plain = LLM(args.model, **settings)
    guessing = LLM(
        args.model, **settings, speculative=args.kind, speculative_model=args.head,
        speculative_steps=args.steps, speculative_topk=args.topk,
        speculative_adaptive=not args.fixed,
    )  # fmt: skip
    results = []
    for name, asked in (("held out", held_out()), ("written", written())):
        prompts = plain.chat_prompts([[{"role": "user", "content": text}] for text in asked])
        for batch, num_tries in BATCHES.items():
            groups = [prompts[i * batch % len(prompts) :][:batch] for i in range(num_tries)]
            results.append({"prompts": name, "batch": batch, **compare(plain, guessing, groups)})
            print(results[-1], flush=True)
    print(json.dumps({"commandline": vars(args), "results": results}))


def compare(plain: LLM, guessing: LLM, groups: list) -> dict:
    without, answers = measure(plain, groups)
    stats = guessing.engine.speculation
    before = stats.num_drafts, stats.num_accepted_tokens, stats.num_steps_by_width.copy()
    fast, guessed = measure(guessing, groups)
    rows, right = stats.num_drafts - before[0], stats.num_accepted_tokens - before[1]
    return {
        "without": round(without, 1),
        "with": round(fast, 1),
        "ratio": round(fast / without, 3),
        "accepted_length": round(1 + right / max(rows, 1), 3),
        "steps_by_width": dict(stats.num_steps_by_width - before[2]),
        "same": sum(a == b for a, b in zip(answers, guessed, strict=True)),
        "answers": len(answers),
    }


def measure(llm: LLM, groups: list) -> tuple[float, list[list[int]]]:
    """-> tokens per second over all groups, after one to warm up, and the answers"""
    llm.generate(groups[0], PARAMS, use_tqdm=False)
    start, answers = time.perf_counter(), []
    for group in groups:
        outputs = llm.generate(group, PARAMS, use_tqdm=False)
        answers += [output.outputs[0].token_ids for output in outputs]
    seconds = time.perf_counter() - start
    return sum(map(len, answers)) / seconds, answers


if __name__ == "__main__":
    main()
