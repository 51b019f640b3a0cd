"""Speed of the default model on a CPU: Slotzero, transformers and, if installed, llama.cpp.

    python benchmarks/cpu_vs_transformers.py

All engines run in one process, in turn, on the same prompts: greedy, with a fixed number of new
tokens, best of `--rounds`. Slotzero runs the weights as they are in the file (Q4_1), which is its
default, and unpacked to the float32 weights that transformers has. Then the start-up time is
measured: from a new process to the first answer, with an empty and with a full cache. The last line
is JSON.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slotzero import LLM, SamplingParams
from slotzero.checkpoint.source import open_checkpoint

MODEL = "smollm2"
PROMPT_LEN = 32
BATCHES = (1, 8)
FIRST_ANSWER = [
    sys.executable, "-m", "slotzero", "generate", MODEL, "--temperature", "0",
    "--prompt", "What is the capital of France? Answer in one sentence.",
]  # fmt: skip

Generate = Callable[[list[list[int]], int], int]  # prompts, new tokens -> tokens generated


def slotzero_engine(quantization: str) -> Generate:
    llm = LLM(
        MODEL,
        quantization=quantization,
        max_num_seqs=max(BATCHES),
        max_model_len=2048,
        enable_prefix_caching=False,
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        batch = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(batch, params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return generate


def transformers_engine() -> Generate:
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = open_checkpoint(MODEL)
    model = LlamaForCausalLM(LlamaConfig(**dict(checkpoint.config))).eval()
    state = {name: checkpoint.read(name).float() for name in checkpoint.names()}
    model.load_state_dict(state, strict=False)
    model.tie_weights()

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        ids = torch.tensor(prompts)
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False,
                max_new_tokens=new_tokens, min_new_tokens=new_tokens, pad_token_id=0,
            )  # fmt: skip
        return int(out[:, ids.shape[1] :].numel())

    return generate


def llama_cpp_engine() -> Generate:
    from llama_cpp import Llama

    checkpoint: Any = open_checkpoint(MODEL)
    llama = Llama(str(checkpoint.path), n_ctx=2048, n_threads=os.cpu_count(), verbose=False)

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        made = 0
        for prompt in prompts:  # its Python API runs one sequence at a time
            llama.reset()
            for made_here, _ in enumerate(llama.generate(prompt, temp=0.0), start=1):
                if made_here == new_tokens:
                    made += made_here
                    break
        return made

    return generate


def tokens_per_second(generate: Generate, batch: int, new_tokens: int) -> float:
    rng = random.Random(batch)
    prompts = [[rng.randrange(10, 40000) for _ in range(PROMPT_LEN)] for _ in range(batch)]
    start = time.perf_counter()
    made = generate(prompts, new_tokens)
    assert made == batch * new_tokens
    return made / (time.perf_counter() - start)


def seconds_to_first_answer(cache: str) -> tuple[float, str]:
    start = time.perf_counter()
    environment = {**os.environ, "SLOTZERO_CACHE": cache}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # this process has set its own
    done = subprocess.run(FIRST_ANSWER, env=environment, check=True, capture_output=True, text=True)
    return time.perf_counter() - start, done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--skip-startup", action="store_true")
    arguments = parser.parse_args()

    engines: dict[str, Generate] = {
        "slotzero Q4_1": slotzero_engine("auto"),
        "slotzero float32": slotzero_engine("none"),
        "transformers": transformers_engine(),
    }
    if find_spec("llama_cpp"):
        engines["llama.cpp Q4_1"] = llama_cpp_engine()
    best: dict[str, dict[int, float]] = {name: dict.fromkeys(BATCHES, 0.0) for name in engines}
    for generate in engines.values():
        generate([[5] * PROMPT_LEN], 4)  # warm-up
    for _ in range(arguments.rounds):
        for name, generate in engines.items():
            for batch in BATCHES:
                rate = tokens_per_second(generate, batch, arguments.new_tokens)
                best[name][batch] = max(best[name][batch], rate)

    startup: dict[str, float] = {}
    if not arguments.skip_startup:
        with tempfile.TemporaryDirectory() as cache:
            for state in ("cold", "warm"):
                startup[state], answer = seconds_to_first_answer(cache)
                assert answer == "The capital of France is Paris.", answer

    table = Table(title=f"{MODEL}, tokens per second, best of {arguments.rounds}")
    for column in ("engine", *(f"batch {batch}" for batch in BATCHES)):
        table.add_column(column)
    for name, rates in best.items():
        table.add_row(name, *(f"{rates[batch]:.1f}" for batch in BATCHES))
    console = Console()
    console.print(table)
    for state, seconds in startup.items():
        console.print(f"first answer, {state} compile cache: {seconds:.1f} s")
    result = {
        "tokens_per_second": {
            name: {f"b{batch}": round(rate, 1) for batch, rate in rates.items()}
            for name, rates in best.items()
        },
        "speedup_over_transformers": {
            f"b{b}": round(best["slotzero Q4_1"][b] / best["transformers"][b], 2) for b in BATCHES
        },
        "seconds_to_first_answer": {state: round(s, 1) for state, s in startup.items()},
        "threads": torch.get_num_threads(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
