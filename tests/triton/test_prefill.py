"""Ragged prefill against the slow reference, with hostile memory wherever it must not look."""

import pytest
import torch
from shapes import SHAPES as ODD
from torch import Tensor

from slotzero.kernels.composed import rms_norm, rotate
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton import prefill
from slotzero.kernels.triton.launch import INTERPRETED

REFERENCE = ReferenceKernels()
EPS = 1e-6
SHAPES = [*ODD, (4, 1, 256, 16), (3, 1, 32, 24)]
# (start, count) of each row: prompts, chunks over a prefix and single tokens, at and across the
# borders of pages and of tiles of 32, 64 and 128 keys
BFLOAT16 = pytest.param(
    torch.bfloat16,
    marks=pytest.mark.skipif(INTERPRETED, reason="the interpreter multiplies its bits as integers"),
)
ROWS = [(0, 70), (31, 2), (32, 1), (0, 1), (63, 5), (17, 33), (127, 3), (0, 3), (130, 1)]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Whatever a kernel is given to fill holds NaN, or a huge index."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(x: Tensor) -> Tensor:
        return x.fill_(torch.nan if x.is_floating_point() else 2**30)

    monkeypatch.setattr(torch, "empty", lambda *a, **k: poison(empty(*a, **k)))
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: poison(empty_like(*a, **k)))


