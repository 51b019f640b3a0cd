"""Tests of expert kernels against torch_ops.py: every routing rule, and rows without experts."""

import pytest
import torch
from torch.utils._pytree import tree_map_only

from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.moe import experts
from slotzero.kernels.types import Experts, ExpertWeights, Normed
from slotzero.kernels.weights import DenseWeight

REFERENCE = ReferenceKernels()
HIDDEN, INNER = 40, 24  # no multiple of a tile
SIGMOID = {"scores": "sigmoid", "is_corrected": True, "is_normed": True, "factor": 2.5}
KINDS = [
    Experts(8, 2, INNER, "silu", scores="softmax_of_chosen"),
    Experts(5, 3, INNER, "clamped_silu", scores="softmax_of_chosen"),
    Experts(8, 2, INNER, "gelu_tanh", scores="sigmoid"),
    Experts(8, 3, INNER, "silu", **SIGMOID, num_groups=4, top_groups=2),
    Experts(8, 3, INNER, "silu", scores="softmax", is_corrected=True, is_normed=True),
    Experts(6, 1, INNER, "silu", **SIGMOID),
    Experts(3, 3, INNER, "silu", scores="softmax_of_chosen"),
    Experts(6, 2, INNER, "silu", scores="softmax", factor=2.0, num_groups=3, top_groups=2,
            scores_per_group=1, num_shared=2),
    Experts(8, 2, INNER, "silu", **SIGMOID, num_groups=2, num_shared=1),
]  # fmt: skip


def made(shape: Experts, dtype, device, bias=True) -> ExpertWeights:
    """Return expert weights; if tokens can choose, none chooses expert 1, whose weights are NaN."""

    def random(*size: int) -> torch.Tensor:
        return (torch.randn(size, device=device) * size[-1] ** -0.5).to(dtype)

    num, every, inner = shape.num_experts, shape.num_all, shape.inner_size
    weights = ExpertWeights(
        DenseWeight(random(num, HIDDEN), random(num), num),
        torch.randn(num, device=device) if shape.is_corrected else None,
        DenseWeight(
            random(every, 2 * inner, HIDDEN),
            random(every, 2 * inner) if bias else None,
            2 * inner,
        ),
        DenseWeight(random(every, HIDDEN, inner), random(every, HIDDEN) if bias else None, HIDDEN),
    )
    if shape.top_k < num:
        weights.router.bias[1] = -30
        weights.gate_up.data[1], weights.down.data[1] = torch.nan, torch.nan
        if weights.correction is not None:
            weights.correction[1] = -30
    return weights


def through(kernels, x: Normed, slots, weights, shape, by=None):
    """Return the results, and where the rows of each expert begin."""
    starts = torch.full((shape.num_all + 1,), -1, dtype=torch.int32, device=slots.device)
    routed = kernels.route(x, slots, weights, shape, by)
    return kernels.experts(routed, weights, shape, starts), starts


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    """Fill the outputs of products with NaN beforehand."""
    new_empty = torch.Tensor.new_empty

    def poison(x: torch.Tensor, *shape: int, **kind: object) -> torch.Tensor:
        made = new_empty(x, *shape, **kind)
        return made.fill_(torch.nan) if made.is_floating_point() else made

    monkeypatch.setattr(torch.Tensor, "new_empty", poison)


@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("shape", KINDS, ids=range(len(KINDS)))
def test_equals_the_reference(device, shape, rows):
    x = torch.randn(rows, HIDDEN, device=device)
    slots = torch.arange(1, rows + 1, device=device).int() % 4
    x[slots == 0] = torch.nan
    weights = made(shape, torch.float32, device, bias=rows > 1)
    got, starts = through(TritonKernels(), Normed(x), slots, weights, shape)
    x = x.nan_to_num()
    expected, wanted = through(REFERENCE, Normed(x), slots, weights, shape)
    assert torch.equal(starts, wanted) and starts[-1] == (slots > 0).sum() * shape.num_chosen
    assert torch.allclose(got, expected, atol=1e-5)
    assert (got[slots == 0] == 0).all() and (got[slots > 0] != 0).any(-1).all()


@pytest.mark.parametrize("rows", [3, 100])  # blocks of few rows, and of many
def test_16_bits(device, half, rows):
    shape = Experts(4, 2, INNER, "silu", scores="softmax_of_chosen")
    weights = made(shape, half, device)
    x, slots = torch.randn(rows, HIDDEN, device=device).to(half), torch.ones(rows, device=device)
    got, _ = through(TritonKernels(), Normed(x), slots.int(), weights, shape)
    wide = tree_map_only(torch.Tensor, torch.Tensor.float, weights)
    expected, _ = through(REFERENCE, Normed(x.float()), slots, wide, shape)
    far = ((got.float() - expected).norm(dim=-1) / expected.norm(dim=-1) > 2e-2).sum()
    assert far <= rows // 20  # two scores that are equal in 16 bits


