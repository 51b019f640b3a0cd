"""Recurrent mixers: a decode step against the bandwidth limit, and prompts against plain torch.

    python benchmarks/h200/recurrent.py [--shapes Falcon-H1-1.5B ...] [--rows 1 64 256]
        [--prompts 512 8192 16x512] [--drafts 4] [--models Falcon-H1-1.5B ...]

A mixer runs convolve, scan and gate_norm on random inputs: everything a recurrent layer does
besides its matrix products.

Decode runs in a captured graph, over enough layers to exceed the GPU's cache; times are per layer.
The limit is the time to read and write all states once, at the measured bandwidth. With `--drafts`,
that many tokens per row are computed into a trail; the limit is then the time to read the states
and to write the states after every token.

Prompts are the rows of one step (16x512: sixteen prompts of 512 tokens). Plain torch computes token
by token, and is timed over the first few tokens.

Models run a whole decode step: all products, experts, and attention over a context of 1,024 tokens.
Qwen3-Next runs with the first 12 of its 48 layers, which fit one GPU. The limit is the time to read
the weights and the KV cache once, and to read and write all states.

The script prints a table of each, then one line of JSON. To try it on a CPU: TRITON_INTERPRET=1
python benchmarks/h200/recurrent.py --shapes small-mamba small-delta --rows 1 2 --prompts 2x40.
"""

import argparse
import gc
import json
from collections.abc import Callable, Iterable

import torch
from stack import apart, open_stack, step_seconds
from torch import Tensor

from slotzero.bench.clock import device_seconds
from slotzero.bench.hardware import read_bandwidth
from slotzero.kernels.contract import Kernels
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States, Trail

SHAPES = {
    "Falcon-H1-1.5B": Scan("mamba", 48, 64, 1, 256, 4),
    "Nemotron-H-8B": Scan("mamba", 128, 64, 8, 128, 4),
    "Qwen3-Next-80B": Scan("delta", 32, 128, 16, 128, 4),
    "small-mamba": Scan("mamba", 2, 16, 1, 16, 4),
    "small-delta": Scan("delta", 2, 16, 1, 16, 4),
}
MODELS = {
    "Falcon-H1-1.5B": {
        "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1",
        "num_hidden_layers": 24, "hidden_size": 2048, "intermediate_size": 4096,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 256, "mamba_d_ssm": 3072,
        "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256,
        "vocab_size": 65537, "max_position_embeddings": 131072, "rope_theta": 1e11,
        "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16",
    },
    "Qwen3-Next-80B": {
        "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next",
        "num_hidden_layers": 12, "hidden_size": 2048, "intermediate_size": 5120,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
        "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
        "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
        "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1,
        "partial_rotary_factor": 0.25, "vocab_size": 151936, "max_position_embeddings": 262144,
        "rope_theta": 1e7, "rms_norm_eps": 1e-6, "hidden_act": "silu", "torch_dtype": "bfloat16",
    },
}  # fmt: skip
CONTEXT = 1024
COLD_BYTES, MOST_LAYERS, REPEATS, PLAIN_TOKENS, EPS = 256 << 20, 64, 9, 64, 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=[*SHAPES][:3])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 256])
    parser.add_argument("--prompts", nargs="+", default=["512", "2048", "8192", "16x512"])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    bandwidth, results = read_bandwidth(device), []
    with torch.inference_mode():
        for name in args.shapes:
            steps = ((rows, drafts) for rows in args.rows for drafts in (0, args.drafts))
            results += table(decode(name, *step, device, bandwidth) for step in steps)
            results += table(prefill(name, prompt, device) for prompt in args.prompts)
    gc.collect()
    torch.cuda.empty_cache()
    for name in args.models:
        results += table(apart(whole, name, args.rows))
    print(json.dumps({"commandline": vars(args), "bandwidth": bandwidth, "results": results}))


def table(measured: Iterable[dict]) -> list[dict]:
    """Print the results as a table, each as soon as it is measured, and return them."""
    results: list[dict] = []
    for result in measured:
        if not results:
            print(f"\n| {' | '.join(result)} |\n{'|---' * len(result)}|")
        results.append(result)
        print(f"| {' | '.join(f'{value}' for value in result.values())} |", flush=True)
    return results


class Mixer:
    """The weights of one layer, and the states of one layer or of many."""

    def __init__(self, shape: Scan, slots: int, layers: int, device: torch.device) -> None:
        self.shape, self.device = shape, device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.states = [
            States(
                self.drawn(slots + 1, *shape.conv_shape),
                self.drawn(slots + 1, *shape.scan_shape).float(),
            )
            for _ in range(layers)
        ]
        self.weight = self.drawn(shape.channels, shape.conv_width)
        self.bias, self.norm = self.drawn(shape.channels), self.drawn(shape.inner_size)
        self.heads = torch.rand(3, shape.num_heads, device=device) - 2  # a_log, dt_bias, d

    def drawn(self, *size: int) -> Tensor:
        return torch.randn(size, device=self.device, dtype=self.dtype)

    def inputs(self, num: int) -> tuple[Tensor, ...]:
        """Return slices of a joined product: gates of the norm, channels, gates of heads, beta."""
        sizes = [self.shape.inner_size, self.shape.channels, *[self.shape.num_heads] * 2]
        return self.drawn(num, sum(sizes)).split(sizes, dim=1)

    def run(
        self, kernels: Kernels, inputs: tuple[Tensor, ...], tokens: Tokens, rows: Rows | None,
        states: States, trail: Trail | None = None,
    ) -> Tensor:  # fmt: skip
        shape, (closing, x, gates, beta), (a_log, dt_bias, d) = self.shape, inputs, self.heads
        is_delta = shape.kind == "delta"
        step = RecurrentStep(tokens, rows, states, trail)
        mixed = kernels.convolve(x, self.weight, self.bias, step, shape)
        weights = ScanWeights(a_log, dt_bias, None if is_delta else d)
        y = kernels.scan(mixed, gates, beta if is_delta else None, weights, step, shape)
        group = shape.head_dim if is_delta else shape.inner_size
        return kernels.gate_norm(y, closing, self.norm[:group], EPS, group, not is_delta)


