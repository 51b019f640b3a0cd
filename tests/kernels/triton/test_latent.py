"""Tests of multi-head latent attention (MLA) kernels against the reference, over pages with NaN."""

from random import Random

import pytest
import torch

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.attention_plans import MlaPlan
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.attention import mla, mla_plan, mla_prefill, per_head, prefill
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.types import (
    Angles,
    Branches,
    Heads,
    IndexShape,
    MlaShape,
    MlaWeights,
    PagedKv,
    Rows,
    Tokens,
)

REFERENCE = ReferenceKernels()
SHAPES = [  # heads, latent, rope_dim, nope_dim, v_head_dim, page size
    (4, 32, 8, 16, 16, 16),
    (7, 16, 16, 8, 12, 24),
    (3, 48, 6, 10, 8, 1),
    (4, 32, 8, 16, 16, 64),
]
SMALL = SHAPES[0]
CUTS = [(6, 16), (1, 64), (10, 48)]  # spare chunks, and the minimum number of keys in a chunk
OF_TILES = [(4, 64), (1, 256)]  # the same for 16 bits, whose tiles have more keys


class Case:
    """Rows of (start, count): `count` real tokens behind a stored context of `start` tokens. A
    start of None is padding, a row of slot 0. Memory that was never stored is NaN, and so is a
    query of padding; unused pages are page 0.

    `span` is the number of tokens of every row, 1 in a decode step; without it, rows are packed,
    and four tokens of padding follow. With `older`, rows are new nodes of trees that began `older`
    places before. A row that begins before the text begins with padding.
    """

    def __init__(
        self, shape, rows, device, span=None, dtype=torch.float32, older=None, decode=False
    ) -> None:
        num_heads, size, rope_dim, nope_dim, v_head_dim, page = shape
        self.heads = Heads(
            num_heads, 1, rope_dim + size, size, 1e-6, (nope_dim + rope_dim) ** -0.5,
            mla=MlaShape(nope_dim, rope_dim, v_head_dim),
        )  # fmt: skip
        self.device, self.dtype, self.decode, self.span = device, dtype, decode, span
        self.owners = [(i, *row) for i, row in enumerate(rows, start=1) if row[0] is not None]
        self.trees = {} if older is None else {i: grown(*row, older) for i, *row in self.owners}
        self._place(rows)
        self._store(page)
        num, d = len(self.tokens.slots), nope_dim + rope_dim
        self.q = torch.randn(num, num_heads * d + 8)[:, :-8]
        self.k = torch.randn(num, 8 + rope_dim + size)[:, 8:]
        angle = torch.rand(num, 1, rope_dim // 2) * 6
        for hostile in (self.q, angle):
            hostile[self.tokens.slots == 0] = torch.nan
        self.angles = Angles(angle.cos(), angle.sin())
        self.k_norm = torch.rand(size) + 0.5
        self.up_k = torch.randn(num_heads, nope_dim, size) * size**-0.5
        self.up_v = torch.randn(num_heads, v_head_dim, size) * size**-0.5

    def _place(self, rows):
        """Assign slots and positions to the tokens."""
        slots, positions, parts = [], [], []
        for i, (start, count) in enumerate(rows, start=1):
            slot, taken = (0 if start is None else i), count if self.span is None else self.span
            places = [(start or 0) + j if j < count and slot else -1 for j in range(taken)]
            slots += [slot * (place >= 0) for place in places]
            positions += [max(place, 0) for place in places]
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
        """Store the contexts; every stored key is seen by some token."""
        per_slot = max((-(-(start + count) // page) for _, start, count in self.owners), default=1)
        num = max((i for i, *_ in self.owners), default=1)
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
        """Return attention and pages after the last of `num_layers` equal layers with one plan."""
        tokens = Tokens(*(t.to(device) for t in self.tokens))
        rows = self.rows and Rows(*(t.to(device) for t in self.rows[:4]), span=self.rows.span)
        branches = Branches(*(t.to(device) for t in self.branches)) if self.trees else None
        plan = its_kernels.plan(tokens, rows, self.heads, branches)
        given = (self.q, self.k, self.k_norm, self.up_k, self.up_v)
        q, k, *weights = (t.to(self.dtype).to(device, dtype) for t in given)
        angles = Angles(*(t.to(device) for t in self.angles))
        for _ in range(num_layers):
            pages = self.pages.to(self.dtype).to(device, dtype, copy=True)
            out = its_kernels.mla_attention(
                q,
                k,
                MlaWeights(*weights),
                angles,
                PagedKv(pages, self.table.to(device)),
                plan,
                self.heads,
            )
        return out.cpu(), pages.cpu()

    def check(self, num_layers=1):
        out, pages = self.run(TritonKernels(), self.device, self.dtype, num_layers)
        expected, expected_pages = self.run(REFERENCE, "cpu", torch.float32)
        assert out.shape == expected.shape and out.dtype is self.dtype
        real = self.tokens.slots > 0
        assert (out[~real] == 0).all()
        assert torch.equal(pages.isnan(), expected_pages.isnan()), (
            "memory of another row was written"
        )
        out, pages, expected_pages = out.float(), pages.float().nan_to_num(), expected_pages
        if self.dtype is torch.float32:
            assert torch.allclose(out, expected, atol=1e-5)
            assert torch.allclose(pages, expected_pages.nan_to_num(), atol=1e-5)
        else:
            error = (out - expected)[real].norm(dim=1) / expected[real].norm(dim=1)
            assert error.max() < 2e-2
            assert torch.allclose(pages, expected_pages.nan_to_num(), rtol=2e-2, atol=1e-3)


def grown(start, count, older):
    """Return base, bits and position of each token of a row whose tree began `older` places before.
    Bits past a token's own are set."""
    random, older = Random(start + count), min(older, start)
    nodes = [(0, -1)]  # bits and depth of possible parents
    for i in range(older + count):
        bits, depth = random.choice(nodes)
        nodes.append((bits | 1 << i, depth + 1))
    base = start - older
    return [
        (base, bits | 2**63 - (2 << (older + j)), base + depth)
        for j, (bits, depth) in enumerate(nodes[older + 1 :])
    ]


def keys(base, bits, end):
    """Return the keys before `end` that a token of a tree sees."""
    return [*range(base), *(at for at in range(base, end) if bits >> (at - base) & 1)]


@pytest.fixture(autouse=True)
def cut(request, monkeypatch):
    """Use a grid of few programs, in which even short rows have several chunks and blocks."""
    chosen = getattr(request, "param", CUTS[0])
    monkeypatch.setattr(mla_plan, "cut_for", lambda *_: chosen)
    monkeypatch.setattr(prefill, "BLOCK_ROWS", 32)


@pytest.fixture
def expanded(monkeypatch):
    """Use expanded form for a step's own tokens even in short steps, in small tiles; and fill
    memory that was never written with NaN."""
    monkeypatch.setattr(mla_prefill, "LEAST", -99)
    monkeypatch.setattr(mla_prefill, "tile_for", lambda *_: prefill.PrefillTile(16, 16, 4, 2))
    torch.set_deterministic_debug_mode("warn")
    yield
    torch.set_deterministic_debug_mode("default")


DECODE = [(0, 1), (None, 0), (6, 1), (32, 1), (15, 1), (None, 0), (70, 1), (None, 0)]
UNIFORM = [(0, 2), (None, 0), (50, 5), (31, 4), (None, 0)]
RAGGED = [(0, 1), (None, 0), (44, 3), (0, 9), (21, 10), (1, 1), (None, 0)]
PROMPTS = [(0, 17), (None, 0), (0, 1), (0, 5), (0, 16), (None, 0)]
both_cuts = pytest.mark.parametrize("cut", CUTS[:2], indirect=True, ids=str)


@pytest.mark.parametrize("cut", CUTS, indirect=True, ids=str)
def test_a_decode_step(device, cut):
    Case(SMALL, DECODE, device, span=1, decode=True).check()


@pytest.mark.parametrize(
    ("cut", "span"), [(CUTS[0], 2), (CUTS[0], 5), (CUTS[1], 1), (CUTS[1], 5)], indirect=["cut"]
)
def test_uniform_rows(device, cut, span):
    rows = [(start, min(count, span)) for start, count in UNIFORM]
    Case(SMALL, rows, device, span=span).check()


@both_cuts
def test_ragged_rows(device, cut):
    """Rows are prompts, chunks after a prefix, and decode tokens, of one block and of several."""
    Case(SMALL, RAGGED, device).check()


@both_cuts
def test_ragged_rows_expanded(device, expanded, cut):
    Case(SMALL, RAGGED, device).check()


@pytest.mark.parametrize("rows", [PROMPTS, [(33, 1), (2, 1), (None, 0)], [(None, 0)] * 2], ids=len)
def test_steps_of_one_kind_expanded(device, expanded, rows):
    """All rows are prompts without context, single tokens, or padding."""
    Case(SMALL, rows, device).check()


@pytest.mark.parametrize("shape", SHAPES[1:])
def test_odd_shapes_expanded(device, expanded, shape):
    Case(shape, [(0, 1), (None, 0), (30, 18), (3, 1)], device).check()


def test_every_layer_of_a_step_uses_one_plan_expanded(device, expanded):
    Case(SMALL, [(0, 4), (20, 3)], device).check(num_layers=2)


@pytest.mark.parametrize("cut", OF_TILES[:1], indirect=True, ids=str)
def test_16_bits_expanded(device, half, expanded, cut):
    Case(SHAPES[1], [(90, 3), (None, 0), (0, 18), (7, 1)], device, dtype=half).check()


def test_the_sizes_of_a_real_model_expanded(device, half, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(mla_prefill, "LEAST", 1)
    Case((2, 512, 64, 128, 128, 64), [(0, 20), (None, 0), (65, 3)], device, dtype=half).check()


def test_a_row_has_the_same_bits_at_every_place(device, expanded):
    case = Case(SMALL, [(0, 21), (37, 5), (0, 1), (50, 1), (3, 34)], device)
    out, _ = case.run(TritonKernels(), device, torch.float32)
    counts = case.rows.counts.flip(0)
    ends = counts.cumsum(0, dtype=torch.int32)
    spans = zip(case.rows.ends.tolist(), case.rows.counts.tolist(), strict=True)
    places = [list(range(end - count, end)) for end, count in spans]
    order = [place for row in places[::-1] for place in row] + [62, 63, 64, 65]
    case.rows = Rows(case.rows.slots.flip(0), case.rows.starts.flip(0), counts, ends)
    case.tokens = Tokens(*(t[order] for t in case.tokens))
    case.angles = Angles(*(t[order] for t in case.angles))
    case.q, case.k = case.q[order], case.k[order]
    turned, _ = case.run(TritonKernels(), device, torch.float32)
    assert torch.equal(turned, out[order])


def test_the_form_depends_only_on_sizes():
    def pays(num_tokens, num_rows, plain=128, result=128):
        rows = Rows(*torch.zeros(4, num_rows, dtype=torch.int32))
        return mla_prefill.pays(num_tokens, rows, MlaShape(plain, 64, result))

    assert pays(264, 8) and pays(512, 256)
    assert not pays(263, 8) and not pays(384, 256)
    assert not pays(512, 8, plain=192) and not pays(512, 8, result=256)


@pytest.mark.parametrize("kind", [{"decode": True}, {"span": 2}, {"older": 1}, {}])
def test_only_ragged_rows_without_trees_are_expanded(device, expanded, kind):
    case = Case(
        SMALL, [(3, 1), (2, 1)], device, **{"span": 1 if "decode" in kind else None, **kind}
    )
    rows = case.rows and Rows(*(t.to(device) for t in case.rows[:4]), span=case.rows.span)
    branches = Branches(*(t.to(device) for t in case.branches)) if case.trees else None
    tokens = Tokens(*(t.to(device) for t in case.tokens))
    work = mla_plan.plan(tokens, rows, case.heads, branches)
    assert (work.own is not None) == (kind == {})


@pytest.mark.parametrize("shape", SHAPES[1:])
@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        (DECODE[2:], {"span": 1, "decode": True}),
        (UNIFORM[1:], {"span": 5, "older": 3}),
        (RAGGED[:3], {}),
    ],
)
def test_odd_shapes(device, shape, rows, kind):
    Case(shape, rows, device, **kind).check()


@pytest.mark.parametrize(
    ("cut", "older"), [(CUTS[0], 0), (CUTS[0], 40), (CUTS[1], 40)], indirect=["cut"]
)
def test_trees(device, cut, older):
    """Trees are whole or new nodes; some tokens see nothing of some chunks."""
    Case(SMALL, UNIFORM, device, span=6, older=older).check()


def test_trees_in_ragged_rows(device, expanded):
    """Trees in ragged rows always read their keys from pages."""
    Case(SMALL, [(0, 3), (40, 9), (None, 0), (18, 4)], device, older=11).check()


def test_many_heads(device):
    Case((128, 16, 8, 4, 4, 8), [(20, 1), (None, 0)], device, span=1).check()


@pytest.mark.parametrize("cut", OF_TILES, indirect=True, ids=str)
@pytest.mark.parametrize(
    ("shape", "rows", "kind"),
    [
        (SHAPES[0], DECODE, {"span": 1, "decode": True}),
        (SHAPES[1], UNIFORM, {"span": 5}),
        (SHAPES[0], UNIFORM, {"span": 5, "older": 9}),
        (SHAPES[2], RAGGED[:3], {}),
        (SHAPES[3], RAGGED[:3], {}),
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
    case = Case((2, 64, 16, 8, 8, 16), [(3, 16)], device, span=16, dtype=half)
    _, pages = case.run(TritonKernels(), device, half)
    _, expected = case.run(REFERENCE, "cpu", half)
    got, want = pages.nan_to_num(), expected.nan_to_num()
    assert torch.allclose(got.float(), want.float(), rtol=2 * torch.finfo(half).eps, atol=1e-4)
    assert (got != want).float().mean() < 1e-3


@pytest.mark.parametrize("span", [1, 3])
def test_the_plan_covers_every_key_once(device, monkeypatch, span):
    """No two chunks that are merged share a workspace either."""
    monkeypatch.undo()
    heads = Heads(16, 1, 40, 32, 1e-6, 1.0, mla=MlaShape(8, 8, 8))
    for lengths in ([1], [9000], [3, 0, 500, 77, 32, 33], [40] * 200, [8000] + [1] * 63):
        slots = torch.tensor([r + 1 if n else 0 for r, n in enumerate(lengths)], dtype=torch.int32)
        starts = torch.tensor([max(n - 1, 0) for n in lengths], dtype=torch.int32)
        parts = [t.to(device) for t in (slots, starts, torch.full_like(slots, span), slots)]
        tokens = Tokens(*(t.repeat_interleave(span) for t in parts[:2]))
        work = mla_plan.plan(tokens, None if span == 1 else Rows(*parts, span=span), heads)
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


def test_rows_that_begin_before_the_text(device):
    """These rows begin with padding, and one row is only padding."""
    rows = [(-1, 3), (-3, 5), (20, 5), (-2, 2), (None, 0)]
    Case(SMALL, rows, device, span=5).check()


def test_padding_before_the_text_makes_no_chunk_shorter(device, monkeypatch):
    """Shorter chunks would be more than the grid holds."""
    monkeypatch.undo()
    heads = Heads(16, 1, 40, 32, 1e-6, 1.0, mla=MlaShape(8, 8, 8))
    spare, smallest = mla_plan.cut_for(11, 16 * heads.num_heads)
    length = (spare + 3) * smallest
    slots, starts = torch.arange(1, 12).int().to(device), [-15] * 10 + [length]
    starts = torch.tensor(starts, dtype=torch.int32, device=device)
    rows = Rows(slots, starts, torch.full_like(slots, 16), slots * 16, span=16)
    tokens = Tokens(slots.repeat_interleave(16), starts.repeat_interleave(16))
    work = mla_plan.plan(tokens, rows, heads)
    last = work.row == 10
    assert int((work.end - work.begin)[last].sum()) == length + 1
    assert (work.slot[last] == 11).all() and (work.slot[:10] == slots[:10]).all()


def test_every_grid_has_room_for_each_tile(monkeypatch):
    monkeypatch.undo()
    for rows in (1, 2, 64, 65, 5000):
        for pairs in (1, 16, 80, 1024, 20000):
            spare, smallest = mla_plan.cut_for(rows, pairs)
            assert spare >= 1 and smallest % mla.tile_for(pairs, 576, 2).keys == 0
            assert spare * pairs <= max(mla_plan.MAX_PARTIAL, pairs)


def test_a_gpu_with_less_memory_uses_fewer_keys(monkeypatch):
    assert mla.tile_for(128, 576, 2) == mla.MlaTile(pairs=32, keys=64, ahead=1, warps=4)
    assert mla.tile_for(16, 576, 2) == mla.MlaTile(pairs=16, keys=32, ahead=2, warps=4)
    monkeypatch.setattr(mla, "shared_memory", lambda: 99 << 10)
    assert mla.tile_for(128, 576, 2).keys == 32
    assert mla.tile_for(16, 576, 2).keys == 32


def test_a_step_of_several_blocks_of_rows(device, half):
    Case(SMALL, [(3, 1)] * 64 + [(None, 0), (40, 1)], device, span=1, dtype=half).check()


@pytest.mark.parametrize("cut", OF_TILES[1:], indirect=True, ids=str)
@pytest.mark.parametrize("num_heads", [16, 24])
def test_a_chunk_of_many_tiles(device, half, cut, num_heads):
    """A chunk has more tiles than are in flight at a time, for both widths of tiles."""
    rows = [(255, 1), (None, 0), (200, 1)]
    Case((num_heads, *SMALL[1:]), rows, device, span=1, dtype=half).check()


@pytest.mark.parametrize("num", [64, 65, 200, 257])
def test_products_of_each_head(device, half, num):
    """The rows are one block, several blocks, or a product by cuBLAS."""
    x = torch.randn(num, 3, 48, device=device).to(half)[:, :, :24]
    weight = torch.randn(3, 24, 40, device=device).to(half)
    for its in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
        out = torch.full((num, 3, 48), torch.nan, device=device, dtype=half)
        per_head.per_head(x, its, out[:, :, 8:])
        expected = torch.einsum("rhi,hic->rhc", x.float(), its.float())
        assert torch.allclose(out[:, :, 8:].float(), expected, rtol=2e-2, atol=2e-2)
        assert out[:, :, :8].isnan().all()


def test_a_gpu_with_less_memory_uses_fewer_columns(monkeypatch):
    assert per_head.cut_for(256, 512, 128, torch.bfloat16) == (512, 64, 64)
    monkeypatch.setattr(per_head, "shared_memory", lambda: 99 << 10)
    assert per_head.cut_for(256, 512, 128, torch.bfloat16) == (512, 32, 64)


def test_the_plan_of_latent_heads_is_its_own(device):
    case = Case(SMALL, [(3, 1)], device, span=1, decode=True)
    plan = TritonKernels().plan(Tokens(*(t.to(device) for t in case.tokens)), None, case.heads)
    assert isinstance(plan, MlaPlan)


def test_an_indexer_is_refused():
    shape = MlaShape(128, 64, 128, IndexShape(64, 128, 2048))
    with pytest.raises(UnsupportedModelError, match=r"index_topk: 2048.*--backend cpu"):
        TritonKernels().refuse(Heads(128, 1, 704, 512, 1e-6, 1.0, mla=shape))


def test_sizes_that_fit_no_kernel_are_refused():
    shape = MlaShape(128, 64, 128)
    TritonKernels().refuse(Heads(128, 1, 576, 512, 1e-6, 1.0, mla=shape))
    for heads, name in (
        (Heads(16, 1, 1088, 1024, 1e-6, 1.0, mla=shape), "latent: 1024"),
        (Heads(16, 1, 640, 512, 1e-6, 1.0, mla=MlaShape(8, 128, 8)), "rope_dim: 128"),
        (Heads(16, 1, 576, 512, 1e-6, 1.0, window=9, mla=shape), "window: 9"),
        (Heads(16, 1, 576, 512, 1e-6, 1.0, softcap=5.0, mla=shape), "softcap: 5.0"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{name}.*--backend cpu"):
            TritonKernels().refuse(heads)
