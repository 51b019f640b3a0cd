"""Tests of attention over uniform rows against a plain loop and prefill, over pages with NaN."""

from random import Random

import pytest
import torch

from slotzero.kernels.attention_plans import DecodePlan, PrefillPlan, VerifyPlan
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.attention import prefill, verify
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.types import Angles, Branches, Heads, PagedKv, QkNorms, Rows, Tokens

STARTS = [0, 3, 200, 63, 64, 17, 130]
GROUPS = [(2, 2, 16, 4), (6, 2, 24, 16), (8, 1, 64, 32)]  # heads, KV heads, head size, page size


class Case:
    """Rows in which the first `counts[r]` tokens are real. Memory that was never stored is NaN, and
    so are the inputs of padding; unused pages are page 0.

    With `steps` the rows are trees: 0, whole trees; else new nodes of trees with `steps` earlier
    rows.
    """

    def __init__(
        self, shape, span, counts, device, dtype=torch.float32, starts=STARTS, norm=True,
        value_dim=None, sinks=False, steps=None, **kind,
    ) -> None:  # fmt: skip
        num_heads, kv_heads, dim, page = shape
        value_dim = value_dim or dim
        self.heads = Heads(num_heads, kv_heads, dim, value_dim, 1e-6, dim**-0.5, **kind)
        self.span, self.counts, self.starts = span, counts, starts[: len(counts)]
        per_slot = -(-(max(starts) + span) // page)
        used = len(counts) * per_slot
        self.table = torch.zeros(len(counts) + 1, per_slot, dtype=torch.int32)
        self.table[1:] = (torch.randperm(used + 3)[:used] + 1).int().view(-1, per_slot)
        self.kv = torch.full((used + 4, page, kv_heads, dim + value_dim), torch.nan)
        self.trees = None if steps is None else self.grown(steps)
        for slot, start, count in self.rows():
            end = start if self.heads.stores else start + count
            stored = [at for j in range(count) for at in self.seen(slot, start, j) if at < end]
            for at in stored:
                self.kv[self.place(slot, at)] = torch.randn(kv_heads, dim + value_dim)
            self.table[slot, : min(stored, default=start) // page] = 0
            self.table[slot, -(-(start + count) // page) :] = 0
        is_real = torch.tensor([j < n for n in counts for j in range(span)])
        slots = torch.arange(1, len(counts) + 1).repeat_interleave(span) * is_real
        places = torch.arange(span).repeat(len(counts))
        positions = (torch.tensor(self.starts).repeat_interleave(span) + places) * is_real
        self.tokens = Tokens(slots.int(), positions.int())
        self.joined = torch.randn(len(slots), sum(self.heads.sizes) + 8)[:, :-8]
        angle = torch.rand(len(slots), 1, dim // 2) * 6
        for hostile in (self.joined, angle):
            hostile[~is_real] = torch.nan
        self.angles = Angles(angle.cos(), angle.sin())
        self.norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if norm else (None, None)
        if not self.heads.stores:
            self.norms = self.norms[0], None
        self.sinks = torch.randn(num_heads) * 2 if sinks else None
        self.device, self.dtype = device, dtype

    def rows(self):
        return zip(range(1, len(self.counts) + 1), self.starts, self.counts, strict=True)

    def grown(self, steps):
        """Return base, bits and depth of each token of each row. Bits past its own are set."""
        random, trees = Random(self.span), []
        for _, start, count in self.rows():
            row, levels = [], min(steps, start // self.span)
            base = start - levels * self.span
            above = [(0, -1)]  # bits and depth of possible parents
            for level in range(levels + 1):
                num = random.randint(1, self.span) if level < levels else count
                new = []
                for j in range(num):
                    i = level * self.span + j
                    bits, depth = random.choice(above if steps or not new else new)
                    new.append((bits | 1 << i, depth + 1))
                    row.append((i, base, new[-1][0] | 2**63 - (2 << i), depth + 1))
                above = new
            trees.append([node[1:] for node in row if node[0] >= levels * self.span])
        return trees

    def seen(self, slot, start, j):
        """Return the keys that a token of a row sees."""
        base, bits, depth = start + j + 1, 0, -1
        if self.trees is not None:
            base, bits, depth = self.trees[slot - 1][j]
        assert self.trees is None or (self.heads.window or depth + 1) > depth
        told = [at for at in range(base, start + j + 1) if bits >> (at - base) & 1]
        return [*range(self.heads.first_key(base + depth), base), *told]

    def branches(self):
        if self.trees is None:
            return None
        parts = torch.full((len(self.joined), 3), -1)
        for row, nodes in enumerate(self.trees):
            for j, (base, bits, depth) in enumerate(nodes):
                parts[row * self.span + j] = torch.tensor([base, bits, base + depth])
        bases, bits, stands = parts.to(self.device).unbind(1)
        return Branches(bases.int(), bits.contiguous(), stands.int())

    def place(self, slot, at):
        page = self.kv.shape[1]
        return int(self.table[slot, at // page]), at % page

    def rounded(self, tensor):
        return None if tensor is None else tensor.to(self.dtype).float()

    def expected(self):
        """Return attention and pages, computed token by token in float32 from the kernel's
        inputs."""
        heads, pages = self.heads, self.rounded(self.kv)
        group = heads.num_heads // heads.num_kv_heads
        parts = self.rounded(self.joined).split([*heads.sizes], dim=-1)
        out = torch.zeros(len(self.joined), heads.num_heads, heads.value_dim)
        for slot, start, count in self.rows():
            for j in range(count):
                t = (slot - 1) * self.span + j
                q = self.turned(parts[0][t], 0, t)
                if heads.stores:
                    k, v = self.turned(parts[1][t], 1, t), parts[2][t].view(-1, heads.value_dim)
                    if heads.norms_values:
                        v = v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6)
                    pages[self.place(slot, start + j)] = torch.cat((k, v), dim=-1)
                seen = [pages[self.place(slot, at)] for at in self.seen(slot, start, j)]
                keys, values = (
                    torch.stack(seen)
                    .repeat_interleave(group, 1)
                    .split([heads.head_dim, heads.value_dim], dim=-1)
                )  # [keys, heads, size] each
                score = torch.einsum("hd,khd->hk", q, keys) * heads.scale
                if heads.softcap is not None:
                    score = heads.softcap * (score / heads.softcap).tanh()
                if self.sinks is not None:
                    score = torch.cat((score, self.rounded(self.sinks)[:, None]), dim=1)
                weight = score.softmax(dim=1)[:, : len(keys)]
                out[t] = torch.einsum("hk,khd->hd", weight, values)
        return out.flatten(1), pages

    def turned(self, part, i, t):
        """Return the heads of token t, normed and rotated."""
        part, norm = part.view(-1, self.heads.head_dim), self.rounded(self.norms[i])
        if norm is not None:
            part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * norm
        (a, b), cos, sin = part.chunk(2, dim=-1), self.angles.cos[t], self.angles.sin[t]
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def given(self):
        """Return the inputs of attention on the device, tokens and rows."""
        one = [None if c is None else c.to(self.device, self.dtype) for c in self.constants()]
        angles = Angles(*(t.to(self.device) for t in self.angles))
        tokens = Tokens(*(t.to(self.device) for t in self.tokens))
        owners = torch.tensor([slot if n else 0 for slot, _, n in self.rows()])
        starts = torch.tensor(self.starts) * (owners > 0)
        counts = torch.full_like(owners, self.span)
        ends = torch.arange(1, len(owners) + 1) * self.span
        rows = (t.to(self.device, torch.int32) for t in (owners, starts, counts, ends))
        pages = self.kv.to(self.device, self.dtype, copy=True)
        joined, q_norm, k_norm, sinks = one
        kv = PagedKv(pages, self.table.to(self.device))
        taken = joined, QkNorms(q_norm, k_norm), sinks, angles, kv
        return taken, tokens, Rows(*rows, span=self.span)

    def constants(self):
        return self.joined, *self.norms, self.sinks

    def run(self, num_layers=1):
        """Return the result of the last of some equal layers, which share one plan."""
        taken, tokens, rows = self.given()
        plan = verify.plan(tokens.slots, rows, self.heads, self.branches())
        for _ in range(num_layers):
            taken, _, _ = self.given()
            out = verify.attend(*taken, plan, self.heads)
            assert plan.chunks.done.abs().max() == 0, "a layer leaves its counts to the next"
        return out.cpu().float(), taken[4].pages.cpu().float()

    def run_prefill(self):
        taken, tokens, rows = self.given()
        joined, norms, sinks, angles, kv = taken
        heads = self.heads
        group = heads.num_heads // heads.num_kv_heads
        blocks = prefill.cut_rows(rows, len(joined), prefill.block_tokens(group))
        q = prefill.rope_store(joined, norms, angles, kv, tokens, heads)
        plan = PrefillPlan(tokens, blocks, self.branches())
        out = prefill.attend(q, sinks, kv, plan, heads)
        return out.flatten(1).cpu(), kv.pages.cpu()

    def check(self, num_layers=1):
        got, expected = self.run(num_layers), self.expected()
        assert torch.allclose(got[0], expected[0], atol=1e-5)
        assert (got[0][self.tokens.slots == 0] == 0).all()
        same_pages(got[1], expected[1], 1e-5)


def same_pages(got, expected, atol):
    assert torch.equal(got.isnan(), expected.isnan()), "memory of another row was written"
    assert torch.allclose(got.nan_to_num(), expected.nan_to_num(), atol=atol)


@pytest.fixture(autouse=True)
def apart(request, monkeypatch):
    """Use a grid of few programs, in which even short rows have several chunks.

    The parameter is whether a row's own keys are a separate chunk, as they are if rows are few.
    """
    is_apart = getattr(request, "param", True)
    monkeypatch.setattr(verify, "cut_for", lambda *_: (10, 16, is_apart))
    return is_apart


ROWS = [(2, [1, 2, 2, 0]), (5, [5, 1, 3, 0, 4]), (16, [16, 9, 15])]  # span, counts


@pytest.mark.parametrize(
    ("shape", "span", "counts", "apart"),
    [
        (shape, *rows, (i + j) % 2 == 0)  # all pairs: each shape and each span either way
        for i, shape in enumerate(GROUPS)
        for j, rows in enumerate(ROWS)
    ],
    indirect=["apart"],
)
def test_equals_a_loop(device, shape, span, counts, apart):
    Case(shape, span, counts, device).check()


def test_every_count(device):
    Case((3, 1, 16, 8), 6, [0, 1, 2, 3, 4, 5, 6], device, norm=False).check()


@pytest.mark.parametrize("window", [1, 3, 5, 20, 130, 1000])
def test_a_window_moves_with_the_token(device, window):
    """The last tokens no longer see every key that the first one sees."""
    Case((4, 2, 16, 8), 5, [5, 4, 5], device, window=window).check()


@pytest.mark.parametrize("window", [3, 20, 70])
def test_chunked_attention_begins_anew_within_a_row(device, window):
    starts = [window - 2, 3 * window - 1, 40]
    case = Case((4, 2, 16, 8), 5, [5, 4, 5], device, starts=starts, window=window, is_chunked=True)
    case.check()


def test_a_chunk_of_which_a_token_sees_nothing(device):
    Case((1, 1, 16, 8), 20, [20, 18], device, starts=[60, 10], window=40).check()


@pytest.mark.parametrize("kind", [{}, {"softcap": 2.0}, {"window": 3}, {"window": 40}])
def test_a_sink_takes_its_share_once(device, kind):
    Case((6, 2, 16, 8), 4, [4, 1, 4], device, sinks=True, **kind).check()


@pytest.mark.parametrize("kind", [{}, {"sinks": True, "window": 40, "softcap": 2.0}])
@pytest.mark.parametrize(("dim", "value_dim"), [(48, 32), (16, 40), (192, 128)])
def test_values_of_another_size(device, dim, value_dim, kind):
    Case((4, 2, dim, 16), 3, [2, 3, 3], device, value_dim=value_dim, **kind).check()


def in_16_bits(cases):
    """Combine each case with short chunks and chunks of many tiles, and with `apart` on and off.

    The interpreter runs every pair of these, a GPU every combination of three.
    """
    cuts = ((10, 16), (1, 64))
    return pytest.mark.parametrize(
        ("case", "cut", "apart"),
        [
            (case, cut, is_apart)
            for i, case in enumerate(cases)
            for j, cut in enumerate(cuts)
            for is_apart in (True, False)
            if not INTERPRETED or (i + j) % 2 == is_apart
        ],
        indirect=["apart"],
    )


@in_16_bits(
    [
        ((4, 2, 64, 16), 4, {}),
        ((3, 1, 48, 16), 3, {"sinks": True, "window": 20, "softcap": 5.0}),
        ((8, 1, 32, 8), 7, {"window": 100}),
        ((2, 1, 256, 16), 2, {}),
    ]
)
def test_16_bits(device, half, monkeypatch, case, cut, apart):
    shape, span, kind = case
    monkeypatch.setattr(verify, "cut_for", lambda *_: (*cut, apart))
    case = Case(shape, span, [span, 1, 2, 0], device, half, **kind)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    is_real = case.tokens.slots > 0
    error = (out - expected)[is_real].norm(dim=1) / expected[is_real].norm(dim=1)
    assert error.max() < 2e-2
    assert (out[~is_real] == 0).all()
    same_pages(pages, expected_pages, 0.1)  # two units in the last place, at a value of 8


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        ((4, 2, 24, 8), {"norms_values": True}),
        ((4, 2, 24, 8), {"stores": False, "norms_values": True, "window": 20}),
        ((4, 2, 24, 8), {"stores": False, "steps": 0}),
        ((4, 2, 24, 8), {"stores": False, "steps": 3}),
        ((8, 1, 512, 16), {"norms_values": True}),
        ((8, 1, 512, 16), {"stores": False, "steps": 3}),
    ],
)
def test_values_are_normed_or_read_from_another_layer(device, shape, kind):
    """Rows are one tile, or two if heads are large."""
    Case(shape, 5, [5, 1, 3, 0], device, starts=[40, 3, 0, 9], **kind).check()


def test_large_heads_in_16_bits(device, half):
    case = Case((8, 1, 512, 16), 3, [3, 2], device, half, starts=[40, 3], norms_values=True)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    is_real = case.tokens.slots > 0
    error = (out - expected)[is_real].norm(dim=1) / expected[is_real].norm(dim=1)
    assert error.max() < 2e-2
    same_pages(pages, expected_pages, 0.1)


@pytest.mark.parametrize(
    "kind",
    [
        {},
        {"window": 30, "sinks": True, "softcap": 3.0},
        {"window": 30, "steps": 3},
        {"norms_values": True},
        {"stores": False, "window": 30},
    ],
)
def test_equals_prefill(device, kind):
    case = Case((6, 2, 32, 16), 5, [5, 2, 4, 0], device, **kind)
    (out, pages), (expected, expected_pages) = case.run(), case.run_prefill()
    assert torch.allclose(out, expected, atol=1e-5)
    same_pages(pages, expected_pages, 1e-5)


@pytest.mark.parametrize(
    ("shape", "span", "counts", "steps", "kind"),
    [
        ((4, 2, 16, 8), 5, [5, 1, 3, 0, 4], 0, {}),
        ((3, 1, 24, 4), 20, [20, 7, 19], 0, {"sinks": True}),
        ((2, 2, 16, 16), 16, [9, 16, 16], 0, {"window": 18}),
        ((4, 1, 16, 1), 6, [6, 6, 5], 0, {"window": 70, "sinks": True, "softcap": 2.0}),
        ((4, 2, 16, 8), 4, [1, 3, 4, 0, 2], 3, {}),
        ((6, 2, 16, 4), 2, [1, 2, 1, 2], 30, {"sinks": True}),
        ((2, 1, 16, 16), 8, [8, 7, 8, 1, 5], 6, {"window": 9}),
        ((4, 2, 16, 8), 3, [1, 2, 3], 10, {"window": 40, "softcap": 2.0, "value_dim": 40}),
    ],
)
def test_a_token_of_a_tree_sees_its_branch(device, shape, span, counts, steps, kind):
    """Trees are whole or new nodes; some tokens see nothing of some chunks."""
    Case(shape, span, counts, device, steps=steps, **kind).check()


@pytest.mark.parametrize(
    ("shape", "span", "counts", "num_layers", "kind"),
    [
        ((8, 1, 16, 16), 63, [63, 40, 0, 16], 1, {"steps": 0}),
        ((8, 1, 16, 16), 35, [35, 17, 9], 2, {"window": 30, "sinks": True}),
        ((45, 1, 16, 16), 7, [7, 4, 6], 1, {"window": 50, "softcap": 2.0, "steps": 2}),
    ],
)
def test_rows_of_several_tiles(device, shape, span, counts, num_layers, kind):
    Case(shape, span, counts, device, **kind).check(num_layers)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", [{}, {"window": 30, "sinks": True, "softcap": 3.0}])
def test_trees_of_both_forms_equal_the_reference(device, steps, kind):
    case = Case((6, 2, 32, 16), 5, [5, 2, 4, 0], device, steps=steps, **kind)
    results = []
    for its_kernels in (TritonKernels(), ReferenceKernels()):
        taken, tokens, rows = case.given()
        plan = its_kernels.plan(tokens, rows, case.heads, case.branches())
        results.append(
            (its_kernels.attention(*taken, plan, case.heads).cpu(), taken[4].pages.cpu())
        )
    (out, pages), (expected, expected_pages) = results
    assert torch.allclose(out, expected, atol=1e-5)
    same_pages(pages, expected_pages, 1e-5)


@in_16_bits([(7, 0), (4, 5)])
def test_trees_in_16_bits(device, half, monkeypatch, case, cut, apart):
    span, steps = case
    monkeypatch.setattr(verify, "cut_for", lambda *_: (*cut, apart))
    case = Case((8, 2, 32, 8), span, [span, 1, 3], device, half, steps=steps, window=50)
    (out, pages), (expected, expected_pages) = case.run(), case.expected()
    is_real = case.tokens.slots > 0
    error = (out - expected)[is_real].norm(dim=1) / expected[is_real].norm(dim=1)
    assert error.max() < 2e-2
    same_pages(pages, expected_pages, 0.1)


def test_a_tree_of_one_branch_is_a_row_to_the_bit(device):
    for kind in ({}, {"window": 9}):
        case = Case((4, 2, 16, 8), 4, [4, 2], device, starts=[3, 70], **kind)
        out, _ = case.run()
        case.trees = [[(start, (2 << j) - 1, j) for j in range(count)]
                      for _, start, count in case.rows()]  # fmt: skip
        assert torch.equal(case.run()[0], out)


def test_pages_of_one_position(device):
    Case((4, 2, 16, 1), 4, [4, 2, 3], device, starts=[0, 30, 65]).check()


def test_every_layer_of_a_step_uses_one_plan(device):
    Case((4, 2, 16, 16), 3, [3, 1, 2], device).check(num_layers=2)


def test_the_same_bits_again(device, half):
    case = Case((4, 2, 64, 16), 4, [4, 2], device, half, starts=[200, 31])
    first, _ = case.run()
    assert torch.equal(case.run()[0], first)


def test_the_grid_of_a_real_size(device, monkeypatch):
    monkeypatch.undo()
    Case((4, 2, 16, 16), 4, [4, 3], device, starts=[300, 0]).check()


@pytest.mark.parametrize("norms_whole", [False, True])
def test_uniform_rows_take_this_path(device, monkeypatch, norms_whole):
    case = Case((4, 2, 16, 8), 3, [3, 0, 2], device, norms_whole=norms_whole, norm=not norms_whole)
    taken, tokens, rows = case.given()
    plan = TritonKernels().plan(tokens, rows, case.heads)
    assert isinstance(plan, VerifyPlan)
    monkeypatch.setattr(prefill, "attend", None)
    out = TritonKernels().attention(*taken, plan, case.heads)
    expected, pages = case.expected()
    assert torch.allclose(out.cpu(), expected, atol=1e-5)
    same_pages(taken[4].pages.cpu(), pages, 1e-5)


def test_other_rows_do_not(device):
    case = Case((4, 2, 16, 8), 3, [3, 2], device)
    _, tokens, rows = case.given()
    branches = Branches(tokens.positions, tokens.positions.long(), tokens.positions)
    wide = Heads(130, 1, 16, 16, 1e-6, 1.0)
    for its_rows, heads, its_branches, expected in (
        (rows._replace(span=0), case.heads, None, PrefillPlan),
        (rows, wide, None, PrefillPlan),
        (rows, wide, branches, PrefillPlan),
        (rows, case.heads, branches, VerifyPlan),
        (None, case.heads, None, DecodePlan),
    ):
        plan = TritonKernels().plan(tokens, its_rows, heads, its_branches)
        assert type(plan) is expected


def test_a_gpu_with_less_memory_uses_fewer_pairs(monkeypatch):
    heads = Heads(8, 1, 256, 256, 1e-6, 1.0)
    assert verify.takes(64, heads) and not verify.takes(65, heads) and not verify.takes(0, heads)
    monkeypatch.setattr(verify, "shared_memory", lambda: 99 << 10)
    assert verify.takes(16, heads) and not verify.takes(17, heads)


def test_every_grid_has_room_for_each_row(monkeypatch):
    monkeypatch.undo()
    for rows in (1, 2, 3, 64, 65, 500):
        for kv_heads in (1, 2, 8, 128):
            for pairs in (2, 6, 48, 128):
                spare, smallest, _ = verify.cut_for(rows, kv_heads, pairs)
                assert spare >= rows and smallest % 64 == 0
