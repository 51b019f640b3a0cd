"""Decode attention as a share of the memory bandwidth: in chunks (decode.py) and with stream-K.

    python benchmarks/h200/attention.py [--models llama qwen gemma gpt-oss] [--rows 64 256]
        [--contexts 384 1000 mixed] [--lines 4/32/2/3/2 8/32/1/2/4]

A share is the bytes of KV that are read, per second, divided by the measured bandwidth. The context
"mixed" has 100 to 2,000 tokens per row. `--lines` tries stream-K with other parameters: programs
per processor / keys / warps / stages / cost of a row. The script prints a table, then one line of
JSON. To try it on a CPU, set TRITON_INTERPRET=1.
"""

import argparse
import json

import torch

from slotzero.bench.clock import device_seconds
from slotzero.bench.hardware import read_bandwidth
from slotzero.kernels.triton.attention import decode, decode_stream_k
from slotzero.kernels.triton.launch import compiling_ahead
from slotzero.kernels.types import Angles, Heads, PagedKv, QkNorms

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
MODELS = {  # heads, KV heads, dim
    "llama": (32, 8, 128), "qwen": (16, 8, 128), "gemma": (8, 4, 256), "gpt-oss": (64, 8, 64),
}  # fmt: skip
PAGE, LAYERS, REPEATS = 16, 16 if DEVICE.type == "cuda" else 2, 3
SHAPE_FOR = decode_stream_k.shape_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--rows", nargs="+", type=int, default=[16, 32, 64, 96, 128, 256])
    parser.add_argument("--contexts", nargs="+", default=["384", "1000", "mixed"])
    parser.add_argument("--lines", nargs="*", default=[])
    args = parser.parse_args()
    bandwidth, results = read_bandwidth(DEVICE), []
    ways = ["chunks", "line", *args.lines]
    for name in args.models:
        print(f"\n| {name} | {' | '.join(ways)} |\n|---{'|---' * len(ways)}|", flush=True)
        cases = [Case(name, rows, size) for rows in args.rows for size in args.contexts]
        with compiling_ahead():
            for case in cases:
                for way in ways:
                    case.call(way)()
        for case in cases:
            seconds = {way: case.seconds(way) for way in ways}
            shares = {way: case.num_bytes / bandwidth / spent for way, spent in seconds.items()}
            print(
                f"| {case.name} | {' | '.join(f'{s:.1%}' for s in shares.values())} |", flush=True
            )
            rounded = {way: round(share, 3) for way, share in shares.items()}
            results.append({"model": name, "case": case.name, **rounded})
    print(json.dumps({"commandline": vars(args), "bandwidth": bandwidth, "results": results}))


class Case:
    """Rows of given lengths, with pages of several layers."""

    def __init__(self, model: str, rows: int, context: str) -> None:
        heads, kv_heads, dim = MODELS[model]
        self.name = f"{rows} x {context}"
        self.heads = Heads(heads, kv_heads, dim, dim, 1e-6, dim**-0.5)
        torch.manual_seed(rows)
        lengths = torch.full((rows,), 0 if context == "mixed" else int(context))
        if context == "mixed":
            lengths = torch.randint(100, 2001, (rows,))
        per_row = -(-lengths // PAGE)
        used, widest = int(per_row.sum()), int(per_row.max())
        table = torch.zeros(rows + 1, widest, dtype=torch.int32)
        table[1:][torch.arange(widest) < per_row[:, None]] = (torch.randperm(used) + 1).int()
        self.table = table.to(DEVICE)
        self.slots = torch.arange(1, rows + 1, dtype=torch.int32, device=DEVICE)
        self.positions = (lengths - 1).int().to(DEVICE)
        self.joined = torch.randn(rows, sum(self.heads.sizes), device=DEVICE, dtype=DTYPE)
        angle = torch.rand(rows, 1, dim // 2, device=DEVICE) * 6
        self.angles = Angles(angle.cos(), angle.sin())
        self.norms = QkNorms(*(torch.rand(2, dim, device=DEVICE, dtype=DTYPE) + 0.5))
        self.pages_shape = used + 1, PAGE, kv_heads, 2 * dim
        self.num_bytes = int((lengths - 1).sum()) * kv_heads * 2 * dim * 2
        self.expected: torch.Tensor | None = None

    def call(self, way: str, layers: int = 1):
        """Return a function that runs `layers` layers and returns the attention of the last one."""
        module = decode if way == "chunks" else decode_stream_k
        shape = decode_stream_k.Shape(*map(int, way.split("/"))) if "/" in way else None
        decode_stream_k.shape_for = SHAPE_FOR if shape is None else lambda _: shape
        torch.manual_seed(0)
        pages = [torch.randn(self.pages_shape, device=DEVICE, dtype=DTYPE) for _ in range(layers)]
        plan = module.plan(self.slots, self.positions, self.heads)

        def attend() -> torch.Tensor:
            for kv in pages:
                out = module.attend(
                    self.joined,
                    self.norms,
                    None,
                    self.angles,
                    PagedKv(kv, self.table),
                    plan,
                    self.heads,
                )
            return out

        return attend

    def seconds(self, way: str) -> float:
        call = self.call(way, LAYERS)
        out = call().float()
        if self.expected is None:
            self.expected = out
        gap = float((out - self.expected).norm() / self.expected.norm())
        if not gap < 1e-2:
            raise RuntimeError(f"{self.name}: {way} differs by {gap:.4f}")
        if DEVICE.type == "cpu":
            return device_seconds(call, _nothing, 1, DEVICE) / LAYERS
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return device_seconds(graph.replay, _nothing, REPEATS, DEVICE, lead=0.01) / LAYERS


def _nothing() -> None:
    """Prepare nothing before a call."""


if __name__ == "__main__":
    with torch.inference_mode():
        main()
