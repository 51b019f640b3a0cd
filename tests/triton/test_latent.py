"""Attention of latent heads against the reference: rows of every kind, over hostile pages."""

from random import Random

import pytest
import torch

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.nouns import Angles, Branches, Heads, Latent, Rows, Tokens
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton import kernels, latent
from slotzero.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()
SHAPES = [  # heads, latent, turned, plain, result, page size
    (4, 32, 8, 16, 16, 16),
    (7, 16, 16, 8, 12, 24),
    (3, 48, 6, 10, 8, 1),
]
SMALL = SHAPES[0]
CUTS = [(6, 16), (1, 64), (10, 48)]  # spare chunks, and the fewest keys of one
OF_TILES = [(4, 64), (1, 128)]  # the same of 16 bits, whose tiles have more keys


class Case:
    """Rows of (start, count): so many real tokens behind a stored context. A start of None is
    padding, a row of slot 0. Whatever nobody stored is NaN, and so is a query of padding; a page
    that is nobody's is page 0.

    A `span` is what every row takes up, 1 that of a decode step; without one, rows are packed, and
    four tokens of padding follow. With `older`, rows are of trees, which began so much before.
    """

    def __init__(
        self, shape, rows, device, span=None, dtype=torch.float32, older=None, decode=False
    ) -> None:
        num_heads, size, turned, plain, result, page = shape
        self.heads = Heads(
            num_heads, 1, turned + size, size, 1e-6, (plain + turned) ** -0.5,
            latent=Latent(plain, turned, result),
        )  # fmt: skip
        self.device, self.dtype, self.decode, self.span = device, dtype, decode, span
        self.owners = [(i, *row) for i, row in enumerate(rows, start=1) if row[0] is not None]
        self.trees = {} if older is None else {i: grown(*row, older) for i, *row in self.owners}
        self._place(rows)
        self._store(page)
        num, d = len(self.tokens.slots), plain + turned
        self.q = torch.randn(num, num_heads * d + 8)[:, :-8]
        self.k = torch.randn(num, 8 + turned + size)[:, 8:]
        angle = torch.rand(num, 1, turned // 2) * 6
        for hostile in (self.q, angle):
            hostile[self.tokens.slots == 0] = torch.nan
        self.angles = Angles(angle.cos(), angle.sin())
        self.k_norm = torch.rand(size) + 0.5
        self.up_k = torch.randn(num_heads, plain, size) * size**-0.5
        self.up_v = torch.randn(num_heads, result, size) * size**-0.5

    def _place(self, rows):
        """Which token is where."""
        slots, positions, parts = [], [], []
        for i, (start, count) in enumerate(rows, start=1):
            slot, taken = (0 if start is None else i), count if self.span is None else self.span
            slots += [slot] * count * (slot > 0) + [0] * (taken - count * (slot > 0))
            positions += [(start or 0) + j if j < count and slot else 0 for j in range(taken)]
            parts.append((slot, start or 0, taken if slot or self.span else 0, len(slots)))
        if self.span is None:
            slots, positions = slots + [0] * 4, positions + [0] * 4
        self.tokens = Tokens(*(torch.tensor(v, dtype=torch.int32) for v in (slots, positions)))
        columns = torch.tensor(parts, dtype=torch.int32).t().contiguous()
        self.rows = None if self.decode else Rows(*columns, span=self.span or 0)
        nodes = torch.full((len(slots), 3), -1)
        for slot, tree in self.trees.items():
            first = parts[slot - 1][3] - parts[slot - 1][2]
            nodes[first : first + len(tree)] = torch.tensor(tree)
        bases, seen, stands = nodes.unbind(1)
        self.branches = Branches(bases.int(), seen.contiguous(), stands.int())

    def _store(self, page):
        """Contexts, of which every key is seen by someone."""
        per_slot = max(-(-(start + count) // page) for _, start, count in self.owners)
        num = max(i for i, *_ in self.owners)
        self.table = torch.zeros(num + 1, per_slot, dtype=torch.int32)
        self.pages = torch.full((num * per_slot + 4, page, 1, self.heads.row_size), torch.nan)
        order = iter((torch.randperm(num * per_slot + 3) + 1).tolist())
        for slot, start, count in self.owners:
            for i in range(-(-(start + count) // page)):
                self.table[slot, i] = next(order)
            seen = set(range(start))
            if slot in self.trees:
                seen = {at for node in self.trees[slot] for at in keys(*node[:2], start)}
            for at in seen:
                row = torch.randn(self.heads.row_size)
                self.pages[self.table[slot, at // page], at % page, 0] = row

    def run(self, its_kernels, device, dtype, num_layers=1):
        """-> attention and pages after the last of some equal layers, which share one plan"""
        tokens = Tokens(*(t.to(device) for t in self.tokens))
        rows = self.rows and Rows(*(t.to(device) for t in self.rows[:4]), span=self.rows.span)
        branches = Branches(*(t.to(device) for t in self.branches)) if self.trees else None
        plan = its_kernels.plan(tokens, rows, self.heads, branches)
        given = (self.q, self.k, self.k_norm, self.up_k, self.up_v)
        given = [t.to(self.dtype).to(device, dtype) for t in given]
        angles = Angles(*(t.to(device) for t in self.angles))
        for _ in range(num_layers):
            pages = self.pages.to(self.dtype).to(device, dtype, copy=True)
            out = its_kernels.attention_latent(
                *given, angles, pages, self.table.to(device), plan, self.heads
            )
        return out.cpu(), pages.cpu()

    def check(self, num_layers=1):
        out, pages = self.run(TritonKernels(), self.device, self.dtype, num_layers)
        expected, expected_pages = self.run(REFERENCE, "cpu", torch.float32)
        assert out.shape == expected.shape and out.dtype is self.dtype
        real = self.tokens.slots > 0
        assert (out[~real] == 0).all()
        assert torch.equal(pages.isnan(), expected_pages.isnan()), "not its own place"
        out, pages, expected_pages = out.float(), pages.float().nan_to_num(), expected_pages
        if self.dtype is torch.float32:
            assert torch.allclose(out, expected, atol=1e-5)
            assert torch.allclose(pages, expected_pages.nan_to_num(), atol=1e-5)
        else:
            error = (out - expected)[real].norm(dim=1) / expected[real].norm(dim=1)
            assert error.max() < 2e-2
            assert torch.allclose(pages, expected_pages.nan_to_num(), rtol=2e-2, atol=1e-3)


def grown(start, count, older):
    """-> base, bits and standing of each token of a row, whose tree began `older` places before.
    Bits that nobody asks for are set."""
    random, older = Random(start + count), min(older, start)
    nodes = [(0, -1)]  # bits and depth of those that a token may follow
    for i in range(older + count):
        bits, depth = random.choice(nodes)
        nodes.append((bits | 1 << i, depth + 1))
    base = start - older
    return [
        (base, bits | 2**63 - (2 << (older + j)), base + depth)
        for j, (bits, depth) in enumerate(nodes[older + 1 :])
    ]


def keys(base, bits, end):
    """Of a token of a tree, before `end`"""
    return [*range(base), *(at for at in range(base, end) if bits >> (at - base) & 1)]


@pytest.fixture(autouse=True)
def cut(request, monkeypatch):
    """A grid of few programs, in which short rows are in several chunks."""
    chosen = getattr(request, "param", CUTS[0])
    monkeypatch.setattr(latent, "cut_for", lambda *_: chosen)


DECODE = [(0, 1), (None, 0), (6, 1), (32, 1), (15, 1), (None, 0), (120, 1), (None, 0)]
UNIFORM = [(0, 2), (None, 0), (98, 5), (31, 4), (None, 0)]
RAGGED = [(0, 1), (None, 0), (64, 3), (0, 9), (37, 34), (None, 0)]
both_cuts = pytest.mark.parametrize("cut", CUTS[:2], indirect=True, ids=str)


@pytest.mark.parametrize("cut", CUTS, indirect=True, ids=str)
def test_a_decode_step(device, cut):
    Case(SMALL, DECODE, device, span=1, decode=True).check()


@both_cuts
@pytest.mark.parametrize("span", [1, 2, 5])
def test_uniform_rows(device, cut, span):
    rows = [(start, min(count, span)) for start, count in UNIFORM]
    Case(SMALL, rows, device, span=span).check()


@both_cuts
def test_ragged_rows(device, cut):
    """Prompts, chunks behind a prefix, and decode tokens, of one block and of several."""
    Case(SMALL, RAGGED, device).check()


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (DECODE, {"span": 1, "decode": True}),
        (UNIFORM, {"span": 5}),
        (UNIFORM, {"span": 5, "older": 3}),
        (RAGGED[:3], {}),
    ],
)
def test_odd_shapes(device, shape, rows, kind):
    Case(shape, rows, device, **kind).check()


@both_cuts
@pytest.mark.parametrize("older", [0, 40])
def test_trees(device, cut, older):
    """Whole ones, and what grows on them; in chunks of which some tokens see nothing."""
    Case(SMALL, UNIFORM, device, span=6, older=older).check()


def test_trees_in_ragged_rows(device):
    Case(SMALL, [(0, 3), (50, 12), (None, 0), (18, 9)], device, older=11).check()


def test_many_heads(device):
    Case((128, 16, 8, 4, 4, 8), [(40, 1), (None, 0)], device, span=1).check()


@pytest.mark.parametrize("cut", OF_TILES, indirect=True, ids=str)
@pytest.mark.parametrize(
    ("shape", "rows", "kind"),
    [
        (SHAPES[0], DECODE, {"span": 1, "decode": True}),
        (SHAPES[1], UNIFORM, {"span": 5}),
        (SHAPES[0], UNIFORM, {"span": 5, "older": 9}),
        (SHAPES[2], RAGGED[:3], {}),
    ],
)
def test_16_bits(device, half, cut, shape, rows, kind):
    Case(shape, rows, device, dtype=half, **kind).check()


@pytest.mark.parametrize("cut", OF_TILES[:1], indirect=True, ids=str)
@pytest.mark.parametrize("num_heads", [16, 24])
def test_the_sizes_of_a_real_model(device, half, cut, num_heads):
    shape = (num_heads, 512, 64, 128, 128, 16)
    Case(shape, [(140, 1), (None, 0), (31, 1)], device, span=1, dtype=half, decode=True).check()


def test_the_grid_of_a_real_size(device, half, monkeypatch):
    monkeypatch.undo()
    Case(SMALL, [(300, 1), (None, 0)], device, span=1, dtype=half, decode=True).check()


def test_every_layer_of_a_step_uses_one_plan(device):
    Case(SMALL, DECODE, device, span=1, decode=True).check(num_layers=2)


def test_the_same_bits_again(device):
    case = Case(SMALL, DECODE, device, span=1, decode=True)
    first, again = (case.run(TritonKernels(), device, torch.float32)[0] for _ in range(2))
    assert torch.equal(first, again)


def test_rows_are_rounded_as_the_reference_rounds(device, half):
    case = Case((2, 64, 16, 8, 8, 16), [(3, 16)] * 2, device, span=16, dtype=half)
    _, pages = case.run(TritonKernels(), device, half)
    _, expected = case.run(REFERENCE, "cpu", half)
    got, want = pages.nan_to_num(), expected.nan_to_num()
    assert torch.allclose(got.float(), want.float(), rtol=2 * torch.finfo(half).eps, atol=1e-4)
    assert (got != want).float().mean() < 1e-3


@pytest.mark.parametrize("span", [1, 3])
def test_the_plan_covers_every_key_once(device, monkeypatch, span):
    """And no two chunks that are to be merged share their place."""
    monkeypatch.undo()
    heads = Heads(16, 1, 40, 32, 1e-6, 1.0, latent=Latent(8, 8, 8))
    for lengths in ([1], [9000], [3, 0, 500, 77, 32, 33], [40] * 200, [8000] + [1] * 63):
        slots = torch.tensor([r + 1 if n else 0 for r, n in enumerate(lengths)], dtype=torch.int32)
        starts = torch.tensor([max(n - 1, 0) for n in lengths], dtype=torch.int32)
        parts = [t.to(device) for t in (slots, starts, torch.full_like(slots, span), slots)]
        tokens = Tokens(*(t.repeat_interleave(span) for t in parts[:2]))
        work = latent.plan(tokens, None if span == 1 else Rows(*parts, span=span), heads)
        covered, places = [0] * len(lengths), []
        columns = (t.tolist() for t in (work.row, work.begin, work.end, work.first, work.num))
        for i, (row, begin, end, first, num) in enumerate(zip(*columns, strict=True)):
            if row < 0:
                continue
            assert begin == covered[row] and first <= i < first + num
            covered[row] = end
            if num > 1:
                places.append(i + first - 2 * row)
        assert covered == lengths
        assert len(set(places)) == len(places)
        assert all(0 <= place < len(work.partial) for place in places)


def test_every_grid_has_room_for_each_tile(monkeypatch):
    monkeypatch.undo()
    for rows in (1, 2, 64, 65, 5000):
        for pairs in (1, 16, 80, 1024, 20000):
            spare, smallest = latent.cut_for(rows, pairs)
            assert spare >= 1 and smallest % 64 == 0
            assert spare * pairs <= max(latent.MAX_PARTIAL, pairs)


def test_a_card_with_less_memory_takes_fewer_keys(monkeypatch):
    assert latent.tile_for(128, 576, 2) == latent.Tile(pairs=32, keys=64, warps=4)
    assert latent.tile_for(16, 576, 2) == latent.Tile(pairs=16, keys=64, warps=4)
    monkeypatch.setattr(latent, "shared_memory", lambda: 99 << 10)
    assert latent.tile_for(128, 576, 2).keys == 32
    assert latent.tile_for(16, 576, 2).keys == 64


def test_the_plan_of_latent_heads_is_its_own(device):
    case = Case(SMALL, [(3, 1)], device, span=1, decode=True)
    plan = TritonKernels().plan(Tokens(*(t.to(device) for t in case.tokens)), None, case.heads)
    assert len(plan) not in (kernels.DECODE, kernels.VERIFY, kernels.PREFILL)


def test_what_no_kernel_holds_is_refused():
    shape = Latent(128, 64, 128)
    TritonKernels().refuse(Heads(128, 1, 576, 512, 1e-6, 1.0, latent=shape))
    for heads, name in (
        (Heads(16, 1, 1088, 1024, 1e-6, 1.0, latent=shape), "latent: 1024"),
        (Heads(16, 1, 640, 512, 1e-6, 1.0, latent=Latent(8, 128, 8)), "turned_dim: 128"),
        (Heads(16, 1, 576, 512, 1e-6, 1.0, window=9, latent=shape), "window: 9"),
        (Heads(16, 1, 576, 512, 1e-6, 1.0, softcap=5.0, latent=shape), "softcap: 5.0"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{name}.*--backend cpu"):
            TritonKernels().refuse(heads)
