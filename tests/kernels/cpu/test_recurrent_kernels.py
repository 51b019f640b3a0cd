"""Tests of recurrent kernels: every way to split a text into steps gives the same result."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from slotzero.kernels.contract import Kernels, kernels_for
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.types import Rows, Tokens
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights, States, Trail

SLOTS, SNAPSHOTS, LENGTH, INTERVAL = 3, 6, 24, 8
SHAPES = (
    Scan("mamba", 4, 5, 2, 3, 4, (0.01, 0.5), INTERVAL),
    Scan("delta", 4, 5, 2, 3, 4, interval=INTERVAL),
    Scan("mamba", 2, 16, 1, 32, 2, (0.0, math.inf), INTERVAL),
    Scan("delta", 2, 32, 2, 16, 3, interval=INTERVAL),
    Scan("kda", 3, 5, 3, 9, 4, interval=INTERVAL),
    Scan("conv", 10, 1, 0, 0, 3, interval=INTERVAL),
)
KERNELS = [ReferenceKernels(), kernels_for(torch.device("cpu"))]


class Mixer(NamedTuple):
    kernels: Kernels
    shape: Scan
    states: States
    weight: Tensor
    bias: Tensor
    heads: Tensor  # [2, heads]: a_log, d
    dt_bias: Tensor  # [gates]

    @classmethod
    def of(cls, kernels: Kernels, shape: Scan) -> "Mixer":
        draw = torch.Generator().manual_seed(1)

        def table(rows: int, *size: int) -> Tensor:
            made = torch.randn(rows + 1, *size, generator=draw)  # states of an earlier owner
            made[0] = 0
            return made

        states = States(
            table(SLOTS, *shape.conv_shape),
            table(SLOTS, *shape.scan_shape) if shape.has_scan else None,
            table(SNAPSHOTS, *shape.conv_shape),
            table(SNAPSHOTS, *shape.scan_shape) if shape.has_scan else None,
            torch.zeros(SLOTS + 1, LENGTH // INTERVAL, dtype=torch.int32),
        )
        weight = torch.randn(shape.channels, shape.conv_width, generator=draw)
        bias = torch.randn(shape.channels, generator=draw)
        heads = torch.randn(2, shape.num_heads, generator=draw)
        dt_bias = torch.randn(shape.num_gates, generator=draw)
        return cls(kernels, shape, states, weight, bias, heads, dt_bias)

    def run(
        self, x: Tensor, tokens: Tokens, rows: Rows | None, trail: Trail | None = None
    ) -> Tensor:
        """Run a step over x, [tokens, sum(sizes)]."""
        shape, (a_log, d) = self.shape, self.heads
        mixed, gates, beta = x.split(sizes(shape), dim=1)
        step = RecurrentStep(tokens, rows, self.states, trail)
        mixed = self.kernels.convolve(mixed, self.weight, self.bias, step, shape)
        if not shape.has_scan:
            return mixed
        of_kind = (beta, None) if shape.is_delta else (None, d)
        weights = ScanWeights(a_log, self.dt_bias, of_kind[1])
        return self.kernels.scan(mixed, gates, of_kind[0], weights, step, shape)

    def prefill(self, x: Tensor, slot: int, start: int, pad: int = 0) -> Tensor:
        num = len(x)
        slots, positions = torch.zeros(2, num + pad, dtype=torch.int32)
        slots[:num], positions[:num] = slot, torch.arange(start, start + num)
        ints = [torch.tensor(v, dtype=torch.int32) for v in ([slot, 0], [start, 0], [num, 0])]
        rows = Rows(*ints, torch.tensor([num, num], dtype=torch.int32))
        x = torch.cat((x, torch.full((pad, x.shape[1]), 7.0)))
        out = self.run(x, Tokens(slots, positions), rows)
        assert not out[num:].any()
        return out[:num]

    def decode(self, x: Tensor, slot: int, start: int) -> Tensor:
        outs = []
        for i, row in enumerate(x):
            slots = torch.tensor([0, slot, 0], dtype=torch.int32)
            positions = torch.tensor([0, start + i, 0], dtype=torch.int32)
            out = self.run(row.expand(3, -1).contiguous(), Tokens(slots, positions), None)
            assert not out[0].any() and not out[2].any()
            outs.append(out[1])
        return torch.stack(outs)

    def verify(self, x: Tensor, slot: int, start: int, num_right: int) -> Tensor:
        width, shape = len(x), self.shape
        slots = torch.tensor([0] * width + [slot] * width, dtype=torch.int32)
        positions = torch.tensor([0] * width + [*range(start, start + width)], dtype=torch.int32)
        owners, starts = torch.tensor([[0, slot], [0, start]], dtype=torch.int32)
        ends = torch.tensor([width, 2 * width], dtype=torch.int32)
        rows = Rows(owners, starts, torch.full_like(ends, width), ends, span=width)
        stacked = Trail(
            torch.full((2, width, 2, *shape.conv_shape), math.nan),
            torch.full((2, width, 2, *shape.scan_shape), math.nan) if shape.has_scan else None,
        )
        trail = Trail(*(part if part is None else part[:, :, 1] for part in stacked))
        before = [part.clone() for part in there(self.states)]
        out = self.run(x.repeat(2, 1), Tokens(slots, positions), rows, trail)
        assert all(torch.equal(a, b) for a, b in zip(before, there(self.states), strict=True))
        assert not any(part[0].any() for part in there(trail))
        assert not out[:width].any()
        length = torch.zeros(SLOTS + 1, dtype=torch.int32)
        length[slot] = start + num_right
        both = [
            part if part is None else torch.stack((torch.zeros_like(part), part))
            for part in self.states[:4]
        ]
        left = Trail(*(part if part is None else part.nan_to_num() for part in stacked))
        self.kernels.commit_trail(
            left, owners, length,
            torch.tensor([0, num_right], dtype=torch.int32),
            States(*both, self.states.rows), shape,
        )  # fmt: skip
        for part, changed in zip(there(self.states[:4]), there(both), strict=True):
            part.copy_(changed[1])
        return out[width : width + num_right]


def same(mixer: Mixer, mine: Tensor, other: Tensor) -> bool:
    """Compare results: bitwise, but for the reference, where torch's rounding depends on
    position."""
    is_close = torch.allclose(mine, other, atol=1e-5)
    return is_close if mixer.kernels.name == "reference" else torch.equal(mine, other)


def sizes(shape: Scan) -> list[int]:
    """Return the sizes of a token's inputs: those of the convolution, gates and beta."""
    if not shape.has_scan:
        return [3 * shape.channels, 0, 0]
    return [shape.channels, shape.num_gates, shape.num_heads]


