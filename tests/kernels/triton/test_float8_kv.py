"""Tests of attention over FP8 pages against the reference, with NaN in memory not to be read.

The cases are those of the tests of each kernel, with their pages as codes.
"""

from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from test_decode import LENGTHS, SHORT
from test_decode import Case as DecodeCase
from test_latent import Case as MlaCase
from test_prefill import Step
from test_verify import STARTS
from test_verify import Case as VerifyCase
from torch import Tensor

from slotzero.kernels.attention_plans import DecodePlan, PrefillPlan, StreamKPlan, VerifyPlan
from slotzero.kernels.float8_kv import CODES, from_codes, to_codes
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.attention import decode, decode_stream_k, mla_prefill, verify
from slotzero.kernels.triton.attention.float8 import as_query, as_read, as_stored, numbers
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.types import (
    Angles,
    Branches,
    Heads,
    MlaWeights,
    PagedKv,
    QkNorms,
    Rows,
    Tokens,
)

REFERENCE = ReferenceKernels()
SCALES = torch.tensor([0.011, 0.03])  # some keys and values are beyond 448 of them


def moved(given, device, dtype=None):
    if given is None:
        return None
    return given.to(device, dtype if given.is_floating_point() else None, copy=True)


def in_codes(pages, heads):
    """Return pages with the codes of their numbers; NaN stays NaN."""
    if heads.mla is not None:
        return to_codes(pages, SCALES[0])
    k, v = pages.split([heads.head_dim, heads.value_dim], dim=-1)
    return torch.cat((to_codes(k, SCALES[0]), to_codes(v, SCALES[1])), dim=-1)


class Given(NamedTuple):
    """What the kernels of one step are given, beside the KV cache; on the CPU, in float32."""

    heads: Heads
    inputs: tuple[Tensor | None, ...]
    tokens: Tokens
    rows: Rows | None
    branches: Branches | None
    angles: Angles

    def run(self, kernels, where, dtype, kind, cache, num_layers=1):
        """Run equal layers with one plan, each over its own copy of the cache.

        Inputs are rounded to `dtype` and passed as `kind`; return the last layer's result and
        pages, and the plan."""

        def there(parts):
            return None if parts is None else type(parts)(*(moved(t, where) for t in parts[:4]))

        rows = self.rows and there(self.rows)._replace(span=self.rows.span)
        plan = kernels.plan(there(self.tokens), rows, self.heads, there(self.branches))
        for _ in range(num_layers):
            kv, given = cache(), [rounded(t, dtype, where, kind) for t in self.inputs]
            run = kernels.attention
            if self.heads.mla is None:
                given = [given[0], QkNorms(*given[1:3]), given[3]]
            else:
                run, given = kernels.mla_attention, [*given[:2], MlaWeights(*given[2:])]
            out = run(*given, there(self.angles), kv, plan, self.heads)
        return out.float().cpu(), kv.pages, plan


def compare(case, given, device, dtype, num_layers=1):
    """Run both kernel sets over the case; return the kernels' plan."""
    codes, sides = in_codes(pages_of(case), case.heads), []
    for kernels, where, kind in (
        (REFERENCE, torch.device("cpu"), torch.float32),
        (TritonKernels(), device, dtype),
    ):

        def cache(where=where):
            return PagedKv(moved(codes, where), moved(case.table, where), moved(SCALES, where))

        sides.append(given.run(kernels, where, dtype, kind, cache, num_layers))
    (expected, want, _), (got, stored, plan) = sides
    real = given.tokens.slots > 0
    assert (got[~real] == 0).all()
    # In 16 bits, norms round some values to a neighbouring code, up to an eighth away: in a short
    # row, where a value has a large part of the weight, this moves a result by a tenth.
    close = {"rtol": 1e-4, "atol": 2e-5} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 0.12}
    assert torch.allclose(got[real], expected[real], **close), (got - expected)[real].abs().max()
    same_codes(stored.cpu(), want, dtype)
    return plan


def pages_of(case):
    return case.pages if case.heads.mla is not None else case.kv


def rounded(tensor, dtype, device, kind):
    """Return a tensor with the numbers of `dtype`."""
    return None if tensor is None else tensor.to(dtype).to(device, kind)


def same_codes(got, want, dtype):
    """Codes of numbers that differ by rounding may be neighbours."""
    assert (got != want).float().mean() <= (0.001 if dtype is torch.float32 else 0.05)
    one, noise = torch.ones(()), 1e-3 if dtype is torch.float32 else 1.0
    numbers = from_codes(got, one), from_codes(want, one)
    assert torch.allclose(*numbers, rtol=2**-3, atol=noise, equal_nan=True)


def given_to_decode(case):
    inputs = case.joined, *case.norms, case.sinks
    return Given(case.heads, inputs, case.tokens, None, None, case.angles)