def test_a_late_norm_is_applied(device):
    shape = KINDS[0]
    weights = made(shape, torch.float32, device)
    x, slots = torch.randn(7, HIDDEN, device=device), torch.ones(7, device=device).int()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-3)
    late = Normed(x, x.square().sum(-1)[None], 1e-3)
    got, _ = through(TritonKernels(), late, slots, weights, shape)
    expected, _ = through(REFERENCE, Normed(x * scale), slots, weights, shape)
    assert torch.allclose(got, expected, atol=1e-5)


def test_routing_by_another_input(device):
    """The router reads other rows than the experts, and each row has its own factor."""
    shape = Experts(8, 2, INNER, "gelu_tanh", scores="softmax", is_normed=True)
    weights = made(shape, torch.float32, device, bias=False)
    weights = weights._replace(factors=torch.rand(8, device=device) + 0.5)
    x, by = (Normed(torch.randn(5, HIDDEN, device=device)) for _ in range(2))
    slots = torch.tensor([1, 2, 0, 1, 3], device=device).int()
    got, _ = through(TritonKernels(), x, slots, weights, shape, by)
    expected, _ = through(REFERENCE, x, slots, weights, shape, by)
    assert torch.allclose(got, expected, atol=1e-5)
    assert not torch.allclose(got, through(TritonKernels(), x, slots, weights, shape)[0])


def test_a_broken_row_chooses_experts_that_exist(device):
    for shape in KINDS:
        weights = made(shape, torch.float32, device)
        x = torch.full((3, HIDDEN), torch.nan, device=device)
        slots = torch.tensor([1, 0, 2], device=device).int()
        which = TritonKernels().route(Normed(x), slots, weights, shape).experts
        assert (which[1] == shape.num_all).all()
        assert ((which[[0, 2]] >= 0) & (which[[0, 2]] < shape.num_all)).all()


def test_one_broken_score_is_detected(device):
    for shape in KINDS:
        weights = made(shape, torch.float32, device)
        weights.router.bias[0] = torch.nan
        x, slots = torch.randn(2, HIDDEN, device=device), torch.ones(2, device=device).int()
        assert TritonKernels().route(Normed(x), slots, weights, shape).weights.isnan().all()


def test_no_expert_is_chosen_twice(device):
    """This holds even if all remaining experts are excluded."""
    shape = Experts(8, 6, INNER, "silu", **SIGMOID)
    weights = made(shape, torch.float32, device)
    weights.correction[4:] = float("-inf")
    x, slots = torch.randn(3, HIDDEN, device=device), torch.ones(3, device=device).int()
    for row in TritonKernels().route(Normed(x), slots, weights, shape).experts.tolist():
        assert len(set(row)) == 6 and {0, 1, 2, 3} <= set(row)


def test_the_first_of_equal_experts_is_chosen(device):
    shape = Experts(6, 3, INNER, "silu", scores="softmax")
    weights = made(shape, torch.float32, device)
    weights.router.data.zero_(), weights.router.bias.zero_()
    x, slots = torch.randn(2, HIDDEN, device=device), torch.ones(2, device=device).int()
    chosen = TritonKernels().route(Normed(x), slots, weights, shape)
    assert chosen.experts.tolist() == [[0, 1, 2]] * 2
    assert torch.allclose(chosen.weights, torch.full_like(chosen.weights, 1 / 6))


@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (3, 2), (40, 4), (128, 8)])
@pytest.mark.parametrize("tokens", [1, 7, 90])
def test_blocks_cover_every_choice_once(device, monkeypatch, tokens, num_experts, top_k):
    monkeypatch.setattr(experts, "SORTED_BLOCK", 256)
    chosen = torch.rand(tokens, num_experts).topk(top_k).indices
    chosen[::3] = num_experts  # no expert
    chosen[1::2, 0] = num_experts - 1  # an expert that many tokens choose
    starts = torch.empty(num_experts + 1, dtype=torch.int32, device=device)
    order, blocks, tile, most, _ = experts.sort(chosen.to(device), starts, torch.float32)
    which = chosen.flatten()[order.cpu()].tolist()
    seen = []
    for expert, first, size in blocks.tolist():
        if expert >= 0:
            assert 0 < size <= most <= tile.rows
            assert which[first : first + size] == [expert] * size
            seen += range(first, first + size)
    assert seen == list(range(sum(e < num_experts for e in which)))