def there(parts) -> list[Tensor]:
    """Return those states that the shape has."""
    return [part for part in parts if part is not None]


def inputs(shape: Scan) -> Tensor:
    draw = torch.Generator().manual_seed(2)
    return torch.randn(LENGTH, sum(sizes(shape)), generator=draw)


def plainly(mixer: Mixer, x: Tensor) -> Tensor:
    """Compute the definition over a whole text, in loops over heads."""
    shape, (a_log, d) = mixer.shape, mixer.heads.double()
    x, outer = x.double(), None
    mixed, gates, beta = x.split(sizes(shape), dim=1)
    if not shape.has_scan:
        own, outer, values = mixed.chunk(3, dim=1)
        mixed = own * values
    padded = torch.nn.functional.pad(mixed.T, (shape.conv_width - 1, 0))
    mixed = torch.nn.functional.conv1d(
        padded, mixer.weight.double()[:, None], mixer.bias.double(), groups=shape.channels
    ).T
    if outer is not None:
        return mixed * outer
    steps = torch.nn.functional.softplus(gates + mixer.dt_bias.double())
    steps = steps.view(len(x), shape.num_heads, -1)  # [tokens, heads, 1 or state_size]
    first, second, third = torch.nn.functional.silu(mixed).split([*shape.sizes], dim=1)
    outs = torch.zeros(len(x), *shape.scan_shape[:2], dtype=torch.float64)
    for head in range(shape.num_heads):
        group = head // (shape.num_heads // shape.num_groups)
        keys = slice(group * shape.state_size, (group + 1) * shape.state_size)
        values = slice(head * shape.head_dim, (head + 1) * shape.head_dim)
        h = torch.zeros(*shape.scan_shape[1:], dtype=torch.float64)
        for t in range(len(x)):
            dt = steps[t, head]
            if shape.kind == "mamba":
                dt = dt.clamp(*shape.dt_limit)
                v, k, q = first[t, values], second[t, keys], third[t, keys]
                h = h * torch.exp(-a_log[head].exp() * dt) + dt * torch.outer(v, k)
                outs[t, head] = h @ q + d[head] * v
            else:
                q, k, v = first[t, keys], second[t, keys], third[t, values]
                q, k = (y / (y @ y + 1e-6).sqrt() for y in (q, k))
                h = h * torch.exp(-a_log[head].exp() * dt)
                h = h + beta[t, head].sigmoid() * torch.outer(v - h @ k, k)
                outs[t, head] = h @ q * shape.state_size**-0.5
    return outs.flatten(1)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.kind}-{s.head_dim}")