def given_to_verify(case):
    inputs, (_, _, rows) = (case.joined, *case.norms, case.sinks), case.given()
    rows = Rows(*(t.cpu() for t in rows[:4]), span=rows.span)
    branches = case.branches() and Branches(*(t.cpu() for t in case.branches()))
    return Given(case.heads, inputs, case.tokens, rows, branches, case.angles)


def given_to_prefill(step):
    tokens = Tokens(step.token_slots, step.positions)
    rows = Rows(step.slots, step.starts, step.counts, step.ends)
    inputs = step.joined, step.q_norm, step.k_norm, step.sinks
    return Given(step.heads, inputs, tokens, rows, step.branches, step.angles)


def given_to_mla(case):
    inputs = case.q, case.k, case.k_norm, case.up_k, case.up_v
    branches = case.branches if case.trees else None
    return Given(case.heads, inputs, case.tokens, case.rows, branches, case.angles)


def check_decode(case, device, dtype=torch.float32, **more):
    return compare(case, given_to_decode(case), device, dtype, **more)


def check_verify(case, device, dtype=torch.float32, **more):
    return compare(case, given_to_verify(case), device, dtype, **more)


def check_prefill(step, device, dtype=torch.float32):
    return compare(step, given_to_prefill(step), device, dtype)


def check_mla(case, device, dtype=torch.float32, **more):
    return compare(case, given_to_mla(case), device, dtype, **more)


@pytest.fixture
def small_grid(monkeypatch):
    monkeypatch.setattr(decode, "cut_for", lambda rows: (40, 16))
    monkeypatch.setattr(verify, "cut_for", lambda *_: (10, 16, True))


@pytest.fixture
def few_shares(monkeypatch):
    monkeypatch.setattr(decode_stream_k, "FEWEST_ROWS", 1)
    monkeypatch.setattr(decode_stream_k, "num_processors", lambda: 10)
    monkeypatch.setattr(decode_stream_k, "shape_for", lambda *_: SHORT)
    monkeypatch.setattr(decode_stream_k, "SMALLEST", 1)


@triton.jit
def _convert_kernel(x, codes, read, query, scale, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    value = tl.load(x + i)
    code = as_stored(value, scale, codes)
    tl.store(codes + i, code)
    tl.store(read + i, as_read(code, scale, tl.float32))
    tl.store(query + i, as_query(value, codes).to(tl.float32))


@triton.jit
def _numbers_kernel(codes, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(out + i, numbers(tl.load(codes + i), out.dtype.element_ty))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_rounded_and_read_as_in_torch(device, dtype):
    x = torch.cat([torch.randn(1000) * 0.5**power for power in range(-6, 12)])
    x = torch.cat([x, torch.tensor([0.0, 1e5, -1e5, torch.inf, -torch.inf, torch.nan])])
    x = torch.nn.functional.pad(x, ((1 << 15) - len(x), 0)).to(dtype)
    codes = torch.empty(len(x), dtype=CODES, device=device)
    read, query = torch.empty(2, len(x), device=device).unbind()
    _convert_kernel[(1,)](x.to(device), codes, read, query, 0.37, SIZE=len(x))
    scale = torch.tensor(0.37)
    assert torch.equal(codes.cpu() & 0x7F, to_codes(x, scale) & 0x7F)
    assert torch.equal(*(numbers[:-1] for numbers in (read.cpu(), from_codes(codes.cpu(), scale))))
    assert INTERPRETED or read[-1].isnan()  # the interpreter has no NaN in float8
    most = 65504 if dtype is torch.bfloat16 else torch.inf
    wide = x.float().clamp(-most, most)
    assert torch.allclose(query.cpu(), wide, rtol=0, atol=2**-25, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_every_code_is_read_exactly(device, dtype):
    codes = torch.arange(256).to(CODES)
    out = torch.empty(256, dtype=dtype, device=device)
    _numbers_kernel[(1,)](codes.to(device), out, SIZE=256)
    expected = from_codes(codes, torch.ones(())).to(dtype)
    is_number = ~expected.isnan()
    assert torch.equal(out.cpu()[is_number], expected[is_number])
    assert INTERPRETED or out.isnan().sum() == 2


KINDS = [
    ((8, 2, 128, 16), {}),
    ((9, 3, 24, 2), {"norm": False, "sinks": True}),
    ((4, 2, 16, 32), {"window": 40, "sinks": True, "softcap": 2.0}),
    ((2, 1, 16, 8), {"window": 1, "value_dim": 40}),
    ((4, 2, 24, 8), {"window": 20, "norms_values": True, "stores": False}),
    ((4, 2, 48, 16), {"norms_values": True, "value_dim": 32}),
    ((5, 5, 6, 8), {}),
]


@pytest.mark.parametrize(("shape", "kind"), KINDS)
def test_decode(device, small_grid, shape, kind):
    plan = check_decode(DecodeCase(shape, LENGTHS, device, **kind), device, num_layers=2)
    assert isinstance(plan, DecodePlan)


@pytest.mark.parametrize(("shape", "kind"), KINDS)
def test_stream_k(device, few_shares, shape, kind):
    plan = check_decode(DecodeCase(shape, [1, 33, 16, 90], device, **kind), device, num_layers=2)
    assert isinstance(plan, StreamKPlan)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], ((8, 1, 512, 16), {"norms_values": True})])
