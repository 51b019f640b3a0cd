"""What speculation brings: a model with and without an EAGLE-3 head, in one run.

    python benchmarks/h200/speculation.py [MODEL] [--head FOLDER] [--steps 4] [--topk 1]

Two sets of prompts, see prompts.py, through the chat template, greedy, end of text ignored: 128 to
384 tokens each, so that they do not all end at once. So many requests are answered together, 1, 8
or 64: whenever one ends, the next one comes, and time is taken until none is left that could come.
Prints a table, then one JSON line: tokens per second, tokens that a verification brings, how many
answers are the same to the last token, and how near to a tie the others part.
"""

import argparse
import json
import random
import time
from collections import deque
from dataclasses import replace

from prompts import held_out, written

from slotzero import LLM, SamplingParams

NUM_ASKED = {1: 32, 8: 64, 64: 320}  # by how many are answered together
PARAMS = SamplingParams(temperature=0, max_tokens=256, ignore_eos=True, detokenize=False)
LENGTHS = 128, 384


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--head", help="a folder; default: what comes with the model")
    parser.add_argument("--kind", default="eagle3")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--num-draft-tokens", type=int, help="of a tree, the newest one included")
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
    """How many answers differ from those without; and where they part, by how much at most what was
    chosen was likelier than what came second, in log probability"""
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
    """-> tokens per second while so many are answered together, and answers that ended then"""
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
