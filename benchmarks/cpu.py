"""Speed of the default model on a CPU: Slotzero, llama.cpp (if installed) and transformers.

    benchmarks/install_llama_cpp.sh            # once; without it, the other two are compared
    python benchmarks/cpu.py

Engines take turns on the same prompts: greedy, with a fixed number of new tokens, the median of
`--rounds`. Slotzero and llama.cpp run the weights as they are in the file (Q4_1), transformers in
float32. Then one request is measured beside a busy loop, and the start of a new process: from the
command to the first token, with an empty and with a full cache, and the most memory that it held.
The last line is JSON.
"""

import argparse
import json
import os
import platform
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from slotzero import LLM, SamplingParams
from slotzero.bench.hardware import cpu_name
from slotzero.checkpoint.source import open_checkpoint
from slotzero.system.cache_dir import cache_dir
from slotzero.system.processors import num_processors

MODEL = "smollm2"
PROMPT_LEN = 128
HERE = Path(__file__).parent
FIRST_ANSWER = [
    sys.executable, "-m", "slotzero", "generate", MODEL, "--temperature", "0", "--max-tokens", "1",
    "--prompt", "What is the capital of France? Answer in one word.",
]  # fmt: skip

Generate = Callable[[list[list[int]], int], int]  # prompts, new tokens -> tokens generated


def slotzero_engine() -> Generate:
    llm = LLM(MODEL, max_num_seqs=8, max_model_len=2048, enable_prefix_caching=False)

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


def llama_cpp_engine(python: Path, has_extra_buffers: bool) -> Generate:
    checkpoint: Any = open_checkpoint(MODEL)
    words = [str(checkpoint.path), str(num_processors()), str(int(has_extra_buffers))]
    process = subprocess.Popen(
        [str(python), str(HERE / "llama_cpp_engine.py"), *words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    assert process.stdin is not None and process.stdout is not None

    def generate(prompts: list[list[int]], new_tokens: int) -> int:
        made = 0
        for prompt in prompts:  # its Python API runs one sequence at a time
            process.stdin.write(json.dumps([prompt, new_tokens]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
            if not answer:
                raise ChildProcessError(f"llama.cpp ended with code {process.wait()}")
            made += int(answer)
        return made

    return generate


def working_llama_cpp(python: Path) -> tuple[str, Generate]:
    """Return llama.cpp, without repacked weights if its code for them crashes on this machine."""
    for has_extra_buffers in (True, False):
        generate = llama_cpp_engine(python, has_extra_buffers)
        try:
            generate([[5] * PROMPT_LEN], 4)
        except (ChildProcessError, BrokenPipeError) as error:
            print(f"{error}; extra buffers: {has_extra_buffers}", file=sys.stderr)
            continue
        return "llama.cpp" + ("" if has_extra_buffers else " (no extra buffers)"), generate
    raise SystemExit("llama.cpp does not run on this machine")


ROWS: dict[str, tuple[int, int, int]] = {  # requests, tokens in, tokens out
    "1 request": (1, PROMPT_LEN, 128),
    "8 requests": (8, PROMPT_LEN, 128),
    "prompt of 512": (1, 512, 1),
    "prompt of 1024": (1, 1024, 1),
}


def tokens_per_second(generate: Generate, row: str, seed: int) -> float:
    """Return new tokens per second, or tokens of the prompt if there is one new token."""
    num, length, new_tokens = ROWS[row]
    rng = random.Random(f"{row} {seed}")
    prompts = [[rng.randrange(10, 40000) for _ in range(length)] for _ in range(num)]
    start = time.perf_counter()
    made = generate(prompts, new_tokens)
    seconds = time.perf_counter() - start
    assert made == num * new_tokens
    return (length if new_tokens == 1 else made) / seconds


def measured(engines: dict[str, Generate], rows: list[str], rounds: int) -> dict[str, Any]:
    """Return the median of each engine and row; engines take turns."""
    rates: dict[str, dict[str, list[float]]] = {n: {r: [] for r in rows} for n in engines}
    for seed in range(rounds):
        for row in rows:
            for name, generate in engines.items():
                rates[name][row].append(tokens_per_second(generate, row, seed))
    return {
        name: {row: round(statistics.median(its), 1) for row, its in by_row.items()}
        for name, by_row in rates.items()
    }


def beside_a_busy_loop(engines: dict[str, Generate], rounds: int) -> dict[str, Any]:
    loop = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        return measured(engines, ["1 request"], rounds)
    finally:
        loop.kill()
        loop.wait()


def first_answer(cache: str) -> dict[str, float]:
    """Return the seconds to the first token of a new process, and the MB that it held at most."""
    start = time.perf_counter()
    process = subprocess.Popen(
        FIRST_ANSWER, env={**os.environ, "SLOTZERO_CACHE": cache}, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    seconds = time.perf_counter() - start
    # not by ru_maxrss: that of a child begins with what its parent holds
    status = Path(f"/proc/{process.pid}/status").read_text()
    peak = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert peak is not None and process.wait() == 0
    return {"seconds": round(seconds, 1), "peak_mb": round(int(peak[1]) / 1024)}


def table_of(result: dict[str, Any]) -> Table:
    table = Table(title=f"{MODEL}, tokens per second")
    engines = list(result["tokens_per_second"])
    for column in ("", *engines):
        table.add_column(column)
    for row in ROWS:
        table.add_row(row, *(f"{result['tokens_per_second'][name][row]:.1f}" for name in engines))
    loop = result["beside_a_busy_loop"]
    table.add_row("1 request, busy loop", *(f"{loop[name]['1 request']:.1f}" for name in engines))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--llama-cpp", type=Path, default=cache_dir() / "llama-cpp")
    parser.add_argument("--skip-startup", action="store_true")
    arguments = parser.parse_args()

    engines = {"slotzero": slotzero_engine()}
    if (python := arguments.llama_cpp / "bin" / "python").exists():
        name, generate = working_llama_cpp(python)
        engines[name] = generate
    engines["transformers"] = transformers_engine()
    for generate in engines.values():
        generate([[5] * PROMPT_LEN], 4)  # warm-up
    result: dict[str, Any] = {
        "tokens_per_second": measured(engines, list(ROWS), arguments.rounds),
        "beside_a_busy_loop": beside_a_busy_loop(engines, arguments.rounds),
    }
    if not arguments.skip_startup:
        with tempfile.TemporaryDirectory() as cache:
            result["first_answer"] = {state: first_answer(cache) for state in ("empty", "full")}
    result |= {
        "threads": num_processors(),
        "cpu": cpu_name(),
        "machine": platform.machine(),
        "versions": {name: version(name) for name in ("torch", "transformers")},
    }
    console = Console()
    console.print(table_of(result))
    for state, seen in result.get("first_answer", {}).items():
        console.print(f"first token, {state} cache: {seen['seconds']} s, {seen['peak_mb']} MB")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