@pytest.mark.parametrize("kernels", KERNELS, ids=lambda k: k.name)
class TestCuts:
    def test_prompt(self, kernels: Kernels, shape: Scan) -> None:
        mixer, x = Mixer.of(kernels, shape), inputs(shape)
        out = mixer.prefill(x, 2, 0, pad=3)
        assert torch.allclose(out.double(), plainly(mixer, x), atol=1e-5)

    def test_any_split_gives_the_same(self, kernels: Kernels, shape: Scan) -> None:
        x, (whole, cut) = inputs(shape), (Mixer.of(kernels, shape) for _ in range(2))
        wanted = whole.prefill(x, 2, 0)
        outs = [cut.prefill(x[:5], 2, 0, pad=2), cut.decode(x[5:8], 2, 5)]
        outs += [cut.verify(x[8:12], 2, 8, 3), cut.prefill(x[11:20], 2, 11)]
        outs += [cut.decode(x[20:], 2, 20)]
        assert same(cut, torch.cat(outs), wanted)
        for mine, other in zip(there(cut.states), there(whole.states), strict=True):
            assert same(cut, mine, other)
        untouched = Mixer.of(kernels, shape).states
        for mine, other in zip(there(cut.states[:2]), there(untouched[:2]), strict=True):
            assert torch.equal(mine[[0, 1, 3]], other[[0, 1, 3]])

    @pytest.mark.parametrize("taken_by", ["prefill", "decode", "verify"])
    def test_a_snapshot_continues_in_another_slot(
        self, kernels: Kernels, shape: Scan, taken_by: str
    ) -> None:
        mixer, x = Mixer.of(kernels, shape), inputs(shape)
        table, kept = mixer.states.scan, mixer.states.scan_kept
        if not shape.has_scan:
            table, kept = mixer.states.conv, mixer.states.conv_kept
        assert mixer.states.rows is not None and table is not None and kept is not None
        before = kept.clone()
        mixer.states.rows[1] = torch.tensor([4, 0, 5])
        wanted = mixer.prefill(x, 1, 0)
        if taken_by != "prefill":
            kept.copy_(before)
            mixer.prefill(x[:6], 1, 0)
            if taken_by == "decode":
                mixer.decode(x[6:], 1, 6)
            else:
                mixer.verify(x[6:10], 1, 6, 4)
                mixer.prefill(x[10:22], 1, 10)
                mixer.verify(x[22:], 1, 22, 2)
        for row in (0, 1, 2, 3, 6):
            assert torch.equal(kept[row], before[row])
        mixer.states.rows[3, 0] = 4
        assert same(mixer, mixer.decode(x[8:12], 3, 8), wanted[8:12])
        assert torch.equal(table[1], kept[5])

    def test_a_wrong_draft_leaves_no_snapshot(self, kernels: Kernels, shape: Scan) -> None:
        mixer, x = Mixer.of(kernels, shape), inputs(shape)
        assert mixer.states.rows is not None and mixer.states.conv_kept is not None
        mixer.states.rows[1] = torch.tensor([4, 5, 6])
        mixer.prefill(x[:6], 1, 0)
        before = mixer.states.conv_kept.clone()
        mixer.verify(x[6:10], 1, 6, 1)
        assert torch.equal(mixer.states.conv_kept, before)


def test_gates_and_norms() -> None:
    x, gates = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(3))
    weight = torch.arange(1.0, 9.0)
    silu = gates * gates.sigmoid()

    def normed(values: Tensor, size: int) -> Tensor:
        groups = values.view(3, -1, size)
        return (groups * (groups.square().mean(-1, keepdim=True) + 0.1).rsqrt()).view(3, 8)

    for kernels in KERNELS:
        first = kernels.gate_norm(x, gates, weight, 0.1, 4, gates_first=True)
        assert torch.allclose(first, normed(x * silu, 4) * weight)
        last = kernels.gate_norm(x, gates, weight[:4], 0.1, 4, gates_first=False)
        assert torch.allclose(last, normed(x, 4) * weight[:4].repeat(2) * silu)
        assert torch.allclose(kernels.gate_norm(x, gates, None, 0.1, 4, True), x * silu)
        sigmoid = kernels.gate_norm(x, gates, weight, 0.1, 8, False, "sigmoid")
        assert torch.allclose(sigmoid, normed(x, 8) * weight * gates.sigmoid())