def decode(name: str, rows: int, drafts: int, device: torch.device, bandwidth: float) -> dict:
    shape, span = SHAPES[name], drafts or 1
    conv, scan = torch.Size(shape.conv_shape).numel(), torch.Size(shape.scan_shape).numel()
    each = conv * (2 if device.type == "cuda" else 4) + scan * 4
    layers = min(MOST_LAYERS, -(-COLD_BYTES // (rows * each))) if device.type == "cuda" else 1
    mixer, kernels = Mixer(shape, rows, layers, device), TritonKernels()
    slots = torch.arange(1, rows + 1, device=device, dtype=torch.int32)
    tokens = Tokens(slots.repeat_interleave(span), torch.full_like(slots, 9).repeat(span))
    given, trail = None, None
    if drafts:
        trail = Trail(
            mixer.drawn(rows, span, *shape.conv_shape),
            mixer.drawn(rows, span, *shape.scan_shape).float(),
        )
        tokens = tokens._replace(positions=9 + torch.arange(span, device=device).int().repeat(rows))
        counts = torch.full_like(slots, span)
        given = Rows(slots, torch.full_like(slots, 9), counts, slots * span, span)
    inputs = mixer.inputs(rows * span)

    def call() -> None:
        for states in mixer.states:
            mixer.run(kernels, inputs, tokens, given, states, trail)

    spent = seconds(call, device) / layers
    limit = rows * each * (1 + span) / bandwidth
    return {
        "shape": name,
        "rows": rows,
        "drafts": drafts,
        "us": round(1e6 * spent, 2),
        "limit_us": round(1e6 * limit, 2),
        "of_limit": round(limit / spent, 3),
    }


def whole(name: str, rows: list[int]) -> list[dict]:
    session = open_stack(MODELS[name], max_num_seqs=max(rows), max_model_len=2 * CONTEXT)
    spent = {num: step_seconds(session, num, CONTEXT) for num in rows}
    return [
        {
            "model": name,
            "rows": num,
            "ms": round(1000 * seconds, 4),
            "of_limit": round(session.least_seconds([CONTEXT] * num) / seconds, 3),
        }
        for num, seconds in spent.items()
        if seconds is not None
    ]


def prefill(name: str, prompt: str, device: torch.device) -> dict:
    rows, size = (int(part) for part in f"1x{prompt}".split("x")[-2:])
    mixer, num = Mixer(SHAPES[name], rows, 1, device), rows * size
    inputs = mixer.inputs(num)

    def step(count: int) -> tuple[Tokens, Rows]:
        slots = torch.arange(1, rows + 1, device=device, dtype=torch.int32)
        counts, places = torch.full_like(slots, count), torch.arange(count, device=device).int()
        tokens = Tokens(slots.repeat_interleave(count), places.repeat(rows))
        return tokens, Rows(slots, torch.zeros_like(slots), counts, slots * count)

    kernels, plain = TritonKernels(), ReferenceKernels()
    (tokens, given), few = step(size), max(1, min(size, PLAIN_TOKENS // rows))
    first = torch.arange(rows, device=device)[:, None] * size + torch.arange(few, device=device)
    short = tuple(part[first.flatten()] for part in inputs)
    spent = seconds(lambda: mixer.run(kernels, inputs, tokens, given, mixer.states[0]), device)
    slow = device_seconds(
        lambda: mixer.run(plain, short, *step(few), mixer.states[0]), _nothing, 1, device
    )
    got = mixer.run(kernels, inputs, tokens, given, mixer.states[0])[first.flatten()].float()
    want = mixer.run(plain, short, *step(few), mixer.states[0]).float()
    return {
        "shape": name,
        "prompt": prompt,
        "ms": round(1000 * spent, 3),
        "tokens_per_second": round(num / spent),
        "plain_tokens_per_second": round(rows * few / slow),
        "error": round(float((got - want).norm() / want.norm()), 5),
    }


def seconds(call: Callable[[], object], device: torch.device) -> float:
    """Time a call, in a captured graph if there is a GPU."""
    call()
    if device.type != "cuda":
        return device_seconds(call, _nothing, 1, device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return device_seconds(graph.replay, _nothing, REPEATS, device, lead=0.01)


def _nothing() -> None:
    """Prepare nothing before a call."""


if __name__ == "__main__":
    main()