class Step:
    """Ragged rows over pages scattered in a pool whose every other value is NaN, like all padding.

    Kept on the CPU, in float32, of values that `dtype` holds exactly.
    """

    def __init__(self, shape, rows, dtype=torch.float32, norm=True, pad_tokens=7, pad_rows=3):
        torch.manual_seed(0)
        self.shape, self.rows, self.dtype = shape, rows, dtype
        heads, kv_heads, dim, page = shape
        per_slot = max(-(-(start + count) // page) for start, count in rows) + 1
        used = len(rows) * per_slot
        self.table = torch.zeros(len(rows) + 1, per_slot, dtype=torch.int32)
        self.table[1:] = (torch.randperm(used + 3)[:used] + 1).int().view(-1, per_slot)
        self.kv = torch.full((2, used + 4, page, kv_heads, dim), torch.nan)
        for slot, (start, count) in enumerate(rows, start=1):
            self.table[slot, -(-(start + count) // page) :] = 2**30  # a trap
            at = torch.arange(start)
            pages = self.table[slot, at // page]
            self.kv[:, pages, at % page] = self.exact(torch.randn(2, start, kv_heads, dim))

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

        self.joined = torch.full((self.num_tokens, (heads + 2 * kv_heads) * dim), torch.nan)
        self.joined[: self.real] = self.exact(torch.randn(self.real, self.joined.shape[1]))
        angle = self.positions[:, None, None] * 10000 ** -(torch.arange(dim // 2) / (dim // 2))
        self.cos, self.sin = angle.cos(), angle.sin()
        self.cos[self.real :], self.sin[self.real :] = torch.nan, torch.nan
        self.q_norm, self.k_norm = self.exact(torch.randn(2, dim)) if norm else (None, None)

    def exact(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()

    def expected(self) -> tuple[Tensor, Tensor]:
        """-> q and the pages, by the reference in `dtype`"""
        heads, kv_heads, dim, _ = self.shape
        joined = self.joined[: self.real].to(self.dtype).view(self.real, -1, dim)
        q, k, v = joined.split([heads, kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q = rms_norm(q, self.q_norm.to(self.dtype), EPS)
            k = rms_norm(k, self.k_norm.to(self.dtype), EPS)
        cos, sin = self.cos[: self.real], self.sin[: self.real]
        kv = self.kv.to(self.dtype)
        slots, positions = self.token_slots[: self.real], self.positions[: self.real]
        REFERENCE.store_kv(rotate(k, cos, sin), v, kv, self.table, slots, positions)
        padding = q.new_full((self.num_tokens - self.real, heads, dim), torch.nan)
        return torch.cat((rotate(q, cos, sin), padding)), kv

    def rope_store(self, device) -> tuple[Tensor, Tensor]:
        """-> q and the pages, by the kernel; joined is a part of something wider"""
        wide = torch.full((self.num_tokens, self.joined.shape[1] + 16), torch.nan)
        wide[:, : self.joined.shape[1]] = self.joined
        joined = wide.to(device, self.dtype)[:, : self.joined.shape[1]]
        kv = self.kv.to(device, self.dtype, copy=True)
        norms = [
            None if w is None else w.to(device, self.dtype) for w in (self.q_norm, self.k_norm)
        ]
        q = prefill.rope_store(
            joined, *norms, EPS, self.cos.to(device), self.sin.to(device), kv,
            self.table.to(device), self.token_slots.to(device), self.positions.to(device),
            *self.shape[:3],
        )  # fmt: skip
        return q, kv

    def plan(self, device, group: int) -> Tensor:
        rows = (x.to(device) for x in (self.slots, self.counts, self.ends, self.starts))
        (blocks,) = prefill.plan(*rows, self.num_tokens, group)
        return blocks

    def attend(self, q: Tensor, kv: Tensor) -> Tensor:
        blocks = self.plan(q.device, self.shape[0] // self.shape[1])
        return prefill.attend(q, kv, self.table.to(q.device), blocks, self.shape[2] ** -0.5)

    def attend_slowly(self, q: Tensor, kv: Tensor) -> Tensor:
        """In float32, of the real tokens"""
        slots, positions = self.token_slots[: self.real], self.positions[: self.real]
        q, kv = q[: self.real].float(), kv.float()
        return REFERENCE.attend(q, kv, self.table, slots, positions, self.shape[2] ** -0.5)


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_normed_rotated_and_stored(device, shape, norm):
    step = Step(shape, [(0, 3), (14, 5), (9, 1)], norm=norm)
    step.kv[:, 0] = 0
    want_q, want_kv = step.expected()
    q, kv = step.rope_store(device)
    assert torch.allclose(q.cpu(), want_q, atol=2e-6, equal_nan=True)
    assert torch.allclose(kv[0].cpu(), want_kv[0], atol=2e-6, equal_nan=True)
    assert torch.equal(kv[1].cpu().nan_to_num(nan=-1e9), want_kv[1].nan_to_num(nan=-1e9))
    assert (kv[:, 0] == 0).all(), "page 0 was written"


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
    """The plan by hand: blocks by the last key they reach, then the padding in order."""
    blocks = []
    for row, (start, count) in enumerate(step.rows):
        first = int(step.ends[row]) - count
        for offset in range(0, count, block_tokens):
            size = min(block_tokens, count - offset)
            blocks.append([row + 1, first + offset, size, start + offset])
    blocks.sort(key=lambda block: -block[2] - block[3])  # stable: ties stay in row order
    num_blocks = -(-step.num_tokens // block_tokens) + len(step.slots)
    for i in range(num_blocks - len(blocks)):
        first = step.real + i * block_tokens
        blocks.append([0, first, min(block_tokens, max(step.num_tokens - first, 0)), 0])
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
        tokens = [t for _, first, size, _ in got for t in range(first, first + size)]
        assert sorted(tokens) == list(range(step.num_tokens))


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_of_ragged_rows(device, shape):
    step = Step(shape, ROWS)
    q, kv = step.expected()
    got = step.attend(q.to(device), kv.to(device)).cpu()
    assert torch.allclose(got[: step.real], step.attend_slowly(q, kv), atol=5e-6)
    assert got[step.real :].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float16, BFLOAT16])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_16_bits(device, shape, dtype):
    step = Step(shape, [*ROWS, (250, 10)], dtype)
    q, kv = step.expected()
    got = step.attend(q.to(device), kv.to(device)).float().cpu()
    noise = torch.finfo(dtype).eps  # half of it for the weights, half for the result
    assert torch.allclose(got[: step.real], step.attend_slowly(q, kv), atol=noise, rtol=noise)
    assert got[step.real :].abs().max() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BFLOAT16])
def test_a_token_is_the_same_bits_however_its_prompt_is_cut(device, dtype):
    shape = (8, 2, 64, 16)
    whole = Step(shape, [(0, 100), (3, 40)], dtype, pad_tokens=0, pad_rows=0)
    q, kv = (x.to(device) for x in whole.expected())
    together = whole.attend(q, kv)
    for start, count in [(0, 1), (0, 33), (33, 31), (64, 36), (99, 1)]:
        part = Step(shape, [(start, count)], dtype)
        part.table = whole.table
        mine = torch.full((part.num_tokens, *q.shape[1:]), torch.nan, dtype=dtype, device=device)
        mine[:count] = q[start : start + count]
        assert torch.equal(part.attend(mine, kv)[:count], together[start : start + count])


def test_what_is_stored_is_attended_to(device):
    step = Step((6, 2, 64, 16), [(0, 40), (33, 1), (15, 9)])
    got = step.attend(*step.rope_store(device)).cpu()
    assert torch.allclose(got[: step.real], step.attend_slowly(*step.expected()), atol=1e-5)


def test_a_step_without_rows_gives_zeros(device):
    step = Step((8, 2, 64, 16), [(0, 4)])
    step.slots[:], step.counts[:], step.ends[:], step.starts[:] = 0, 0, 0, 0
    q = torch.full((step.num_tokens, 8, 64), torch.nan, device=device)
    assert step.attend(q, step.kv.to(device)).abs().max() == 0
