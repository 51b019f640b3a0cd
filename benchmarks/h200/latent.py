"""MLA: a decode step against the bandwidth limit, and prefill attention in both of its forms.

    python benchmarks/h200/latent.py [--heads 16 128] [--rows 1 16 64 256] [--contexts 1024 8192]
    python benchmarks/h200/latent.py --prefill [--heads 16 128] [--chunks 512 2048+8192]

Decode runs four dense layers in DeepSeek-V3's shape with random weights: once with all 128 heads,
where decode is limited by arithmetic (240 operations per byte), and once with 16 heads and an
eighth of the MLPs and the vocabulary, which is the share of one of eight GPUs. The limit is the
time to read all weights and the whole KV cache once. `kv_of_limit` concerns only the KV cache: it
compares the limit with the additional time over a step with an almost empty context.

Prefill runs `mla_attention` of one layer over one row. A chunk is given as its number of tokens,
with +N if N tokens are already stored. Both forms are timed on the same values, including their
matrix products. TFLOP/s count the arithmetic of each form, and `differ` is the difference between
the two results. The script prints a line for each case, then one line of JSON.
"""

import argparse
import gc
import json

import torch
from stack import apart, open_stack, step_seconds
from torch import Tensor

from slotzero.bench.clock import device_seconds
from slotzero.kernels.triton.attention import mla_prefill
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.types import Heads, MlaShape, MlaWeights, PagedKv, Rows, Tokens

LAYERS, REPEATS, SHORT = 4, 7, 16
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": LAYERS,
    "first_k_dense_replace": LAYERS,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "topk_group": 4,
    "max_position_embeddings": 40000,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}
SPLIT = {"intermediate_size": 18432, "vocab_size": 129280}  # with all 128 heads
PLAIN, TURNED, LATENT, RESULT = (
    CONFIG[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "v_head_dim")
)
FORMS = {"absorbed": 1 << 30, "expanded": 1}  # the length of a row from which it is expanded
DEVICE, DTYPE, PAGE, ROWS = torch.device("cuda"), torch.bfloat16, 16, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256])
    parser.add_argument("--contexts", nargs="+", type=int, default=[1024, 8192, 32768])
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--chunks", nargs="+", default=["512", "2048", "8192", "2048+8192"])
    parser.add_argument("--kv-cache-memory", type=int, default=60 << 30)
    args = parser.parse_args()
    results = []
    if args.prefill:
        print("| heads | tokens | before | absorbed | expanded | faster | differ |")
        print("|---|---|---|---|---|---|---|")
    for heads in args.heads:
        if args.prefill:
            results += chunks(heads, args.chunks)
            gc.collect()
            torch.cuda.empty_cache()
        else:
            results += apart(measure, heads, args)
    print(json.dumps({"commandline": vars(args), "results": results}))


def measure(heads: int, args: argparse.Namespace) -> list[dict]:
    config = {**CONFIG, "num_attention_heads": heads, "num_key_value_heads": heads}
    config |= {name: size * heads // 128 for name, size in SPLIT.items()}
    session = open_stack(
        config,
        max_num_seqs=max(args.rows),
        kv_cache_memory=args.kv_cache_memory,
        max_model_len=max(args.contexts) + 8,
    )
    results = []
    for rows in args.rows:
        least = session.least_seconds([0] * rows)
        empty = step_seconds(session, rows, SHORT)
        for context in args.contexts:
            spent = step_seconds(session, rows, context)
            if spent is None or empty is None:
                continue
            limit = session.least_seconds([context] * rows)
            results.append(
                {
                    "heads": heads,
                    "rows": rows,
                    "context": context,
                    "ms": round(1000 * spent, 4),
                    "of_limit": round(limit / spent, 3),
                    "kv_of_limit": round((limit - least) / max(spent - empty, 1e-9), 3),
                }
            )
            print(results[-1], flush=True)
    return results


def chunks(num_heads: int, named: list[str]) -> list[dict]:
    results = []
    for name in named:
        tokens, before = (int(part) for part in f"{name}+0".split("+")[:2])
        chunk, outs = Chunk(num_heads, tokens, before), {}
        result = {"heads": num_heads, "tokens": tokens, "before": before}
        for form, least in FORMS.items():
            mla_prefill.LEAST = least
            spent, outs[form] = chunk.seconds()
            result |= {f"{form}_ms": round(1000 * spent, 4)}
            result |= {f"{form}_tflops": round(operations(chunk, form) / spent / 1e12, 1)}
        result["faster"] = round(result["absorbed_ms"] / result["expanded_ms"], 2)
        gap = (outs["absorbed"] - outs["expanded"]).norm() / outs["absorbed"].norm()
        result["differ"] = round(float(gap), 5)
        print(
            "| {heads} | {tokens:,} | {before:,} | {absorbed_ms} ms, {absorbed_tflops} TFLOP/s | "
            "{expanded_ms} ms, {expanded_tflops} TFLOP/s | {faster} | {differ} |".format(**result),
            flush=True,
        )
        results.append(result)
    return results


def operations(chunk: "Chunk", form: str) -> int:
    """Count the operations of attention and of the form's products, two per multiply-add."""
    own, before = chunk.tokens * (chunk.tokens + 1) // 2, chunk.tokens * chunk.before
    absorbed, expanded = TURNED + 2 * LATENT, PLAIN + TURNED + RESULT
    products = chunk.tokens * LATENT * (PLAIN + RESULT)
    each = (own + before) * absorbed + products
    if form == "expanded":
        each = own * expanded + before * absorbed + 2 * products
    return 2 * chunk.heads.num_heads * each


class Chunk:
    """One row of tokens with its stored context, padded rows, and the weights of a layer."""

    def __init__(self, num_heads: int, tokens: int, before: int) -> None:
        size, self.tokens, self.before = TURNED + LATENT, tokens, before
        shape = MlaShape(PLAIN, TURNED, RESULT)
        self.heads = Heads(num_heads, 1, size, LATENT, 1e-6, (PLAIN + TURNED) ** -0.5, mla=shape)
        pages = -(-(before + tokens) // PAGE)
        table = torch.zeros(2, pages, dtype=torch.int32, device=DEVICE)
        table[1] = torch.randperm(pages, device=DEVICE) + 1
        self.q, self.k = noise(tokens, num_heads * (PLAIN + TURNED)), noise(tokens, size)
        self.weights = MlaWeights(
            noise(LATENT),
            noise(num_heads, PLAIN, LATENT) * LATENT**-0.5,
            noise(num_heads, RESULT, LATENT) * LATENT**-0.5,
        )
        self.kv = PagedKv(noise(pages + 1, PAGE, 1, size), table)
        columns = torch.zeros(4, ROWS, dtype=torch.int32, device=DEVICE)
        columns[:, 0] = torch.tensor([1, before, tokens, tokens], device=DEVICE)
        columns[3] = tokens
        self.rows, place = Rows(*columns), torch.arange(tokens, device=DEVICE)
        self.places = Tokens(torch.ones_like(place).int(), (before + place).int())

    def seconds(self) -> tuple[float, Tensor]:
        kernels = TritonKernels()
        frequency = 10000.0 ** -torch.arange(0, 1, 2 / TURNED, device=DEVICE)
        angles = kernels.rope_angles(self.places, frequency, 1.0)
        plan = kernels.plan(self.places, self.rows, self.heads)

        def call() -> Tensor:
            return kernels.mla_attention(
                self.q, self.k, self.weights, angles, self.kv, plan, self.heads
            )

        out = call().float()
        return device_seconds(call, lambda: None, REPEATS, DEVICE, lead=0.05), out


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


if __name__ == "__main__":
    main()
