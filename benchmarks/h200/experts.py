"""Experts of an MoE layer: our kernels, a plain loop over experts, and the bandwidth limit.

    python benchmarks/h200/experts.py [--rows 1 16 64 256 1024 4096]

The shapes are a layer of gpt-oss-20b (32 experts, 4 chosen per token) and one of DeepSeek-V2-Lite
(64 experts, 6 chosen, 2 shared). Weights and tokens are random, in bfloat16 on a GPU. Our kernels
run in a captured graph, as in a step; the loop reads the chosen experts on the host, as plain torch
must. The limit is the time to read the weights of all chosen experts once. The script prints a line
for each case, then JSON.
"""

import argparse
import json
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.bench.clock import device_seconds
from slotzero.bench.hardware import read_bandwidth
from slotzero.kernels.contract import kernels_for
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.types import Experts, ExpertWeights, Normed
from slotzero.kernels.weights import DenseWeight, LinearWeight

SHAPES = {
    "gpt-oss-20b": (2880, Experts(32, 4, 2880, "clamped_silu", scores="softmax_of_chosen")),
    "DeepSeek-V2-Lite": (2048, Experts(64, 6, 1408, "silu", scores="softmax", num_shared=2)),
}
REPEATS = 9
REFERENCE = ReferenceKernels()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 16, 64, 256, 1024, 4096])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    device = torch.device(args.device)
    bandwidth, results = read_bandwidth(device), []
    for name, (hidden, shape) in SHAPES.items():
        weights = random_weights(hidden, shape, device)
        for rows in args.rows:
            results.append(
                {"shape": name, "rows": rows, **measure(weights, rows, shape, bandwidth)}
            )
            print(results[-1], flush=True)
    print(json.dumps({"commandline": vars(args), "bandwidth": bandwidth, "results": results}))


def random_weights(hidden: int, shape: Experts, device: torch.device) -> ExpertWeights:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def drawn(*size: int) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(0, 0.02)

    num, inner = shape.num_all, shape.inner_size
    has_bias = shape.activation == "clamped_silu"
    return ExpertWeights(
        # large router weights, so that tokens choose different experts
        router=DenseWeight(drawn(shape.num_experts, hidden) * 50, None, shape.num_experts),
        correction=None,
        gate_up=DenseWeight(
            drawn(num, 2 * inner, hidden), drawn(num, 2 * inner) if has_bias else None, 2 * inner
        ),
        down=DenseWeight(
            drawn(num, hidden, inner), drawn(num, hidden) if has_bias else None, hidden
        ),
    )


def measure(weights: ExpertWeights, rows: int, shape: Experts, bandwidth: float) -> dict:
    down = weights.down.data
    kernels, device = kernels_for(down.device), down.device
    x = torch.randn(rows, down.shape[1], device=device).to(down.dtype)
    slots = torch.ones(rows, dtype=torch.int32, device=device)

    def pack(weight: LinearWeight) -> LinearWeight:
        return weight._replace(data=kernels.pack(weight.data))

    packed = weights._replace(
        router=pack(weights.router), gate_up=pack(weights.gate_up), down=pack(weights.down)
    )
    starts = torch.zeros(shape.num_all + 1, dtype=torch.int32, device=device)

    def ours() -> Tensor:
        routed = kernels.route(Normed(x), slots, packed, shape)
        return kernels.experts(routed, packed, shape, starts)

    with torch.inference_mode():
        plain = partial(loop, x, weights, shape)
        got, expected = ours(), plain()
        error = float((got - expected).float().norm() / expected.float().norm())
        graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if graph is not None:
            with torch.cuda.graph(graph):
                ours()
        run = ours if graph is None else graph.replay
        fast = device_seconds(run, _nothing, REPEATS, device, lead=0.01)
        slow = device_seconds(plain, _nothing, REPEATS, device)
        chosen = REFERENCE.route(Normed(x), slots, weights, shape).experts
    each = weights.gate_up.data[0].numel() + down[0].numel()
    read = len(chosen.unique()) * each * down.itemsize
    flops = 2 * chosen.numel() * each
    return {
        "ms": round(1000 * fast, 4),
        "loop_ms": round(1000 * slow, 4),
        "limit_ms": round(1000 * read / bandwidth, 4),
        "of_limit": round(read / bandwidth / fast, 3),
        "tflops": round(flops / fast / 1e12, 1),
        "error": round(error, 5),
    }


def loop(x: Tensor, weights: ExpertWeights, shape: Experts) -> Tensor:
    _, by_expert, chosen = REFERENCE.route(Normed(x), torch.ones_like(x[:, 0]), weights, shape)
    out = torch.zeros_like(x)
    for expert in chosen.unique().tolist():
        token, place = (chosen == expert).nonzero(as_tuple=True)
        up = None if weights.gate_up.bias is None else weights.gate_up.bias[expert]
        down = None if weights.down.bias is None else weights.down.bias[expert]
        joined = F.linear(x[token], weights.gate_up.data[expert], up)
        inner = REFERENCE.gate(*joined.chunk(2, -1), shape.activation)
        result = F.linear(inner, weights.down.data[expert], down)
        out.index_add_(0, token, result * by_expert[token, place, None].to(result.dtype))
    return out


def _nothing() -> None:
    """Prepare nothing before a call."""


if __name__ == "__main__":
    main()