def test_decode_in_16_bits(device, half, small_grid, kind):
    shape, more = kind
    check_decode(DecodeCase(shape, [150, 7], device, half, **more), device, half)


@pytest.mark.parametrize("shape", [(8, 2, 128, 16), (16, 1, 64, 16), (4, 2, 256, 16)])
def test_stream_k_with_the_parameters_of_a_gpu(device, half, shape, monkeypatch):
    monkeypatch.setattr(decode_stream_k, "FEWEST_ROWS", 1)
    plan = check_decode(DecodeCase(shape, [90] + [5] * 3, device, half), device, half)
    assert isinstance(plan, StreamKPlan)


@pytest.mark.parametrize(("shape", "kind"), [*KINDS[:2], KINDS[2], KINDS[4], KINDS[5]])
def test_verify(device, small_grid, shape, kind):
    case = VerifyCase(shape, 5, [5, 1, 3, 0, 4], device, **kind)
    assert isinstance(check_verify(case, device, num_layers=2), VerifyPlan)


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", [{}, {"window": 70, "softcap": 2.0}])
def test_verify_of_trees(device, small_grid, kind, steps):
    check_verify(
        VerifyCase((6, 2, 24, 16), 5, [5, 1, 3, 0, 4], device, steps=steps, **kind), device
    )


@pytest.mark.parametrize("span", [2, 16])
def test_verify_in_16_bits(device, half, small_grid, span):
    case = VerifyCase((8, 2, 128, 16), span, [2, 1], device, half, starts=STARTS[2:4])
    check_verify(case, device, half)


@pytest.mark.parametrize(("shape", "kind"), [*KINDS[:5], KINDS[6]])
def test_prefill(device, shape, kind):
    step = Step(shape, [(0, 20), (31, 2), (32, 1), (17, 33)], **kind)
    assert isinstance(check_prefill(step, device), PrefillPlan)


def test_prefill_of_trees(device):
    check_prefill(Step((6, 2, 24, 16), [(0, 9), (40, 12), (33, 5)], begun=4).grow(), device)


def test_prefill_in_16_bits(device, half):
    check_prefill(Step((8, 2, 128, 16), [(0, 40), (31, 2), (130, 1)], half), device, half)


MLA = (3, 24, 8, 12, 20, 4)  # heads, latent, rope_dim, nope_dim, v_head_dim, page size


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize(
    ("rows", "kind"),
    [
        ([(40, 1), (None, 0), (7, 1), (0, 1)], {"span": 1, "decode": True}),
        ([(40, 3), (None, 0), (7, 1), (0, 2)], {"span": 3}),
        ([(40, 3), (7, 1), (0, 2)], {"span": 3, "older": 2}),
        ([(0, 21), (None, 0), (37, 5), (3, 1)], {}),
    ],
)
def test_mla(device, monkeypatch, rows, kind, expanded):
    monkeypatch.setattr(mla_prefill, "LEAST", 1 if expanded else 10**9)
    check_mla(MlaCase(MLA, rows, device, **kind), device, num_layers=2)


@pytest.mark.parametrize("expanded", [False, True])
def test_mla_of_a_real_model(device, half, monkeypatch, expanded):
    monkeypatch.setattr(mla_prefill, "LEAST", 1 if expanded else 10**9)
    case = MlaCase((2, 512, 64, 128, 128, 64), [(0, 20), (None, 0), (65, 3)], device, dtype=half)
    check_mla(case, device, half)


def test_a_key_is_attended_as_it_is_stored(device):
    """The newest token's own key gives the same result as when a later step reads it."""
    case = DecodeCase((4, 2, 16, 16), [1], device, norm=False)
    kernels = TritonKernels()
    tokens = Tokens(*(t.to(device) for t in case.tokens))
    kv = PagedKv(in_codes(case.kv, case.heads).to(device), case.table.to(device), SCALES.to(device))
    angles = Angles(*(t.to(device) for t in case.angles))
    plan = kernels.plan(tokens, None, case.heads)
    out = kernels.attention(
        case.joined.to(device), QkNorms(None, None), None, angles, kv, plan, case.heads
    )
    stored = kv.pages[case.table[1, 0], 0, :, case.heads.head_dim :].cpu()
    values = from_codes(stored, SCALES[1]).repeat_interleave(2, 0)  # of one key: its weight is 1
    assert torch.allclose(out[1].cpu(), values.flatten(), rtol=1e-6)
