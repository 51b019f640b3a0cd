"""Recurrent mixer with its states, run on any kernel set; shared by the recurrent kernel tests.

Memory that must not be read is NaN.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.kernels.contract import Kernels
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States, Trail

SLOTS, SNAPSHOTS, LENGTH, LAYERS = 5, 12, 512, 2
KINDS = [
    Scan("mamba", 2, 12, 1, 12, 4, (0.01, 0.5)),
    Scan("delta", 2, 20, 1, 12, 3),
    Scan("kda", 2, 20, 2, 12, 3),
    Scan("conv", 20, 1, 0, 0, 4),
]


@dataclass(frozen=True)
class Step:
    """A step over tokens [start, start + count) of several slots, with padding around them."""

    rows: list[tuple[int, int, int]]  # slot, start, count
    span: int | None = 0  # None: one token per row, and no row table
    pad_rows: int = 0
    pad_tokens: int = 0

    def places(self) -> list[tuple[int, int]]:
        """Return slot and position of each token."""
        places = []
        for slot, start, count in self.rows:
            places += [(slot, start + i) for i in range(count)]
            places += [(0, 0)] * ((self.span or count) - count)
        each = self.span or (1 if self.span is None else 0)
        return places + [(0, 0)] * (self.pad_rows * each + self.pad_tokens)

    def tokens(self) -> Tokens:
        return Tokens(*torch.tensor(self.places(), dtype=torch.int32).T.contiguous())

    def row_table(self) -> Rows | None:
        if self.span is None:
            return None
        table, end = [], 0
        for slot, start, count in self.rows + [(0, 0, 0)] * self.pad_rows:
            end += self.span or count
            table.append((slot if count else 0, start, self.span or count, end))
        return Rows(*torch.tensor(table, dtype=torch.int32).T.contiguous(), span=self.span)


class Mixer:
    def __init__(
        self, kernels: Kernels, shape: Scan, device="cpu", dtype=torch.float32,
        state_dtype=torch.float32, seed=1,
    ) -> None:  # fmt: skip
        self.kernels, self.shape, self.device, self.dtype = kernels, shape, device, dtype
        self.draw = torch.Generator().manual_seed(seed)
        self.state_dtype = state_dtype
        kept = None, None, None
        if shape.interval:
            kept = (
                self.nothing(SNAPSHOTS + 1, *shape.conv_shape).to(dtype),
                self.of_scan(SNAPSHOTS + 1),
                torch.zeros(SLOTS + 1, LENGTH // shape.interval, dtype=torch.int32, device=device),
            )
        self.states = States(
            self.nothing(SLOTS + 1, *shape.conv_shape).to(dtype),
            self.of_scan(SLOTS + 1),
            *kept,
        )
        self.sizes = [shape.channels, shape.num_gates, shape.num_heads]  # mixed, gates, beta
        if not shape.has_scan:
            self.sizes = [3 * shape.channels, 0, 0]
        size = sum(self.sizes)
        self.texts = self.random(SLOTS + 1, LENGTH, size).to(dtype)
        self.texts[0] = math.nan
        self.weight = self.random(shape.channels, shape.conv_width).to(dtype)
        self.bias = self.random(shape.channels).to(dtype)
        self.heads = self.random(2, shape.num_heads)  # a_log, d
        self.dt_bias = self.random(shape.num_gates)

    def nothing(self, *size: int) -> Tensor:
        return torch.full(size, math.nan, device=self.device)

    def of_scan(self, *rows: int) -> Tensor | None:
        if not self.shape.has_scan:
            return None
        return self.nothing(*rows, *self.shape.scan_shape).to(self.state_dtype)

    def random(self, *size: int) -> Tensor:
        return torch.randn(size, generator=self.draw).to(self.device)

    def given(self, step: Step) -> tuple[Tensor, Tokens, Rows | None]:
        """Return the inputs of the mixer, which are slices of wider rows."""
        tokens, rows = step.tokens(), step.row_table()
        x = self.texts[tokens.slots, tokens.positions]
        tokens = Tokens(*(t.to(self.device) for t in tokens))
        if rows is not None:
            rows = Rows(*(t.to(self.device) for t in rows[:4]), span=rows.span)
        return x, tokens, rows

    def mix(
        self, x: Tensor, tokens: Tokens, rows: Rows | None, trail: Trail | None = None
    ) -> tuple[Tensor, Tensor]:
        """Run the mixer, and return the convolution's input and the result."""
        shape, (a_log, d) = self.shape, self.heads
        mixed, gates, beta = x.split(self.sizes, dim=1)
        step = RecurrentStep(tokens, rows, self.states, trail)
        mixed = self.kernels.convolve(mixed, self.weight, self.bias, step, shape)
        if not shape.has_scan:
            return mixed, mixed
        is_delta = shape.is_delta
        weights = ScanWeights(a_log, self.dt_bias, None if is_delta else d)
        out = self.kernels.scan(mixed, gates, beta if is_delta else None, weights, step, shape)
        return mixed, out

    def run(self, step: Step, trail: Trail | None = None) -> Tensor:
        x, tokens, rows = self.given(step)
        mixed, out = self.mix(x, tokens, rows, trail)
        assert not mixed[tokens.slots == 0].any() and not out[tokens.slots == 0].any()
        assert out.shape == (len(x), self.shape.inner_size) and out.dtype is self.dtype
        return out.cpu()

    def verify(self, step: Step) -> tuple[Tensor, Trail]:
        """Return the result and the trails of two layers, stacked: an unused one and this one."""
        rows = len(step.rows) + step.pad_rows, step.span, LAYERS
        stacked = Trail(
            self.nothing(*rows, *self.shape.conv_shape).to(self.dtype),
            self.of_scan(*rows),
        )
        before = [part.clone() for part in there(self.states[:2])]
        out = self.run(step, Trail(*(part if part is None else part[:, :, 1] for part in stacked)))
        for part, old in zip(there(self.states[:2]), before, strict=True):
            assert torch.equal(part.isnan(), old.isnan())
            assert torch.equal(part.nan_to_num(), old.nan_to_num())
        assert all(part[:, :, 0].isnan().all() for part in there(stacked))
        return out, stacked

    def commit(self, step: Step, stacked: Trail, num_right: list[int]) -> None:
        """Commit the accepted tokens of each row; padded rows are last and have none."""
        right = torch.tensor(num_right + [0] * step.pad_rows, dtype=torch.int32)
        slots, length = torch.zeros_like(right), torch.zeros(SLOTS + 1, dtype=torch.int32)
        for i, (slot, start, count) in enumerate(step.rows):
            slots[i] = slot if count else 0
            length[slot] = start + num_right[i]
        both = [None if p is None else torch.stack((p, p)) for p in self.states[:4]]
        self.kernels.commit_trail(
            stacked, *(t.to(self.device) for t in (slots, length, right)),
            States(*both, self.states.rows), self.shape,
        )  # fmt: skip
        for part, changed in zip(self.states[:4], both, strict=True):
            if part is not None:
                part.copy_(changed[1])


