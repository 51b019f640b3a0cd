"""Tests of the whole kernel set: its operations against torch_ops.py, and the shapes it refuses."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import triton
from torch.utils._pytree import tree_map_only

from slotzero.errors import ContractError, UnsupportedModelError
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.launch import _Compilers, compiling_ahead
from slotzero.kernels.triton.linear.elementwise import apply_norm, norm
from slotzero.kernels.types import (
    Angles,
    Branches,
    Heads,
    Normed,
    PagedKv,
    PairNorms,
    QkNorms,
    ResidualNorms,
    Rows,
    Tokens,
)
from slotzero.kernels.weights import DenseWeight

REFERENCE = ReferenceKernels()


@pytest.mark.parametrize("rows", [1, 5, 200])
def test_locate(device, rows):
    slots = (torch.arange(rows).int() * 7) % 6  # slot 0 among them
    length = torch.tensor([0, 3, 0, 131071, 17, 8]).int()
    expected = [torch.full((rows,), -1).int() for _ in range(3)]
    got = [t.to(device, copy=True) for t in expected]
    REFERENCE.decode_positions(slots, length, *expected)
    TritonKernels().decode_positions(slots.to(device), length.to(device), *got)
    for one, other in zip(got, expected, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("two_speeds", [False, True])
def test_turn(device, two_speeds):
    tokens = Tokens(*(torch.tensor(v).int() for v in ([0, 2, 1, 2], [0, 5, 131071, 6])))
    frequency = torch.rand(4, 6) if two_speeds else 1e6 ** -(torch.arange(6) / 6)
    frequency[..., 4] = 0  # stands still: its cosine is 1
    expected = REFERENCE.rope_angles(tokens, frequency, 1.25)
    moved = Tokens(*(t.to(device) for t in tokens))
    got = TritonKernels().rope_angles(moved, frequency.to(device), 1.25)
    for one, other in zip(got, expected, strict=True):
        # angles reach 131071 radians, where float32 itself is off by 0.004
        assert torch.allclose(one.cpu(), other, atol=1e-5) and one.shape == other.shape


@pytest.mark.parametrize("scale", [1.0, 4.8984375])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("is_half", [True, False])
def test_open(device, half, is_half, with_norm, scale):
    dtype = half if is_half else torch.float32
    tokens = Tokens(*(torch.tensor(v).int() for v in ([0, 2, 1, 2], [0, 5, 131071, 6])))
    table = torch.zeros(3, 131072, dtype=torch.int32)
    table[1, 131071], table[2, 5], table[2, 6] = 7, 3, 9
    embedding = torch.randn(10, 24).to(dtype)
    norm = torch.randn(24).to(dtype) if with_norm else None
    given = (table, DenseWeight(embedding, None, 10), scale, norm, 1e-6)
    residual, normed = REFERENCE.embed(tokens, *given)
    moved = tree_map_only(torch.Tensor, lambda t: t.to(device), given)
    got, got_normed = TritonKernels().embed(Tokens(*(t.to(device) for t in tokens)), *moved)
    assert torch.equal(got.cpu(), residual)
    assert (got_normed.x is got) == (not with_norm)
    near = 2 * torch.finfo(dtype).eps
    got_x = apply_norm(got_normed).cpu()
    assert torch.allclose(got_x, normed.x, atol=near, rtol=near)


@pytest.mark.parametrize("size", [24, 33, 1100])
@pytest.mark.parametrize("norms", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("is_half", [True, False])
def test_embed_pair(device, half, is_half, norms, size):
    """Hidden states are slices of wider rows, and must not be written to."""
    dtype = half if is_half else torch.float32
    slots, positions = [0, 2, 1, 0, 2], [0, 5, 131071, 0, 6]
    tokens = Tokens(*(torch.tensor(v, device=device).int() for v in (slots, positions)))
    table = torch.zeros(3, 131072, dtype=torch.int32, device=device)
    table[1, 131071], table[2, 5], table[2, 6] = 7, 3, 9
    embedding = torch.randn(10, size, device=device).to(dtype)
    wide = (torch.randn(5, size + 16, device=device) * 3).to(dtype)
    kept = wide.clone()
    embed_norm, hidden_norm = (
        torch.randn(size, device=device).to(dtype) if given else None for given in norms
    )
    pair_norms = PairNorms(embed_norm, hidden_norm, 1e-6)
    given = (tokens, table, DenseWeight(embedding, None, 10), wide[:, :size], pair_norms)
    want, got = REFERENCE.embed_pair(*given), TritonKernels().embed_pair(*given)
    near = 2 * torch.finfo(dtype).eps
    assert got.shape == (5, 2 * size) and got.dtype is dtype
    assert torch.allclose(got, want, atol=near, rtol=near)
    for has_norm, part in zip(norms, (slice(0, size), slice(size, 2 * size)), strict=True):
        assert has_norm or torch.equal(got[:, part], want[:, part])
    assert torch.equal(wide, kept)


@pytest.mark.parametrize("size", [24, 33, 1100])
@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("is_centred", [True, False])
@pytest.mark.parametrize("is_half", [True, False])
def test_norm(device, half, is_half, is_centred, late, size):
    dtype = half if is_half else torch.float32
    wide, weight = (torch.randn(5, size + 3) * 3).to(dtype), torch.randn(size).to(dtype)
    x, moved = wide[:, 3:], wide.to(device, copy=True)[:, 3:]
    got = norm(moved, weight.to(device), 1e-6, late, is_centred)
    assert (got.squares is not None) == late
    want = REFERENCE.norm(x, weight, 1e-6, is_centred).x
    near = 3 * torch.finfo(dtype).eps  # a late norm is rounded once more
    assert torch.allclose(apply_norm(got).cpu(), want, atol=near, rtol=near)
    assert torch.equal(moved.cpu(), x)


@pytest.mark.parametrize("is_half", [True, False])
def test_rows_are_normed_if_there_is_a_norm(device, half, is_half):
    dtype, kernels = half if is_half else torch.float32, TritonKernels()
    x, weight = torch.randn(7, 40).to(dtype), torch.randn(40).to(dtype)
    moved = x.to(device)
    plain = kernels.norm(moved, None, 1e-6)
    assert kernels.apply_norm(plain) is moved
    near = 3 * torch.finfo(dtype).eps
    got = kernels.apply_norm(kernels.norm(moved, weight.to(device), 1e-6)).cpu()
    assert torch.allclose(got, REFERENCE.norm(x, weight, 1e-6).x, atol=near, rtol=near)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("rows", [3, 70])
def test_logits_of_slot_0_are_zeros(device, rows, softcap):
    x, weight = torch.randn(rows, 32, device=device), torch.randn(50, 32, device=device)
    slots = torch.arange(rows, device=device).int() % 3
    x[slots == 0] = torch.nan
    out = torch.full((rows, 50), torch.nan, device=device)
    TritonKernels().logits(Normed(x), DenseWeight(weight, None, 50), slots, softcap, out)
    expected = x[slots > 0] @ weight.t()
    if softcap is not None:
        expected = softcap * (expected / softcap).tanh()
    assert out[slots == 0].abs().max() == 0
    assert torch.allclose(out[slots > 0], expected, atol=1e-4)


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("with_after", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("is_centred", [True, False])
def test_products_are_added_and_normed(device, rows, with_after, with_norm, is_centred):
    x, weight = torch.randn(rows, 48, device=device), torch.randn(24, 48, device=device)
    bias, after, norm = torch.randn(3, 24, device=device)
    after, norm = after if with_after else None, norm if with_norm else None
    before = torch.randn(rows, 24, device=device)
    norms = ResidualNorms(after, norm, 1e-6, is_centred)
    for kernels_add, reference_add, given in (
        (
            TritonKernels().linear_add_norm,
            REFERENCE.linear_add_norm,
            (Normed(x), DenseWeight(weight, bias, 24)),
        ),
        (TritonKernels().add_norm, REFERENCE.add_norm, (x[:, :24].contiguous(),)),
    ):
        want, want_normed = reference_add(*given, before, norms)
        got, normed = kernels_add(*given, before.clone(), norms)
        assert torch.allclose(got, want, atol=1e-4)
        assert torch.allclose(apply_norm(normed), want_normed.x, atol=1e-4)


@pytest.mark.parametrize("is_decode", [True, False])
def test_norms_over_all_heads(device, is_decode):
    """The qkv rows are slices of wider rows, and must not be written to."""
    heads = Heads(6, 2, 16, 24, 1e-6, 0.25, norms_whole=True)
    q_size, k_size, _ = heads.sizes
    slots, positions = ([1, 0, 2], [2, 0, 0]) if is_decode else ([1, 1, 1, 0], [0, 1, 2, 0])
    tokens = Tokens(*(torch.tensor(v, device=device).int() for v in (slots, positions)))
    wide = torch.randn(len(slots), sum(heads.sizes) + 8, device=device)
    joined, kept = wide[:, :-8], wide.clone()
    norms = [torch.rand(size, device=device) + 0.5 for size in (q_size, k_size)]
    angles = Angles(*torch.rand(2, len(slots), 1, 8, device=device))
    table = torch.tensor([[0, 0], [2, 1], [3, 0]], device=device).int()
    pages = torch.randn(4, 2, 2, 40, device=device)
    rows = None
    if not is_decode:
        rows = Rows(*(torch.tensor(v, device=device).int() for v in ([1], [0], [3], [3])))
    outs = []
    for kernels in (TritonKernels(), REFERENCE):
        stored = pages.clone()
        plan = kernels.plan(tokens, rows, heads)
        out = kernels.attention(
            joined, QkNorms(*norms), None, angles, PagedKv(stored, table), plan, heads
        )
        outs.append((out, stored))
    for got, want in zip(*outs, strict=True):
        assert torch.allclose(got, want, atol=1e-5)
    assert torch.equal(wide, kept)


@pytest.mark.parametrize("stores", [True, False])
@pytest.mark.parametrize("with_norm", [True, False])
@pytest.mark.parametrize("is_half", [True, False])
def test_heads_are_rotated_ahead(device, half, is_half, with_norm, stores):
    """The qkv rows are slices of wider rows."""
    heads = Heads(3, 2, 12, 10, 1e-6, 0.25, stores=stores)
    dtype = half if is_half else torch.float32
    joined = (torch.randn(5, sum(heads.sizes) + 8) * 3).to(dtype)[:, :-8]
    norms = torch.randn(2, 12).to(dtype)
    q_angles, k_angles = (Angles(*torch.rand(2, 5, 1, 6)) for _ in range(2))
    qk_norms = QkNorms(*norms) if with_norm else QkNorms(None, None)
    given = (joined, qk_norms, q_angles, k_angles)
    moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), given)
    got = TritonKernels().rotate_heads(*moved, heads).cpu()
    near = 2 * torch.finfo(dtype).eps
    assert torch.allclose(got, REFERENCE.rotate_heads(*given, heads), atol=near, rtol=near)


def test_a_tree_is_stored_and_each_of_its_tokens_sees_its_branch(device):
    """After 3 stored tokens of slot 1, nodes 0 and 1 are siblings, 2 and 4 are children of 0, and
    place 3 is empty. Slot 2 has a tree of one token, and then padding."""
    heads = Heads(6, 2, 16, 24, 1e-6, 0.25)

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tokens = Tokens(ints(1, 1, 1, 0, 1, 2, 0, 0, 0, 0), ints(3, 4, 5, 0, 7, 0, 0, 0, 0, 0))
    rows = Rows(ints(1, 2), ints(3, 0), ints(5, 5), ints(5, 10))
    seen = torch.tensor([0b1, 0b10, 0b101, -1, 0b10001, 0b1, -1, -1, -1, -1], device=device)
    stands = ints(3, 3, 4, -9, 4, 0, 99, 99, 99, 99)
    branches = Branches(ints(3, 3, 3, -9, 3, 0, 99, 99, 99, 99), seen, stands)
    joined = torch.randn(10, sum(heads.sizes), device=device)
    joined[tokens.slots == 0] = torch.nan
    angles = Angles(*torch.rand(2, 10, 1, 8, device=device))
    table = torch.tensor([[0] * 4, [2, 1, 5, 3], [4, 2**30, 2**30, 2**30]], device=device).int()
    pages = torch.full((6, 2, 2, 40), torch.nan, device=device)
    pages[2], pages[1, 0] = torch.randn(2, 2, 40), torch.randn(2, 40)
    outs = []
    for kernels in (TritonKernels(), REFERENCE):
        stored = pages.clone()
        plan = kernels.plan(tokens, rows, heads, branches)
        out = kernels.attention(
            joined, QkNorms(None, None), None, angles, PagedKv(stored, table), plan, heads
        )
        outs.append((out, stored))
    for got, want in zip(*outs, strict=True):
        assert torch.allclose(got, want, atol=1e-5, equal_nan=True)
    assert not outs[0][0].isnan().any() and not outs[0][0][tokens.slots == 0].any()


def test_branches_are_refused_in_a_decode_step(device):
    one, kernels = torch.ones(1, dtype=torch.int32, device=device), TritonKernels()
    branches = Branches(one, one.long(), one)
    with pytest.raises(ContractError, match="give its rows"):
        kernels.plan(Tokens(one, one), None, Heads(2, 1, 16, 16, 1e-6, 1.0), branches)


def test_a_head_that_fits_no_kernel_is_refused():
    kernels = TritonKernels()
    kernels.refuse(Heads(8, 1, 256, 256, 1e-6, 1.0))
    kernels.refuse(Heads(128, 128, 192, 128, 1e-6, 1.0))
    kernels.refuse(Heads(16, 1, 512, 512, 1e-6, 1.0, norms_values=True, stores=False))
    for heads, name in (
        (Heads(8, 1, 640, 256, 1e-6, 1.0), "head_dim: 640"),
        (Heads(8, 1, 256, 520, 1e-6, 1.0), "value_dim: 520"),
        (Heads(256, 1, 64, 64, 1e-6, 1.0), "query heads for each KV head: 256"),
        (Heads(32, 1, 512, 512, 1e-6, 1.0), "query heads for each KV head: 32"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"{name}.*--backend cpu"):
            kernels.refuse(heads)


def test_outputs_are_zeros_while_compiling_ahead(device):
    """Other calls use them as indices: an index beyond a table would end the process."""
    like = torch.zeros(2, 300, dtype=torch.int32, device=device)
    makers = (
        lambda: like.new_empty(300),
        lambda: torch.empty_like(like),
        lambda: torch.empty(600, dtype=torch.int32, device=device),
        lambda: torch.empty_strided((2, 300), (1, 2), dtype=torch.int32, device=device),
        lambda: like.new_empty_strided((2, 300), (1, 2)),
    )
    with compiling_ahead():
        for make in makers:
            used = [make().fill_(1 << 30) for _ in range(8)]
            del used  # its memory is allocated again
            assert not any(make().any() for _ in range(8))


def test_compiling_ahead_imports_no_compiler_of_torch():
    """The import would add seconds to every start."""
    code = """
import sys, torch
from slotzero.kernels.triton.launch import compiling_ahead
from slotzero.kernels.weights import DenseWeight
with compiling_ahead():
    torch.empty(3)
sys.exit("torch._dynamo" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_launcher_of_a_kernel_is_compiled_with_it(monkeypatch):
    made = []
    driver = SimpleNamespace(launcher_cls=lambda *given: made.append(given))
    kernel = SimpleNamespace(src="source", metadata="its sizes")
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    with _Compilers() as pool:
        assert pool.submit(lambda: kernel).result() is kernel
    assert made == [("source", "its sizes")]
