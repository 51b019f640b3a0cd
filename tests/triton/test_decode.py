"""Decode attention against the reference: every length in one grid, over hostile pages."""

import pytest
import torch
from shapes import SHAPES as ODD

from slotzero.kernels.contract import Heads, Tokens
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton import decode

REFERENCE = ReferenceKernels()
SHAPES = [*ODD, (4, 1, 256, 16), (32, 1, 32, 16)]
LENGTHS = [1, 7, 33, 16, 17, 150]


class Case:
    """Rows of every length with padding between, over pages whose every other value is NaN."""

    def __init__(self, shape, lengths, device, dtype=torch.float32, norm=True) -> None:
        heads, kv_heads, dim, page = shape
        self.heads = Heads(heads, kv_heads, dim, 1e-6, dim**-0.5)
        per_slot = max(-(-n // page) for n in lengths)
        used = len(lengths) * per_slot
        self.table = torch.zeros(len(lengths) + 1, per_slot, dtype=torch.int32)
        self.table[1:] = (torch.randperm(used + 3)[:used] + 1).int().view(-1, per_slot)
        self.kv = torch.full((2, used + 4, page, kv_heads, dim), torch.nan)
        for slot, length in enumerate(lengths, start=1):
            for at in range(length - 1):
                self.kv[:, self.table[slot, at // page], at % page] = torch.randn(2, kv_heads, dim)
        slots, positions = [0], [0]
        for slot, length in enumerate(lengths, start=1):
            slots += [slot, 0]
            positions += [length - 1, 0]
        rows = len(slots)
        self.tokens = Tokens(*(torch.tensor(v, dtype=torch.int32) for v in (slots, positions)))
        self.joined = torch.randn(rows, (heads + 2 * kv_heads) * dim)
        self.norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if norm else (None, None)
        angle = torch.rand(rows, 1, dim // 2) * 6
        self.cos, self.sin = angle.cos(), angle.sin()
        self.device, self.dtype = device, dtype

    def expected(self):
        """In float32, of what the kernel is given -> attention, pages"""
        pages, joined = (t.to(self.dtype).float() for t in (self.kv, self.joined))
        norms = [None if n is None else n.to(self.dtype).float() for n in self.norms]
        out = REFERENCE.attention(
            joined, *norms, self.cos, self.sin, pages, self.table, self.tokens, self.heads
        )
        return out, pages

    def run(self, num_layers=1):
        """Of the last of some equal layers, which share one plan."""
        joined = self.joined.to(self.device, self.dtype)
        norms = [None if n is None else n.to(self.device, self.dtype) for n in self.norms]
        slots, positions = (t.to(self.device) for t in self.tokens)
        shares = decode.plan(slots, positions, self.heads)
        cos, sin, table = (t.to(self.device) for t in (self.cos, self.sin, self.table))
        for _ in range(num_layers):
            pages = self.kv.to(self.device, self.dtype, copy=True)
            out = decode.attend(joined, *norms, cos, sin, pages, table, shares, self.heads)
            last = out.to("cpu", torch.float32, copy=True)
            assert shares.done.abs().max() == 0, "a layer leaves its counts to the next"
        return last, pages.cpu().float()


def same_pages(got, expected, atol):
    assert torch.equal(got.isnan(), expected.isnan()), "a page that is not the row's was written"
    assert torch.allclose(got.nan_to_num(), expected.nan_to_num(), atol=atol)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(device, shape, norm):
    case = Case(shape, LENGTHS, device, norm=norm)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    assert torch.allclose(out, expected, atol=1e-5)
    assert out[case.tokens.slots == 0].abs().max() == 0
    same_pages(pages, expected_pages, 1e-5)


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
def test_16_bits(device, half, shape):
    case = Case(shape, LENGTHS, device, half)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    assert (out - expected).norm() / expected.norm() < 1e-2
    same_pages(pages, expected_pages, 0.1)  # two units of the last place at 8


@pytest.mark.parametrize("lengths", [[1], [700], [1, 900], [5] * 40, [300, 1, 1, 1, 1, 1, 1]])
def test_any_share_of_the_grid(device, lengths):
    case = Case((4, 2, 16, 16), lengths, device)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    assert torch.allclose(out, expected, atol=1e-5)
    same_pages(pages, expected_pages, 1e-5)


def test_every_layer_of_a_step_uses_one_plan(device):
    case = Case((4, 2, 16, 16), [700, 65, 3], device)
    (out, pages), (expected, expected_pages) = case.run(num_layers=3), case.expected()
    assert torch.allclose(out, expected, atol=1e-5)
    same_pages(pages, expected_pages, 1e-5)


def test_the_plan_covers_every_position_once(device):
    heads = Heads(8, 4, 16, 1e-6, 1.0)
    for lengths in ([1], [1000], [3, 0, 500, 77, 32, 33], [40] * 200, [8000] + [1] * 63):
        slots = torch.tensor([r + 1 if n else 0 for r, n in enumerate(lengths)], dtype=torch.int32)
        positions = torch.tensor([max(n - 1, 0) for n in lengths], dtype=torch.int32)
        shares = decode.plan(slots.to(device), positions.to(device), heads)
        row, slot, begin, end, first, count = (t.tolist() for t in shares[:6])
        assert shares.done.abs().max() == 0
        covered = [0] * len(lengths)
        for i, r in enumerate(row):
            if r < 0:
                continue
            assert slot[i] == slots[r] and begin[i] == covered[r]
            assert first[i] <= i < first[i] + count[i]
            covered[r] = end[i]
        assert covered == lengths


def test_the_same_bits_again(device, half):
    case = Case((8, 2, 64, 16), [600, 31, 64, 65], device, half)
    first, _ = case.run()
    for _ in range(3):
        again, _ = case.run()
        assert torch.equal(again, first)