def there(parts) -> list[Tensor]:
    """Return those states that the shape has."""
    return [part for part in parts if part is not None]


class Pair:
    """The Triton kernels and the reference, over the same texts."""

    def __init__(self, device, shape: Scan, near: float, **kind) -> None:
        self.card = Mixer(TritonKernels(), shape, device, **kind)
        self.reference = Mixer(ReferenceKernels(), shape, **kind)
        self.near = near

    def keep(self, slot: int, number: int, row: int) -> None:
        """Assign row `row` to the slot's snapshot `number`, stored already or not."""
        for mixer in (self.card, self.reference):
            mixer.states.rows[slot, number] = row

    def run(self, *steps: Step) -> None:
        for step in steps:
            self.same(self.card.run(step), self.reference.run(step))
            self.same_states()

    def verify(self, step: Step, num_right: list[int]) -> None:
        (out, trail), (want, left) = self.card.verify(step), self.reference.verify(step)
        self.same(out, want)
        for mine, expected in zip(there(trail), there(left), strict=True):
            self.same(mine[:, :, 1].cpu(), expected[:, :, 1])
        self.card.commit(step, trail, num_right)
        self.reference.commit(step, left, num_right)
        self.same_states()

    def same_states(self) -> None:
        for mine, expected in zip(self.card.states[:4], self.reference.states[:4], strict=True):
            if mine is not None and expected is not None:
                self.same(mine.cpu(), expected)

    def same(self, mine: Tensor, expected: Tensor) -> None:
        assert torch.equal(mine.isnan(), expected.isnan()), "memory of another slot was changed"
        mine, expected = mine.nan_to_num().float(), expected.nan_to_num().float()
        assert (mine - expected).norm() <= self.near * expected.norm()
        size = float(expected.square().mean().sqrt())
        near = self.near if self.card.dtype is torch.float32 else 10 * self.near
        assert torch.allclose(mine, expected, rtol=near, atol=near * size)
