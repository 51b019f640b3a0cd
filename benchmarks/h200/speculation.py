"""Speed-up by speculation: a model with and without an EAGLE-3 head, in one run.

    python benchmarks/h200/speculation.py [MODEL] [--head FOLDER] [--steps 4] [--topk 1]

The two sets of prompts in prompts.py go through the chat template. Answers are greedy and ignore
the end of text; they have 128 to 384 tokens, so that they do not all end at once. 1, 8 or 64
requests run at a time: whenever one ends, the next one starts, and time is taken until no request
is left to start. The script prints a table, then one line of JSON: tokens per second, tokens per
verification, how many answers are identical to the last token, and how close to a tie the others
diverge.
"""

import argparse
import json
import random
import time
from collections import deque
from dataclasses import replace

from prompts import held_out, written

from slotzero import LLM, SamplingParams

NUM_ASKED = {1: 32, 8: 64, 64: 320}  # number of requests, by how many run at a time
PARAMS = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False)
LENGTHS = 128, 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--head", help="folder of the head (default: the model's own)")
    parser.add_argument("--kind", default="eagle3")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument(
        "--num-draft-tokens", type=int, help="nodes of a draft tree, including the newest token"
    )
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--fixed", action="store_true", help="always draft, even if it is slower")
    parser.add_argument("--kv-cache-memory", type=int, default=8 << 30)
    args = parser.parse_args()
    settings = {"max_num_seqs": 64, "max_model_len": 1024, "show_progress": False}
    settings |= {"kv_cache_memory": args.kv_cache_memory, "enable_prefix_caching": False}
    settings |= {"dtype": args.dtype}
    plain = LLM(args.model, **settings)
    guessing = LLM(
        args.model, **settings, speculative=args.kind, speculative_model=args.head,
        speculative_steps=args.steps, speculative_topk=args.topk,
        speculative_num_draft_tokens=args.num_draft_tokens,
        speculative_adaptive=not args.fixed,
    )  # fmt: skip
    results = []
    for name, asked in (("held out", held_out()), ("written", written())):
        prompts = plain.chat_prompts([[{"role": "user", "content": text}] for text in asked])
        for batch, num in NUM_ASKED.items():
            asked = [prompt["prompt_token_ids"] for prompt in (prompts * num)[:num]]
            results.append({"prompts": name, "batch": batch})
            results[-1] |= compare(plain, guessing, asked, batch)
            print(results[-1], flush=True)
        results.append({"prompts": name, **part(plain, guessing, prompts)})
        print(results[-1], flush=True)
    print(json.dumps({"commandline": vars(args), "results": results}))


def compare(plain: LLM, guessing: LLM, prompts: list[list[int]], batch: int) -> dict:
    without, answers = measure(plain, prompts, batch)
    stats = guessing.engine.speculation
    before = stats.num_drafts, stats.num_accepted_tokens, stats.num_steps_by_width.copy()
    fast, guessed = measure(guessing, prompts, batch)
    rows, right = stats.num_drafts - before[0], stats.num_accepted_tokens - before[1]
    return {
        "without": round(without, 1),
        "with": round(fast, 1),
        "ratio": round(fast / without, 3),
        "accepted_length": round(1 + right / max(rows, 1), 3),
        "steps_by_width": dict(stats.num_steps_by_width - before[2]),
        "same": sum(answers[i] == guessed[i] for i in answers.keys() & guessed.keys()),
        "answers": len(answers.keys() & guessed.keys()),
    }


def part(plain: LLM, guessing: LLM, prompts: list) -> dict:
    """Count the answers that differ with speculation, and return how close to a tie they diverge.

    `largest_gap` is the largest difference in log probability between the two best tokens at the
    first difference.
    """
    params = replace(PARAMS, logprobs=2)
    all_answers = (llm.generate(prompts, params, use_tqdm=False) for llm in (plain, guessing))
    gaps = []
    for one, other in zip(*all_answers, strict=True):
        both = zip(one.outputs[0].token_ids, other.outputs[0].token_ids, strict=True)
        place = next((i for i, (a, b) in enumerate(both) if a != b), None)
        if place is not None:
            entries = one.outputs[0].logprobs[place].values()
            best, second = sorted((entry.logprob for entry in entries), reverse=True)
            gaps.append(best - second)
    return {"parted": len(gaps), "of": len(prompts), "largest_gap": round(max(gaps, default=0), 4)}


def measure(llm: LLM, prompts: list[list[int]], batch: int) -> tuple[float, dict[int, list[int]]]:
    """Return tokens per second with `batch` requests at a time, and the finished answers."""
    llm.generate([{"prompt_token_ids": p} for p in prompts[:batch]], PARAMS, use_tqdm=False)
    engine, waiting, answers = llm.engine, deque(enumerate(prompts)), {}
    rng = random.Random(0)
    start = time.perf_counter()
    while True:
        while waiting and engine.schedulers.num_running + engine.schedulers.num_waiting < batch:
            i, prompt = waiting.popleft()
            params = replace(PARAMS, max_tokens=rng.randint(*LENGTHS))
            answers[i] = engine.add(f"asked-{i}", prompt, params)
        if engine.schedulers.num_running + engine.schedulers.num_waiting < batch:
            break
        engine.step()
    seconds = time.perf_counter() - start
    num_tokens = sum(len(answer.token_ids) for answer in answers.values())
    ended = {i: answer.token_ids for i, answer in answers.items() if answer.finished}
    for i in answers.keys() - ended.keys():
        engine.cancel(f"asked-{i}")
    while engine.has_work:
        engine.step()
    return num_tokens / seconds, ended


if __name__ == "__main__":
    main()
