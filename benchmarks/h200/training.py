"""What evaluation and training cost on a GPU: log probabilities of prompts, and new weights.

    python benchmarks/h200/training.py path/to/llama-3.1-8b [--out training.json]

Sections, each in its own process:

- `scores`: prompts through prefill alone, and with the log probabilities of all their tokens.
- `update`: the time to replace all weights by tensors that are on the GPU already, and how many
  sizes are captured again. That answers are those of a new engine is tested, not measured.

Weights are random. The script prints a line for each result, then JSON. --small tries everything
with tiny sizes, on any machine.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from stack import apart

from slotzero import LLM, SamplingParams
from slotzero.bench.workloads import fixed

REPEATS = 3
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, detokenize=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--only", nargs="+", choices=RUN, default=list(RUN))
    parser.add_argument("--small", action="store_true", help="try everything with tiny sizes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    for section in args.only:
        results[section] = apart(RUN[section], args.model, args.small)
        print(f"{section}: {json.dumps(results[section])}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results))


def opened(model: Path, is_small: bool, **settings: Any) -> LLM:
    settings |= {"max_num_seqs": 4} if is_small else {}
    return LLM(
        str(model), load_format="dummy", skip_tokenizer_init=True, enable_prefix_caching=False,
        show_progress=False, kv_cache_memory=(1 << 28) if is_small else (32 << 30), **settings,
    )  # fmt: skip


def scores(model: Path, is_small: bool) -> dict[str, float]:
    """Return the seconds of prefill without and with log probabilities, better of some runs."""
    llm = opened(model, is_small)
    workload = fixed(4, 24, 1, 200) if is_small else fixed(64, 2048, 1)
    prompts: list[Any] = [{"prompt_token_ids": prompt} for prompt in workload.prompts]
    found = {}
    for name, given in (("prefill", {}), ("with log probabilities", {"prompt_logprobs": 0})):
        params = SamplingParams(temperature=0.0, max_tokens=1, detokenize=False, **given)
        times = []
        for _ in range(1 + REPEATS):  # sizes are captured in the first
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times.append(time.perf_counter() - start)
        found[name] = round(min(times[1:]), 3)
    found["ratio"] = round(found["with log probabilities"] / found["prefill"], 3)
    return found


def update(model: Path, is_small: bool) -> dict[str, Any]:
    llm = opened(model, is_small, dtype="auto")
    weights = dict(drawn(model, llm.engine.worker.registry.device))
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    prompts: list[Any] = [{"prompt_token_ids": list(range(20, 52))}] * 2
    before = llm.generate(prompts, GREEDY, use_tqdm=False)
    num_sizes, times = len(llm.engine.worker.recorded_keys), []
    for _ in range(REPEATS):
        start = time.perf_counter()
        llm.update_weights(weights)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    after = llm.generate(prompts, GREEDY, use_tqdm=False)
    return {
        "GB": round(num_bytes / 1e9, 2),
        "seconds": [round(t, 3) for t in times],
        "sizes recorded again": len(llm.engine.worker.recorded_keys) - num_sizes,
        "answers changed": before[0].outputs[0].token_ids != after[0].outputs[0].token_ids,
    }


def drawn(model: Path, device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield random weights under the names of a checkpoint, as a trainer on the same GPU holds
    them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model)
        made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator(device).manual_seed(1)
    for name, parameter in made.named_parameters():
        shape, on = parameter.shape, {"device": device, "dtype": torch.bfloat16}
        yield name, torch.empty(shape, **on).normal_(0.0, 0.02, generator=generator)


RUN = {"scores": scores, "update": update}

if __name__ == "__main__":
    main()
