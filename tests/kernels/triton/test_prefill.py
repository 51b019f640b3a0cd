"""Tests of ragged prefill against a slow reference, with NaN in all memory it must not read."""

from random import Random

import pytest
import torch
from shapes import SHAPES as ODD
from torch import Tensor

from slotzero.kernels.attention_plans import PrefillPlan, TorchPlan
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.torch_rotation import rotate
from slotzero.kernels.triton.attention import prefill
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.types import Angles, Branches, Heads, PagedKv, QkNorms, Rows, Tokens

REFERENCE = ReferenceKernels()
EPS = 1e-6
SHAPES = [*ODD, (4, 1, 256, 16), (3, 1, 32, 24)]
# (start, count) of each row: prompts, chunks over a prefix and single tokens, at and across the
# borders of pages and of tiles of 32, 64 and 128 keys
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(
        INTERPRETED, reason="the interpreter multiplies the bits of a bfloat16 as integers"
    ),
)
ROWS = [(0, 70), (31, 2), (32, 1), (0, 1), (63, 5), (17, 33), (127, 3), (0, 3), (130, 1)]
FEW_ROWS = [(0, 40), (31, 2), (63, 5), (127, 3), (130, 1)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill the outputs of kernels with NaN, or with a huge index, beforehand."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


class Step:
    """Ragged rows over pages scattered in a pool in which all other values, and padding, are NaN.

    The tensors are on the CPU, in float32, with values that `dtype` represents exactly.
    """

    def __init__(
        self, shape, rows, dtype=torch.float32, norm=True, pad_tokens=7, pad_rows=3,
        value_dim=None, sinks=False, begun=0, **kind,
    ):  # fmt: skip
        torch.manual_seed(0)
        self.rows, self.dtype, self.begun = rows, dtype, begun
        heads, kv_heads, dim, page = shape
        value_dim = value_dim or dim
        self.heads = Heads(heads, kv_heads, dim, value_dim, EPS, dim**-0.5, **kind)
        per_slot = max(-(-(start + count) // page) for start, count in rows) + 1
        used = len(rows) * per_slot
        self.table = torch.zeros(len(rows) + 1, per_slot, dtype=torch.int32)
        self.table[1:] = (torch.randperm(used + 3)[:used] + 1).int().view(-1, per_slot)
        self.kv = torch.full((used + 4, page, kv_heads, dim + value_dim), torch.nan)
        for slot, (start, count) in enumerate(rows, start=1):
            self.table[slot, -(-(start + count) // page) :] = 2**30  # a trap
            low = self.low(max(0, start - begun))
            at = torch.arange(low, start if self.heads.stores else start + count)
            pages = self.table[slot, at // page]
            self.kv[pages, at % page] = self.exact(torch.randn(len(at), *self.kv.shape[2:]))
            self.table[slot, : low // page] = 0  # no longer in use

        ints = {"dtype": torch.int32}
        self.counts = torch.tensor([count for _, count in rows] + [0] * pad_rows, **ints)
        self.starts = torch.tensor([start for start, _ in rows] + [0] * pad_rows, **ints)
        self.slots = torch.tensor([*range(1, len(rows) + 1)] + [0] * pad_rows, **ints)
        self.ends = self.counts.cumsum(0).int()
        self.real = int(self.ends[-1])
        self.num_tokens = self.real + pad_tokens
        self.token_slots = torch.zeros(self.num_tokens, **ints)
        self.positions = torch.zeros(self.num_tokens, **ints)
        self.token_slots[: self.real] = self.slots.repeat_interleave(self.counts)
        offset = torch.arange(self.real) - (self.ends - self.counts).repeat_interleave(self.counts)
        self.positions[: self.real] = self.starts.repeat_interleave(self.counts) + offset

        self.joined = torch.full((self.num_tokens, sum(self.heads.sizes)), torch.nan)
        self.joined[: self.real] = self.exact(torch.randn(self.real, self.joined.shape[1]))
        angle = self.positions[:, None, None] * 10000 ** -(torch.arange(dim // 2) / (dim // 2))
        self.angles = Angles(angle.cos(), angle.sin())
        for part in self.angles:
            part[self.real :] = torch.nan
        self.q_norm, self.k_norm = self.exact(torch.randn(2, dim)) if norm else (None, None)
        if not self.heads.stores:
            self.k_norm = None
        self.sinks = self.exact(torch.randn(heads) * 2) if sinks else None
        self.branches: Branches | None = None

    def low(self, position: int) -> int:
        """Return the first key that a token at this position sees."""
        return self.heads.first_key(position)

    def exact(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return q and the pages, computed by the reference in `dtype`."""
        joined = self.joined[: self.real].to(self.dtype)
        q, k, v = joined.split(self.heads.sizes, dim=1)
        q, k = (part.reshape(self.real, -1, self.heads.head_dim) for part in (q, k))
        v = v.reshape(self.real, -1, self.heads.value_dim)
        if self.q_norm is not None:
            q = REFERENCE.rms_norm(q, self.q_norm.to(self.dtype), EPS)
        if self.k_norm is not None:
            k = REFERENCE.rms_norm(k, self.k_norm.to(self.dtype), EPS)
        if self.heads.norms_values:
            v = REFERENCE.rms_norm(v, None, EPS)
        angles = [part[: self.real] for part in self.angles]
        kv = self.kv.to(self.dtype)
        tokens = Tokens(self.token_slots[: self.real], self.positions[: self.real])
        if self.heads.stores:
            REFERENCE.store_kv(rotate(k, *angles), v, PagedKv(kv, self.table), tokens)
        padding = q.new_full((self.num_tokens - self.real, *q.shape[1:]), torch.nan)
        return torch.cat((rotate(q, *angles), padding)), kv

    def rope_store(self, device) -> tuple[Tensor, Tensor]:
        """Return q and the pages, computed by the kernel from a slice of wider rows."""
        wide = torch.full((self.num_tokens, self.joined.shape[1] + 16), torch.nan)
        wide[:, : self.joined.shape[1]] = self.joined
        joined = wide.to(device, self.dtype)[:, : self.joined.shape[1]]
        kv = self.kv.to(device, self.dtype, copy=True)
        norms = [
            None if w is None else w.to(device, self.dtype) for w in (self.q_norm, self.k_norm)
        ]
        q = prefill.rope_store(
            joined, QkNorms(*norms), Angles(*(part.to(device) for part in self.angles)),
            PagedKv(kv, self.table.to(device)),
            Tokens(self.token_slots.to(device), self.positions.to(device)),
            self.heads,
        )  # fmt: skip
        return q, kv

    def plan(self, device, group: int) -> Tensor:
        rows = (x.to(device) for x in (self.slots, self.starts, self.counts, self.ends))
        return prefill.cut_rows(Rows(*rows), self.num_tokens, prefill.block_tokens(group))

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        blocks = self.plan(q.device, self.heads.num_heads // self.heads.num_kv_heads)
        sinks = None if self.sinks is None else self.sinks.to(q.device, q.dtype)
        branches = None
        if self.branches is not None:
            branches = Branches(*(x.to(q.device) for x in self.branches))
        tokens = Tokens(self.token_slots.to(q.device), self.positions.to(q.device))
        stored = PagedKv(kv, self.table.to(q.device))
        plan = PrefillPlan(tokens, blocks, branches)
        return prefill.attend(q, sinks, stored, plan, self.heads)

    def attend_slowly(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return the attention of the real tokens, computed in float32."""
        tokens = Tokens(self.token_slots[: self.real], self.positions[: self.real])
        q, kv = q[: self.real].float(), kv.float()
        branches = self.branches and Branches(*(x[: self.real] for x in self.branches))
        return REFERENCE.attend(
            q, self.sinks, PagedKv(kv, self.table), TorchPlan(tokens, branches), self.heads
        )

    def check(self, device, noise: float) -> None:
        q, kv = self.expected()
        got = self.attend(q.to(device), kv.to(device)).float().cpu()
        near = {"atol": noise, "rtol": noise}
        assert torch.allclose(got[: self.real], self.attend_slowly(q, kv), **near)
        assert got[self.token_slots == 0].abs().max() == 0

    def grow(self) -> "Step":
        """Turn rows into trees, of which `begun` places came in an earlier step.

        At empty places pages hold NaN, and the token is padding with invalid branches. Keys before
        every window are NaN too.
        """
        random, page = Random(0), self.kv.shape[1]
        self.branches = bases, seen, stands = Branches(
            torch.full((self.num_tokens,), -(2**31), dtype=torch.int32),
            torch.full((self.num_tokens,), -1),
            torch.full((self.num_tokens,), -(2**31), dtype=torch.int32),
        )
        for row, (start, count) in enumerate(self.rows):
            base, first = max(0, start - self.begun), int(self.ends[row]) - count
            last, lowest = base, start + count
            for place, bits in enumerate(grown(start + count - base, random), start=base):
                token = first + place - start
                if bits is None:
                    self.spoil(row + 1, place)
                else:
                    last = place
                if place >= start and bits is None:
                    self.token_slots[token] = self.positions[token] = 0
                    self.joined[token] = torch.nan
                elif place >= start:
                    bases[token], seen[token] = base, bits
                    depth = (bits & (2 << place - base) - 1).bit_count() - 1
                    assert depth < (self.heads.window or 64)
                    stands[token] = base + depth
                    lowest = min(lowest, base + depth)
            for place in range(self.low(base), min(self.low(lowest), base)):
                self.spoil(row + 1, place)
            self.table[row + 1, last // page + 1 :] = 2**30
        return self

    def spoil(self, slot: int, place: int) -> None:
        page = self.kv.shape[1]
        self.kv[self.table[slot, place // page], place % page] = torch.nan


def grown(size: int, random: Random) -> list[int | None]:
    """Return the bits that each place of a tree sees; None for empty places. Bits past a place's
    own, which must be ignored, are set."""
    seen: list[int | None] = []
    for i in range(size):
        above = random.choice([0, *(bits for bits in seen if bits is not None)])
        seen.append(None if random.random() < 0.2 else above & (2 << i) - 1 | 1 << i)
    return [None if bits is None else bits | 2**63 - (2 << i) for i, bits in enumerate(seen)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize(
    ("shape", "value_dim"),
    [
        *((s, s[2]) for s in SHAPES),
        ((4, 2, 48, 16), 32),
        ((3, 3, 6, 4), 17),
        ((9, 1, 192, 16), 128),
    ],
)
def test_tokens_are_normed_rotated_and_stored(device, shape, value_dim, norm):
    step = Step(shape, [(0, 3), (14, 5), (9, 1)], norm=norm, value_dim=value_dim)
    step.kv[0] = 0
    want_q, want_kv = step.expected()
    q, kv = step.rope_store(device)
    assert torch.allclose(q.cpu(), want_q, atol=2e-6, equal_nan=True)
    got, want = (pages.split((shape[2], value_dim), -1) for pages in (kv.cpu(), want_kv))
    assert torch.allclose(got[0], want[0], atol=2e-6, equal_nan=True)
    assert torch.equal(got[1].nan_to_num(nan=-1e9), want[1].nan_to_num(nan=-1e9))
    assert (kv[0] == 0).all(), "page 0 was written"


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("shape", [(9, 3, 24, 16), (8, 1, 512, 16)])
def test_values_are_normed_or_read_from_another_layer(device, shape, stores, norm):
    """A layer that owns no KV leaves the pages as they are."""
    step = Step(shape, [(0, 3), (14, 5)], norm=norm, norms_values=True, stores=stores)
    want_q, want_kv = step.expected()
    q, kv = step.rope_store(device)
    assert torch.allclose(q.cpu(), want_q, atol=2e-6, equal_nan=True)
    assert torch.allclose(kv.cpu(), want_kv, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
@pytest.mark.parametrize("shape", [(8, 2, 128, 16), (9, 3, 64, 16)])
def test_16_bits_are_rounded_where_the_model_rounds(device, shape, dtype):
    step = Step(shape, [(0, 3), (14, 5)], dtype)
    want_q, want_kv = step.expected()
    q, kv = step.rope_store(device)
    for got, want in ((q.cpu(), want_q), (kv.cpu(), want_kv)):
        one_bit = {"rtol": torch.finfo(dtype).eps, "atol": 1e-6}
        assert torch.allclose(got.float(), want.float(), equal_nan=True, **one_bit)
        assert (got == want).sum() > 0.99 * want.isfinite().sum()


def cut(step: Step, block_tokens: int) -> list[list[int]]:
    """Return the expected plan: blocks sorted by their last key, then the padding in order."""
    blocks = []
    for row, (start, count) in enumerate(step.rows):
        first = int(step.ends[row]) - count
        for offset in range(0, count, block_tokens):
            size = min(block_tokens, count - offset)
            blocks.append([row + 1, first + offset, size, start + offset, start])
    blocks.sort(key=lambda block: -block[2] - block[3])  # stable: ties stay in row order
    num_blocks = -(-step.num_tokens // block_tokens) + len(step.slots)
    for i in range(num_blocks - len(blocks)):
        first = step.real + i * block_tokens
        blocks.append([0, first, min(block_tokens, max(step.num_tokens - first, 0)), 0, 0])
    return blocks


@pytest.mark.parametrize("group", [1, 2, 3, 8, 17, 71, 200])
def test_plan_covers_every_token_once_longest_first(device, group):
    generator = torch.Generator().manual_seed(group)
    many = torch.randint(1, 90 // group + 9, (140, 2), generator=generator).tolist()
    for rows, pad_tokens, pad_rows in [
        (ROWS, 7, 3),
        ([(0, 64)] * 4, 0, 0),
        ([(5, 1)], 300, 9),
        (many, 100, 20),
    ]:
        step = Step((1, 1, 2, 16), rows, pad_tokens=pad_tokens, pad_rows=pad_rows)
        got = step.plan(device, group).tolist()
        assert got == cut(step, prefill.block_tokens(group))
        tokens = [t for _, first, size, _, _ in got for t in range(first, first + size)]
        assert sorted(tokens) == list(range(step.num_tokens))


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_ragged_rows(device, shape):
    Step(shape, ROWS).check(device, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
@pytest.mark.parametrize("shape", SHAPES[::3] if INTERPRETED else SHAPES)
def test_attention_in_16_bits(device, shape, dtype):
    noise = torch.finfo(dtype).eps  # half for rounding the weights, half for the result
    Step(shape, [*FEW_ROWS, (250, 10)], dtype).check(device, noise)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize("kind", [{}, {"stores": False}])
def test_large_heads(device, dtype, kind):
    noise = 5e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    Step((8, 1, 512, 16), [(0, 20), (31, 2), (70, 9)], dtype, **kind).check(device, noise)


@pytest.mark.parametrize("window", [1, 9, 40, 70, 1000])
def test_a_window_ends_at_each_token(device, window):
    """Windows are smaller and larger than a tile of keys, a page and all contexts."""
    Step((3, 1, 16, 16), FEW_ROWS, window=window).check(device, 5e-6)
    Step((2, 2, 16, 24), [(100, 70)], torch.float16, window=window).check(device, 1e-3)


@pytest.mark.parametrize("window", [9, 40])
def test_a_chunk_begins_anew_within_a_row(device, window):
    Step((3, 1, 16, 16), FEW_ROWS, window=window, is_chunked=True).check(device, 5e-6)


@pytest.mark.parametrize("window", [None, 1, 40])
def test_a_sink_takes_its_share(device, window):
    Step((6, 2, 16, 16), FEW_ROWS, sinks=True, window=window).check(device, 5e-6)


@pytest.mark.parametrize("kind", [{}, {"sinks": True}, {"window": 40}])
def test_scores_are_capped(device, kind):
    Step((4, 2, 16, 16), FEW_ROWS, softcap=2.0, **kind).check(device, 5e-6)


@pytest.mark.parametrize("kind", [{}, {"sinks": True, "window": 40, "softcap": 2.0}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("dim", "value_dim"), [(48, 32), (16, 40), (192, 128)])
def test_values_of_another_size(device, dim, value_dim, dtype, kind):
    noise = 5e-6 if dtype is torch.float32 else torch.finfo(dtype).eps
    rows = [(0, 20), (31, 2), (70, 9)]
    Step((2, 1, dim, 16), rows, dtype, value_dim=value_dim, **kind).check(device, noise)


@pytest.mark.parametrize("kind", [{}, {"window": 9}, {"window": 40, "sinks": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_a_token_has_the_same_bits_however_its_prompt_is_split(device, dtype, kind):
    shape = (4, 1, 64, 16)
    whole = Step(shape, [(0, 100), (3, 40)], dtype, pad_tokens=0, pad_rows=0, **kind)
    q, kv = (x.to(device) for x in whole.expected())
    together = whole.attend(q, kv)
    for start, count in [(0, 1), (0, 33), (33, 31), (64, 36), (99, 1)]:
        part = Step(shape, [(start, count)], dtype, **kind)
        part.table, part.sinks = whole.table, whole.sinks
        mine = torch.full((part.num_tokens, *q.shape[1:]), torch.nan, dtype=dtype, device=device)
        mine[:count] = q[start : start + count]
        assert torch.equal(part.attend(mine, kv)[:count], together[start : start + count])


def test_stored_keys_are_attended_to(device):
    step = Step((6, 2, 64, 16), [(0, 40), (33, 1), (15, 9)])
    got = step.attend(*step.rope_store(device)).cpu()
    assert torch.allclose(got[: step.real], step.attend_slowly(*step.expected()), atol=1e-5)


def test_a_step_without_rows_gives_zeros(device):
    step = Step((8, 2, 64, 16), [(0, 4)])
    for values in (step.slots, step.counts, step.ends, step.starts, step.token_slots):
        values.zero_()
    q = torch.full((step.num_tokens, 8, 64), torch.nan, device=device)
    assert step.attend(q, step.kv.to(device)).abs().max() == 0


TREES = [(0, 40), (31, 2), (60, 9), (127, 20), (14, 33), (5, 1)]


@pytest.mark.parametrize(
    ("shape", "begun", "kind"),
    [
        ((4, 1, 64, 16), 0, {}),
        ((6, 1, 80, 32), 30, {}),
        ((3, 3, 6, 4), 7, {"sinks": True}),
        ((6, 2, 16, 16), 30, {"softcap": 2.0}),
        ((2, 1, 192, 16), 7, {"value_dim": 128}),
        ((4, 2, 16, 16), 0, {"window": 20}),
        ((3, 1, 16, 8), 30, {"window": 20}),
        ((3, 1, 32, 8), 7, {"window": 70, "sinks": True, "softcap": 2.0}),
    ],
)
def test_a_token_of_a_tree_sees_its_branch(device, shape, begun, kind):
    Step(shape, TREES, begun=begun, **kind).grow().check(device, 5e-6)


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
@pytest.mark.parametrize("kind", [{}, {"sinks": True, "softcap": 2.0}, {"window": 40}])
def test_a_tree_in_16_bits(device, dtype, kind):
    step = Step((4, 2, 64, 16), [(31, 9), (5, 1), (200, 63)], dtype, **kind)
    step.grow().check(device, torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
@pytest.mark.parametrize(("back", "window"), [(3, None), (62, None), (3, 4), (10, 40)])
def test_a_tree_of_one_branch_is_a_prompt_to_the_bit(device, dtype, back, window):
    """The tree may be declared to begin up to `back` places before each token."""
    step = Step((4, 1, 64, 16), FEW_ROWS, dtype, window=window)
    q, kv = (x.to(device) for x in step.expected())
    expected = step.attend(q, kv)
    bases = (step.positions - back).clamp_min(0)
    step.branches = Branches(bases, (2 << (step.positions - bases).long()) - 1, step.positions)
    assert torch.equal(step.attend(q, kv), expected)


def test_trees_of_slot_0_are_zeros(device):
    step = Step((8, 2, 64, 16), [(0, 4), (31, 2)]).grow()
    step.token_slots[:] = 0
    q = torch.full((step.num_tokens, 8, 64), torch.nan, device=device)
    step.table[:] = 2**30
    assert step.attend(q, step.kv.to(device)).abs().max() == 0


def test_rows_that_end_in_padding(device):
    """The last tokens of a row are slot 0: NaN where they would be stored has no effect."""
    torch.manual_seed(0)
    heads = Heads(4, 2, 32, 32, 1e-5, 32**-0.5)
    width, page, counts = 5, 16, [5, 2, 0, 1]
    kv = torch.randn(9, page, 2, 64, device=device)
    table = torch.tensor([[0, 0], [1, 2], [3, 4], [5, 6], [7, 8]], dtype=torch.int32, device=device)
    starts = torch.tensor([13, 27, 0, 4], dtype=torch.int32, device=device)
    row_slots = torch.tensor([1, 2, 0, 4], dtype=torch.int32, device=device)
    slots = torch.tensor(
        [slot if j < n else 0 for slot, n in zip([1, 2, 0, 4], counts, strict=True)
         for j in range(width)], dtype=torch.int32, device=device,
    )  # fmt: skip
    for slot, start, n in zip([1, 2, 4], [13, 27, 4], [5, 2, 1], strict=True):
        flat = kv[table[slot].long()].view(-1, 2, 64)
        flat[start + n :] = torch.nan
        kv[table[slot].long()] = flat.view(2, page, 2, 64)
    q = torch.randn(len(slots), 4, 32, device=device)
    ends = torch.arange(1, 5, dtype=torch.int32, device=device) * width
    widths = torch.full_like(ends, width)
    blocks = prefill.cut_rows(
        Rows(row_slots, starts, widths, ends), len(slots), prefill.block_tokens(2)
    )
    plan = PrefillPlan(Tokens(slots, slots), blocks, None)
    got = prefill.attend(q, None, PagedKv(kv, table), plan, heads)
    for t, slot in enumerate(slots.tolist()):
        if slot == 0:
            assert (got[t] == 0).all()
            continue
        end = int(starts[t // width]) + t % width + 1
        k, v = kv[table[slot].long()].view(-1, 2, 64)[:end].split(32, dim=-1)
        k, v = (part.repeat_interleave(2, dim=1) for part in (k, v))
        weights = (torch.einsum("hd,chd->hc", q[t], k) * heads.scale).softmax(-1)
        assert torch.allclose(got[t], torch.einsum("hc,chd->hd", weights, v), atol=1e-5)
