"""Certify one MLP that is captured with torch.cuda.graph; without a GPU, recorded on the CPU.

    python examples/certify_an_mlp.py

The second MLP subtracts the mean of the batch, to which padded rows belong: it does not pass.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from slotzero.certify import (
    CapturedStep,
    Certificate,
    Input,
    Output,
    certify_captured,
    constants_of,
)

SIZES = (1, 4, 8)
WIDTH = 16


class CapturedMlp:
    def __init__(self, is_centred: bool = False, device: str = "cpu") -> None:
        torch.manual_seed(0)
        self.is_centred = is_centred
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.mlp.to(device).requires_grad_(False)
        self.x = torch.zeros(max(SIZES), WIDTH, device=device)
        self.y = torch.zeros(max(SIZES), WIDTH, device=device)
        self.graphs = self._capture() if device == "cuda" else None

    def run(self, size: int) -> None:
        x = self.x[:size]
        if self.is_centred:
            x = x - x.mean(0)
        self.y[:size] = self.mlp(x)

    def stage(self, rows: Sequence[Tensor], size: int) -> None:
        self.x[: len(rows)] = torch.stack(list(rows))
        self.x[len(rows) :] = 0.0

    def declared(self) -> CapturedStep[Tensor]:
        return CapturedStep(
            name="mlp",
            sizes=SIZES,
            tensors=[
                Input("x", self.x, 0.0, "rows are computed independently"),
                Output("y", self.y),
                *constants_of(self.mlp),
            ],
            stage=self.stage,
            step=self.run,
            replay=self.graphs,
        )

    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        """Capture a graph of each size, largest first, into one pool. The nodes of a graph can be
        checked only if torch keeps it."""
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        for size in reversed(SIZES):
            self.run(size)  # libraries are initialised outside the capture
            torch.cuda.synchronize()
            graphs[size] = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graphs[size], pool=pool, stream=stream):
                self.run(size)
        return graphs


def certificate_of(is_centred: bool, device: str = "cpu") -> Certificate:
    rows = torch.randn(max(SIZES) + 1, WIDTH, generator=torch.Generator().manual_seed(1)).to(device)
    return certify_captured(CapturedMlp(is_centred, device).declared(), list(rows))


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for is_centred in (False, True):
        print(certificate_of(is_centred, device))


if __name__ == "__main__":
    main()
