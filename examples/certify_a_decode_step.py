"""Certify a decode step that another engine has captured: what its padding does to real rows.

    python examples/certify_a_decode_step.py

The step is written as small engines write it: static buffers for the largest batch, a capture per
batch size, and the usual padding: slot_mapping is filled with -1 and context_lens with 0, the other
buffers keep what an earlier batch left in their tails. Activations are quantised with one scale for
the whole batch. The certificate names what is unsafe in that; the mended step passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from slotzero.certify import (
    Bounds,
    CapturedStep,
    Certificate,
    Input,
    Output,
    State,
    certify_captured,
    constants_of,
)

SIZES = (1, 2, 4, 8)
BLOCK, NUM_BLOCKS, MAX_BLOCKS = 4, 24, 3  # tokens of a block, blocks of the cache and of a sequence
VOCAB, HIDDEN = 32, 16
BOUNDS = Bounds(size=0.05, neighbours=0.05)  # 8-bit activations: a rounding may fall either way


@dataclass(frozen=True)
class SequenceState:
    """A sequence of which one token is decoded."""

    last_token: int
    length: int
    blocks: tuple[int, ...]

    def slot(self, position: int) -> int:
        return self.blocks[position // BLOCK] * BLOCK + position % BLOCK

    def stored(self) -> list[int]:
        """Return the slots whose keys and values the step reads."""
        return [self.slot(position) for position in range(self.length - 1)]

    def new(self) -> list[int]:
        """Return the slot that the step writes."""
        return [self.slot(self.length - 1)]


class Model(nn.Module):
    def __init__(self, is_mended: bool) -> None:
        super().__init__()
        self.is_mended = is_mended
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.embed.weight.data *= torch.linspace(0.5, 2.0, VOCAB)[:, None]  # some tokens stand out
        self.place = nn.Embedding(MAX_BLOCKS * BLOCK, HIDDEN)
        self.place.weight.data *= torch.linspace(0.5, 4.0, MAX_BLOCKS * BLOCK)[:, None]
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.mlp = nn.Linear(HIDDEN, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def quantised(self, x: Tensor) -> Tensor:
        """Round activations to 8 bits. One scale for the batch makes rows depend on each other."""
        largest = x.abs().amax(-1, keepdim=True) if self.is_mended else x.abs().amax()
        scale = largest.clamp(min=1e-6) / 127
        return (x / scale).round() * scale

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, lens: Tensor, tables: Tensor
    ) -> Tensor:
        offsets = torch.arange(BLOCK, device=q.device)
        slots = (tables[:, :, None] * BLOCK + offsets).flatten(1)  # [rows, context]
        is_read = torch.arange(slots.shape[1], device=q.device) < lens[:, None]
        scores = (k_cache[slots] @ q[:, :, None])[:, :, 0].masked_fill(~is_read, -1e30)
        values = v_cache[slots].masked_fill(~is_read[:, :, None], 0.0)
        return (scores.softmax(-1)[:, None] @ values)[:, 0]


class DecodeStep:
    def __init__(self, is_mended: bool = False, device: str = "cpu") -> None:
        torch.manual_seed(0)
        rows = max(SIZES)
        self.is_mended = is_mended
        self.model = Model(is_mended).to(device).requires_grad_(False)
        self.k_cache = torch.randn(NUM_BLOCKS * BLOCK, HIDDEN).to(device)
        self.v_cache = torch.randn(NUM_BLOCKS * BLOCK, HIDDEN).to(device)
        self.input_ids = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, dtype=torch.long, device=device)
        self.slot_mapping = torch.zeros(rows, dtype=torch.long, device=device)
        self.context_lens = torch.zeros(rows, dtype=torch.long, device=device)
        self.block_tables = torch.zeros(rows, MAX_BLOCKS, dtype=torch.long, device=device)
        self.logits = torch.zeros(rows, VOCAB, device=device)
        self.graphs = self._capture() if device == "cuda" else None

    def run(self, size: int) -> None:
        """Compute the next logits of the first `size` rows: the function that is captured."""
        model, slots = self.model, self.slot_mapping[:size]
        hidden = model.embed(self.input_ids[:size]) + model.place(self.positions[:size])
        q, k, v = model.qkv(model.quantised(hidden)).chunk(3, -1)
        self.k_cache[slots] = k
        self.v_cache[slots] = v
        lens, tables = self.context_lens[:size], self.block_tables[:size]
        hidden = hidden + model.attend(q, self.k_cache, self.v_cache, lens, tables)
        hidden = hidden + model.mlp(model.quantised(hidden))
        self.logits[:size] = model.head(hidden)

    def stage(self, seqs: Sequence[SequenceState], size: int) -> None:
        """Write a batch to the static buffers; every size is padded in the same way."""
        num = len(seqs)
        if self.is_mended:
            for buffer in (self.input_ids, self.positions, self.block_tables):
                buffer.zero_()
        self.slot_mapping.fill_(0 if self.is_mended else -1)
        self.context_lens.zero_()
        self.input_ids[:num] = torch.tensor([seq.last_token for seq in seqs])
        self.positions[:num] = torch.tensor([seq.length - 1 for seq in seqs])
        self.slot_mapping[:num] = torch.tensor([seq.new()[0] for seq in seqs])
        self.context_lens[:num] = torch.tensor([seq.length for seq in seqs])
        width = max(len(seq.blocks) for seq in seqs)
        tables = [[*seq.blocks, *[-1] * (width - len(seq.blocks))] for seq in seqs]
        self.block_tables[:num, :width] = torch.tensor(tables)

    def declared(self) -> CapturedStep[SequenceState]:
        """Say what each buffer is. Here the reasons are claims, which the certificate tests."""
        dropped = "its logits are never read"
        if self.is_mended:
            inputs = [
                Input("input_ids", self.input_ids, 0, dropped),
                Input("positions", self.positions, 0, dropped),
                Input("slot_mapping", self.slot_mapping, 0, "block 0 belongs to no sequence"),
                Input("block_tables", self.block_tables, 0, "block 0 belongs to no sequence"),
            ]
        else:
            inputs = [
                Input("input_ids", self.input_ids, None, dropped),
                Input("positions", self.positions, None, dropped),
                Input("slot_mapping", self.slot_mapping, -1, "nothing is stored for slot -1"),
                Input("block_tables", self.block_tables, None, "a row of length 0 reads no block"),
            ]
        reads, writes, null = SequenceState.stored, SequenceState.new, (0,) * self.is_mended
        return CapturedStep(
            name="decode",
            sizes=SIZES,
            tensors=[
                *inputs,
                Input("context_lens", self.context_lens, 0, "it attends to nothing"),
                State("k_cache", self.k_cache, reads, writes, null),
                State("v_cache", self.v_cache, reads, writes, null),
                Output("logits", self.logits),
                *constants_of(self.model),
            ],
            stage=self.stage,
            step=self.run,
            replay=self.graphs,
        )

    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        """Capture a graph of each size, largest first, into one pool; only for CUDA."""
        graphs: dict[int, torch.cuda.CUDAGraph] = {}
        stream, pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        for size in reversed(SIZES):
            self.run(size)
            torch.cuda.synchronize()
            graphs[size] = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.cuda.graph(graphs[size], pool=pool, stream=stream):
                self.run(size)
        return graphs


def sequences(is_mended: bool) -> list[SequenceState]:
    """Return more sequences than rows, of different lengths. Together they own all blocks, but for
    the null block of the mended step."""
    blocks = list(range(int(is_mended), NUM_BLOCKS))
    seqs = []
    for number in range(max(SIZES) + 1):
        length = 2 + number
        num = -(-length // BLOCK)
        own, blocks = blocks[:num], blocks[num:]
        seqs.append(SequenceState(3 * number + 5, length, tuple(own)))
    last = seqs[-1]
    seqs[-1] = SequenceState(last.last_token, last.length, (*last.blocks[:-1], blocks[-1]))
    return seqs


def certificate_of(is_mended: bool, device: str = "cpu") -> Certificate:
    step = DecodeStep(is_mended, device)
    return certify_captured(step.declared(), sequences(is_mended), BOUNDS)


def main() -> None:
    for is_mended in (False, True):
        print(certificate_of(is_mended))


if __name__ == "__main__":
    main()
