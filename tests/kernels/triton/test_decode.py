"""Tests of decode attention against the reference: all lengths in one grid, over pages with NaN."""

import itertools

import pytest
import torch
from shapes import SHAPES as ODD

from slotzero.kernels.attention_plans import DecodePlan, StreamKPlan
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.attention import decode, decode_stream_k
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.types import Angles, Heads, PagedKv, QkNorms, Tokens

REFERENCE = ReferenceKernels()
SHAPES = [*ODD, (4, 1, 256, 16), (32, 1, 32, 16)]
LENGTHS = [1, 7, 33, 16, 17, 150]


class Case:
    """Rows of many lengths with padding between, over pages in which all other values are NaN."""

    def __init__(
        self, shape, lengths, device, dtype=torch.float32, norm=True, value_dim=None, sinks=False,
        **kind,
    ) -> None:  # fmt: skip
        heads, kv_heads, dim, page = shape
        value_dim = value_dim or dim
        self.heads = Heads(heads, kv_heads, dim, value_dim, 1e-6, dim**-0.5, **kind)
        per_slot = max(-(-n // page) for n in lengths)
        used = len(lengths) * per_slot
        self.table = torch.zeros(len(lengths) + 1, per_slot, dtype=torch.int32)
        self.table[1:] = (torch.randperm(used + 3)[:used] + 1).int().view(-1, per_slot)
        self.kv = torch.full((used + 4, page, kv_heads, dim + value_dim), torch.nan)
        for slot, length in enumerate(lengths, start=1):
            low = self.heads.first_key(length - 1)
            for at in range(low, length - self.heads.stores):
                seen = torch.randn(kv_heads, dim + value_dim)
                self.kv[self.table[slot, at // page], at % page] = seen
            self.table[slot, : low // page] = 0  # no longer in use
        slots, positions = [0], [0]
        for slot, length in enumerate(lengths, start=1):
            slots += [slot, 0]
            positions += [length - 1, 0]
        rows = len(slots)
        self.tokens = Tokens(*(torch.tensor(v, dtype=torch.int32) for v in (slots, positions)))
        self.joined = torch.randn(rows, sum(self.heads.sizes))
        self.norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if norm else (None, None)
        if not self.heads.stores:
            self.norms = self.norms[0], None
        self.sinks = torch.randn(heads) * 2 if sinks else None
        angle = torch.rand(rows, 1, dim // 2) * 6
        self.angles = Angles(angle.cos(), angle.sin())
        self.device, self.dtype = device, dtype

    def expected(self):
        """Return attention and pages, computed in float32 from the kernel's inputs."""
        pages, joined = (t.to(self.dtype).float() for t in (self.kv, self.joined))
        constants = (*self.norms, self.sinks)
        constants = [None if c is None else c.to(self.dtype).float() for c in constants]
        plan = REFERENCE.plan(self.tokens, None, self.heads)
        *norms, sinks = constants
        kv = PagedKv(pages, self.table)
        out = REFERENCE.attention(joined, QkNorms(*norms), sinks, self.angles, kv, plan, self.heads)
        return out, pages

    def run(self, num_layers=1, kind=decode):
        """Return the result of the last of some equal layers, which share one plan."""
        joined = self.joined.to(self.device, self.dtype)
        constants = (*self.norms, self.sinks)
        *norms, sinks = (None if c is None else c.to(self.device, self.dtype) for c in constants)
        slots, positions = (t.to(self.device) for t in self.tokens)
        plan = kind.plan(slots, positions, self.heads)
        angles, table = (
            Angles(*(t.to(self.device) for t in self.angles)),
            self.table.to(self.device),
        )
        for _ in range(num_layers):
            pages = self.kv.to(self.device, self.dtype, copy=True)
            out = kind.attend(
                joined, QkNorms(*norms), sinks, angles, PagedKv(pages, table), plan, self.heads
            )
            last = out.to("cpu", torch.float32, copy=True)
            assert plan.done.abs().max() == 0, "a layer leaves its counts to the next"
        return last, pages.cpu().float()

    def check(self, num_layers=1, kind=decode):
        (out, pages), (expected, expected_pages) = self.run(num_layers, kind), self.expected()
        assert torch.allclose(out, expected, atol=1e-5)
        assert out[self.tokens.slots == 0].abs().max() == 0
        same_pages(pages, expected_pages, 1e-5)


def same_pages(got, expected, atol):
    assert torch.equal(got.isnan(), expected.isnan()), "a page of another row was written"
    assert torch.allclose(got.nan_to_num(), expected.nan_to_num(), atol=atol)


@pytest.fixture
def small_grid(monkeypatch):
    """Use a grid of few programs, in which even short rows have several chunks."""
    monkeypatch.setattr(decode, "cut_for", lambda rows: (40, 16))


SHORT = decode_stream_k.StreamKShape(programs=1, keys=16, warps=1, stages=3, row_cost=2)


@pytest.fixture
def few_shares(monkeypatch):
    """Use a stream-K plan in which rows span several shares and shares have several rows."""
    monkeypatch.setattr(decode_stream_k, "num_processors", lambda: 10)
    monkeypatch.setattr(decode_stream_k, "shape_for", lambda _: SHORT)
    monkeypatch.setattr(decode_stream_k, "SMALLEST", 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(device, small_grid, shape):
    Case(shape, LENGTHS, device).check()


@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_without_norms(device, small_grid, shape):
    Case(shape, LENGTHS, device, norm=False).check()


@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[4]])
def test_16_bits(device, half, small_grid, shape):
    case = Case(shape, LENGTHS, device, half)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    assert (out - expected).norm() / expected.norm() < 1e-2
    same_pages(pages, expected_pages, 0.1)  # two units in the last place, at a value of 8


@pytest.mark.parametrize("lengths", [[1], [700], [1, 900], [300, 1, 1, 1, 1, 1, 1]])
def test_any_share_of_the_grid(device, lengths):
    Case((4, 2, 16, 16), lengths, device).check()


def test_a_large_batch(device, small_grid):
    Case((4, 2, 16, 16), [40] + [5] * 40, device).check()


def test_every_layer_of_a_step_uses_one_plan(device, small_grid):
    Case((4, 2, 16, 16), [700, 65, 3], device).check(num_layers=3)


@pytest.mark.parametrize("window", [1, 20, 130, 1000])
def test_a_window_ends_at_the_newest_key(device, small_grid, window):
    Case((4, 2, 16, 8), LENGTHS, device, window=window).check()


@pytest.mark.parametrize("window", [20, 45])
def test_a_chunk_ends_at_the_newest_key(device, small_grid, few_shares, window):
    case = Case((4, 2, 16, 8), LENGTHS, device, window=window, is_chunked=True)
    for kind in (decode, decode_stream_k):
        case.check(kind=kind)


@pytest.mark.parametrize("num_others", [0, 64])
def test_a_window_in_a_small_and_a_large_batch(device, small_grid, num_others):
    Case((2, 1, 16, 8), [90] + [3] * num_others, device, window=40).check()


@pytest.mark.parametrize("window", [None, 1, 90])
def test_a_sink_takes_its_share_once(device, small_grid, window):
    """Some rows are one chunk, others are several."""
    Case((6, 2, 16, 8), LENGTHS, device, sinks=True, window=window).check()


@pytest.mark.parametrize("kind", [{}, {"sinks": True}, {"window": 40}])
def test_scores_are_capped(device, small_grid, kind):
    Case((4, 2, 16, 16), LENGTHS, device, softcap=2.0, **kind).check()


@pytest.mark.parametrize("kind", [{}, {"sinks": True, "window": 40, "softcap": 2.0}])
@pytest.mark.parametrize(("dim", "value_dim"), [(48, 32), (16, 40), (192, 128)])
def test_values_of_another_size(device, small_grid, dim, value_dim, kind):
    Case((4, 2, dim, 16), [150, 7], device, value_dim=value_dim, **kind).check()


GEMMA = [
    {"norms_values": True},
    {"norms_values": True, "stores": False},
    {"norms_values": True, "stores": False, "window": 20},
]


@pytest.mark.parametrize("kind", GEMMA)
@pytest.mark.parametrize("shape", [(4, 2, 24, 8), (2, 1, 512, 16)])
def test_values_are_normed_or_read_from_another_layer(device, small_grid, shape, kind):
    Case(shape, [150, 7, 1], device, **kind).check()


def test_large_heads_in_16_bits(device, half, small_grid):
    case = Case((8, 1, 512, 16), [90, 7], device, half, norms_values=True)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    assert (out - expected).norm() / expected.norm() < 1e-2
    same_pages(pages, expected_pages, 0.1)


def test_16_bits_of_every_kind(device, half, small_grid):
    kind = {"sinks": True, "window": 100, "softcap": 5.0, "value_dim": 32}
    case = Case((8, 2, 48, 16), LENGTHS, device, half, **kind)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    assert (out - expected).norm() / expected.norm() < 1e-2
    same_pages(pages, expected_pages, 0.1)


@pytest.mark.parametrize("window", [None, 1, 50, 600])
def test_the_plan_covers_every_key_once(device, window):
    heads = Heads(8, 4, 16, 16, 1e-6, 1.0, window=window)
    for lengths in ([1], [1000], [3, 0, 500, 77, 32, 33], [40] * 200, [8000] + [1] * 63):
        slots = torch.tensor([r + 1 if n else 0 for r, n in enumerate(lengths)], dtype=torch.int32)
        positions = torch.tensor([max(n - 1, 0) for n in lengths], dtype=torch.int32)
        shares = decode.plan(slots.to(device), positions.to(device), heads)
        row, slot, begin, end, first, count = (t.tolist() for t in shares[:6])
        assert shares.done.abs().max() == 0
        covered = [max(0, n - (window or n)) for n in lengths]
        for i, r in enumerate(row):
            if r < 0:
                continue
            assert slot[i] == slots[r] and begin[i] == covered[r]
            assert first[i] <= i < first[i] + count[i]
            covered[r] = end[i]
        assert covered == lengths


def test_the_same_bits_again(device, half, small_grid):
    case = Case((8, 2, 64, 16), [200, 31], device, half)
    first, _ = case.run()
    for _ in range(2):
        again, _ = case.run()
        assert torch.equal(again, first)


LINES = [
    ((4, 2, 16, 16), {}),
    ((9, 3, 24, 2), {"norm": False, "sinks": True}),  # a tile has many such pages
    # a tile is half of such a page
    ((4, 2, 16, 32), {"window": 40, "sinks": True, "softcap": 2.0}),
    ((2, 1, 16, 8), {"window": 1, "value_dim": 40}),
    ((4, 2, 16, 8), {"window": 20, "norms_values": True, "stores": False}),
    ((4, 2, 48, 16), {"norms_values": True, "value_dim": 32}),
]


@pytest.mark.parametrize(("shape", "kind"), LINES)
def test_stream_k(device, few_shares, shape, kind):
    Case(shape, [1, 33, 16, 90], device, **kind).check(kind=decode_stream_k)


@pytest.mark.parametrize("lengths", [[200], [40] + [5] * 8])
def test_stream_k_with_any_rows(device, few_shares, lengths):
    Case((2, 1, 16, 16), lengths, device).check(num_layers=2, kind=decode_stream_k)


@pytest.mark.parametrize("shape", [(4, 2, 256, 16), (16, 1, 64, 16)])
def test_stream_k_with_the_parameters_of_a_gpu(device, half, shape):
    """The parameters are those used on every GPU; the other tests use smaller ones."""
    case = Case(shape, [90] + [5] * 3, device, half)
    (out, pages), (expected, expected_pages) = case.run(1, decode_stream_k), case.expected()
    assert (out - expected).norm() / expected.norm() < 1e-2
    same_pages(pages, expected_pages, 0.1)


def test_stream_k_in_16_bits(device, half, few_shares):
    case = Case((8, 2, 64, 16), [31, 90], device, half)
    (out, pages), (expected, expected_pages) = case.run(2, decode_stream_k), case.expected()
    assert (out - expected).norm() / expected.norm() < 1e-2
    same_pages(pages, expected_pages, 0.1)


def test_the_kernel_set_uses_stream_k_if_there_are_enough_rows(device, few_shares, monkeypatch):
    monkeypatch.setattr(decode_stream_k, "FEWEST_ROWS", 5)
    case, kernels = Case((4, 2, 16, 16), [3, 40], device), TritonKernels()
    for num in (2, 5):
        tokens = Tokens(*(t[:num].to(device) for t in case.tokens))
        plan = kernels.plan(tokens, None, case.heads)
        assert isinstance(plan, StreamKPlan if num == 5 else DecodePlan)
        out = kernels.attention(
            case.joined[:num].to(device), QkNorms(*(norm.to(device) for norm in case.norms)), None,
            Angles(*(t[:num].to(device) for t in case.angles)),
            PagedKv(case.kv.to(device, copy=True), case.table.to(device)), plan, case.heads,
        )  # fmt: skip
        assert torch.allclose(out.cpu(), case.expected()[0][:num], atol=1e-5)
    assert not decode_stream_k.takes(64, Heads(64, 2, 16, 16, 1e-6, 1.0))
    assert not decode_stream_k.takes(64, Heads(2, 1, 512, 512, 1e-6, 1.0))


@pytest.mark.parametrize(
    ("rows", "shares"),
    [(32, 128), (64, 128), (96, 132), (128, 128), (256, 128), (200, 132), (500, 125)],
)
def test_rows_of_equal_length_are_split_equally(rows, shares):
    assert decode_stream_k._shares(rows, 132) == shares


@pytest.mark.parametrize("window", [None, 1, 50, 600])
def test_stream_k_covers_every_tile_once(device, few_shares, window):
    heads = Heads(8, 4, 16, 16, 1e-6, 1.0, window=window)
    for lengths in ([1], [1000], [3, 0, 500, 77, 32, 33], [40] * 200, [8000] + [1] * 63):
        slots = torch.tensor([r + 1 if n else 0 for r, n in enumerate(lengths)], dtype=torch.int32)
        positions = torch.tensor([max(n - 1, 0) for n in lengths], dtype=torch.int32)
        shares = decode_stream_k.plan(slots.to(device), positions.to(device), heads)
        row, begin, tile, slot, newest, first, num = (t.tolist() for t in shares[:7])
        assert slot == [*slots.tolist(), 0] and newest == [*positions.tolist(), 0]
        tiles = [
            (r, at)
            for r, n in enumerate(positions.tolist())
            for at in range(max(0, n + 1 - window) // 16 * 16 if window else 0, max(n, 1), 16)
            or [n]
        ]
        assert tile[0] == 0 and tile[-1] == len(tiles) and tile == sorted(tile)
        parts = set()
        for i, (start, end) in enumerate(itertools.pairwise(tile)):
            if start < end:
                assert tiles[start] == (row[i], begin[i])
                parts |= {(r, r + i) for r, _ in tiles[start:end]}
        expected = [(r, first[r] + i) for r in range(len(lengths)) for i in range(num[r])]
        assert sorted(parts) == expected
        costs = [
            end - start + SHORT.row_cost * len({r for r, _ in tiles[start:end]})
            for start, end in itertools.pairwise(tile)
        ]
        assert max(costs) - min(costs) <= 2 * SHORT.row_cost + 1
