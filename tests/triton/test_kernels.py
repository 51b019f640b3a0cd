"""The set as a whole: its calls against composed.py, and what it refuses."""

import pytest
import torch

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.contract import Heads, Normed, Tokens
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels

REFERENCE = ReferenceKernels()


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_locate(device, rows):
    slots = (torch.arange(rows).int() * 7) % 6  # slot 0 among them
    length = torch.tensor([0, 3, 0, 131071, 17, 8]).int()
    expected = [torch.full((rows,), -1).int() for _ in range(3)]
    got = [t.to(device, copy=True) for t in expected]
    REFERENCE.locate(slots, length, *expected)
    TritonKernels().locate(slots.to(device), length.to(device), *got)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("two_speeds", [False, True])
def test_open(device, two_speeds):
    tokens = Tokens(*(torch.tensor(v).int() for v in ([0, 2, 1, 2], [0, 5, 131071, 6])))
    table = torch.zeros(3, 131072, dtype=torch.int32)
    table[1, 131071], table[2, 5], table[2, 6] = 7, 3, 9
    embedding, norm = torch.randn(10, 24), torch.randn(24)
    frequency = torch.rand(4, 8) if two_speeds else 1e6 ** -(torch.arange(8) / 8)
    given = (table, embedding, norm, 1e-6, frequency, 1.25)
    expected = REFERENCE.open(tokens, *given)
    moved = (t.to(device) if isinstance(t, torch.Tensor) else t for t in given)
    got = TritonKernels().open(Tokens(*(t.to(device) for t in tokens)), *moved)
    assert torch.equal(got.residual.cpu(), expected.residual)
    assert torch.allclose(got.normed.x.cpu(), expected.normed.x, atol=1e-6)
    # angles reach 131071 radians, where float32 itself is off by 0.004
    assert torch.allclose(got.cos.cpu(), expected.cos, atol=1e-5)
    assert torch.allclose(got.sin.cpu(), expected.sin, atol=1e-5)


@pytest.mark.parametrize("rows", [3, 70])
def test_logits_of_slot_0_are_zeros(device, rows):
    x, weight = torch.randn(rows, 32, device=device), torch.randn(50, 32, device=device)
    slots = torch.arange(rows, device=device).int() % 3
    x[slots == 0] = torch.nan
    out = torch.full((rows, 50), torch.nan, device=device)
    TritonKernels().logits(Normed(x, None), 1e-6, weight, slots, out)
    assert out[slots == 0].abs().max() == 0
    assert torch.allclose(out[slots > 0], x[slots > 0] @ weight.t(), atol=1e-4)


def test_a_head_that_no_kernel_holds_is_refused():
    kernels = TritonKernels()
    kernels.refuse(Heads(8, 1, 256, 1e-6, 1.0))
    for heads in (Heads(8, 1, 320, 1e-6, 1.0), Heads(256, 1, 64, 1e-6, 1.0)):
        with pytest.raises(UnsupportedModelError, match="--backend cpu"):
            kernels.refuse(heads)
