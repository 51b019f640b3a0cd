"""Tests of the kernels over pages so far from the first that offsets take more than 32 bits.

Each layer of a large cache has more than 2**31 numbers. Rows over pages that begin after as many
must get the same bits as over pages at the beginning. The memory between is never touched, so that
on a CPU it takes none.
"""

import pytest
import torch
from agreement import bits, ints
from test_decode import SHORT
from test_decode import Case as DecodeCase
from test_float8_kv import (
    SCALES,
    given_to_decode,
    given_to_mla,
    given_to_prefill,
    given_to_verify,
    in_codes,
    moved,
    pages_of,
)
from test_latent import Case as MlaCase
from test_prefill import Step
from test_verify import Case as VerifyCase

from slotzero.kernels.attention_plans import DecodePlan, StreamKPlan
from slotzero.kernels.triton.attention import decode, decode_stream_k, mla_prefill, verify
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.types import PagedKv

FAR = 2**31
KINDS = [((4, 2, 16, 8), {}), ((2, 1, 24, 16), {"stores": False, "norms_values": True})]
MLA = (2, 16, 8, 8, 8, 8)  # heads, latent, rope_dim, nope_dim, v_head_dim, page size


@pytest.fixture(params=["codes", "numbers"])
def has_codes(request):
    return request.param == "codes"


def moved_far(pages, table, away):
    """Return pages behind FAR others, and their table. Page 0 stays where it is."""
    memory = pages.new_empty(away + len(pages), *pages.shape[1:])
    memory[0], memory[away:] = pages[0], pages
    return memory, torch.where(table > 0, table + away, 0).int()


def check(case, given, device, half, has_codes):
    """Run a step over near and over far pages; return its plan."""
    pages = in_codes(pages_of(case), case.heads) if has_codes else pages_of(case).to(half)
    scales, away = moved(SCALES, device) if has_codes else None, -(-FAR // pages[0].numel())
    pages, table = moved(pages, device), moved(case.table, device)

    def near():
        return PagedKv(pages.clone(), table, scales)

    def far():
        return PagedKv(*moved_far(pages, table, away), scales)

    sides = [given.run(TritonKernels(), device, half, half, kv) for kv in (near, far)]
    (expected, want, plan), (got, stored, _) = sides
    assert torch.equal(bits(got), bits(expected))
    assert torch.equal(bits(stored[away:]), bits(want))
    assert torch.equal(bits(stored[0]), bits(want[0]))
    return plan


@pytest.mark.parametrize(("shape", "kind"), KINDS)
@pytest.mark.parametrize("plan", [DecodePlan, StreamKPlan])
def test_decode(device, half, has_codes, shape, kind, plan, monkeypatch):
    fewest = 1 if plan is StreamKPlan else 10**9
    monkeypatch.setattr(decode_stream_k, "FEWEST_ROWS", fewest)
    monkeypatch.setattr(decode_stream_k, "num_processors", lambda: 10)
    monkeypatch.setattr(decode_stream_k, "shape_for", lambda *_: SHORT)
    monkeypatch.setattr(decode, "cut_for", lambda rows: (8, 16))
    case = DecodeCase(shape, [1, 33], device, **kind)
    assert isinstance(check(case, given_to_decode(case), device, half, has_codes), plan)


@pytest.mark.parametrize(("shape", "kind"), KINDS)
def test_verify(device, half, has_codes, shape, kind, monkeypatch):
    monkeypatch.setattr(verify, "cut_for", lambda *_: (4, 16, True))
    case = VerifyCase(shape, 3, [3, 1], device, starts=[20, 3], **kind)
    check(case, given_to_verify(case), device, half, has_codes)


@pytest.mark.parametrize(("shape", "kind"), KINDS)
def test_prefill(device, half, has_codes, shape, kind):
    step = Step(shape, [(0, 20), (31, 2)], **kind)
    check(step, given_to_prefill(step), device, half, has_codes)


@pytest.mark.parametrize("expanded", [False, True])
def test_mla(device, half, has_codes, expanded, monkeypatch):
    monkeypatch.setattr(mla_prefill, "LEAST", 1 if expanded else 10**9)
    for rows, kind in (([(20, 1), (7, 1)], {"span": 1, "decode": True}), ([(0, 5), (17, 3)], {})):
        case = MlaCase(MLA, rows, device, **kind)
        check(case, given_to_mla(case), device, half, has_codes)


def test_moves(device, half, has_codes):
    """Nodes of a tree move in all layers of a stack, of which one alone has FAR numbers."""
    pages = torch.randn(2, 3, 4, 2, 16, device=device).to(half)
    pages = pages.view(torch.uint8) if has_codes else pages
    scales = torch.ones(2, 2, device=device) if has_codes else None
    away = -(-FAR // pages[0, 0].numel())
    memory = pages.new_empty(2, away + 3, *pages.shape[2:])
    memory[:, away:] = pages
    table = torch.tensor([[0, 0], [2, 1]], dtype=torch.int32, device=device)
    one, num = torch.tensor([[1], [3]], dtype=torch.int32, device=device)
    length, path = torch.tensor([0, 6], dtype=torch.int32, device=device), ints(0, 1, 1, 5)
    path[0, :3] = torch.tensor([0, 2, 4])
    for kv in (PagedKv(pages, table, scales), PagedKv(memory, table + away, scales)):
        before = kv.pages[:, -3:].clone()
        TritonKernels().move_kv(one, length, num, path.to(device), kv)
        after = kv.pages[:, -3:]
        # Positions 5 and 7 moved to 4 and 5, in page 1 of the slot's two.
        before[:, 1, 0], before[:, 1, 1] = before[:, 1, 1].clone(), before[:, 1, 3].clone()
        assert torch.equal(bits(after), bits(before))
