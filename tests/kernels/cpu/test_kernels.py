"""Tests of the CPU kernels against a slow reference, with NaN in all memory they must not read.

The Triton kernels are tested in tests/kernels/triton.
"""

import dataclasses
from random import Random

import pytest
import torch
from attention_cases import EPS, Attending, attendings, branchings, grown, heads_of, ints
from hypothesis import given, settings
from hypothesis import strategies as st
from shapes import SHAPES
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from slotzero.errors import ContractError
from slotzero.kernels.attention_plans import TorchPlan
from slotzero.kernels.cpu.kernels import CpuKernels
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.torch_ops import TorchKernels
from slotzero.kernels.types import (
    Angles,
    Branches,
    Experts,
    ExpertWeights,
    Normed,
    PagedKv,
    QkNorms,
    ResidualNorms,
    Rows,
    Tokens,
)
from slotzero.kernels.weights import DenseWeight, LinearWeight
from slotzero.tree_shape import MAX_PLACES

REFERENCE = ReferenceKernels()


@pytest.fixture
def kernels() -> CpuKernels:
    return CpuKernels()


def attend_both(case: Attending) -> None:
    kv, table = case.pages()
    slots, positions = case.tokens()
    plan = TorchPlan(Tokens(slots, positions), None)
    args = (case.queries(len(slots)), case.sinks, PagedKv(kv, table), plan, case.heads)
    out = CpuKernels().attend(*args)
    torch.testing.assert_close(out, REFERENCE.attend(*args), atol=5e-6, rtol=1e-5)
    assert out[slots == 0].abs().max() == 0


@settings(max_examples=100, deadline=None)
@given(case=attendings())
def test_attention_of_any_shape(case):
    attend_both(case)


@pytest.mark.parametrize("window", [None, 1, 7, 17, 100])  # 7 and 17 are whole contexts too
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_a_decode_step(shape, window):
    *heads, page = shape
    spans = [(n - 1, n) for n in (1, 7, 33, 16, 17)]
    attend_both(Attending(heads_of(*heads, window=window), page, spans, None))


@pytest.mark.parametrize("window", [None, 1, 12, 100])
@pytest.mark.parametrize("is_chunked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_in_prefill_over_a_prefix(shape, is_chunked, window):
    *heads, page = shape
    sinks, heads = torch.randn(heads[0]), heads_of(*heads, window=window, is_chunked=is_chunked)
    attend_both(Attending(heads, page, [(11, 40), (0, 23)], sinks))


@settings(max_examples=60, deadline=None)
@given(case=attendings(), cut=st.integers(1, 11))
def test_attention_does_not_depend_on_how_a_prompt_is_split(case, cut):
    kernels = CpuKernels()
    kv, table = case.pages()
    slots, positions = case.tokens()
    q = case.queries(len(slots))

    def attend(rows: slice | Tensor) -> Tensor:
        batch = q[rows].contiguous(), slots[rows].contiguous(), positions[rows].contiguous()
        return kernels.attend(
            batch[0],
            case.sinks,
            PagedKv(kv, table),
            TorchPlan(Tokens(*batch[1:]), None),
            case.heads,
        )

    together = attend(slice(None))
    for size in (1, cut):  # token by token, and in parts that ignore the borders of slots
        parts = [attend(slice(i, i + size)) for i in range(0, len(q), size)]
        assert torch.equal(torch.cat(parts), together)
    shuffled = torch.randperm(len(q))
    assert torch.equal(attend(shuffled), together[shuffled])


@settings(max_examples=60, deadline=None)
@given(case=branchings(), size=st.integers(1, 11))
def test_a_token_of_a_tree_sees_its_branch(case, size):
    kv, table = case.pages()
    (slots, places), branches = case.tokens()
    q = case.attending.queries(len(slots))
    q[slots == 0] = torch.nan

    def attend(kernels: TorchKernels, rows: slice) -> Tensor:
        parts = [x[rows].contiguous() for x in (q, slots, places, *branches)]
        return kernels.attend(
            parts[0],
            case.attending.sinks,
            PagedKv(kv, table),
            TorchPlan(Tokens(*parts[1:3]), Branches(*parts[3:])),
            case.attending.heads,
        )

    expected = case.by_the_book(q, kv, table)
    for kernels in (CpuKernels(), REFERENCE):
        out = attend(kernels, slice(None))
        torch.testing.assert_close(out.double(), expected, atol=5e-6, rtol=1e-5)
        assert not out[slots == 0].any()
    cut = [attend(CpuKernels(), slice(i, i + size)) for i in range(0, len(q), size)]
    assert torch.equal(torch.cat(cut), attend(CpuKernels(), slice(None)))


@settings(max_examples=40, deadline=None)
@given(case=attendings(), back=st.integers(0, MAX_PLACES - 1))
def test_a_tree_of_one_branch_is_a_prompt_to_the_bit(case, back):
    """The tree may be declared to begin up to `back` places before each token."""
    heads = dataclasses.replace(case.heads, window=None)
    kv, table = case._replace(heads=heads).pages()
    slots, positions = case.tokens()
    tokens, given = Tokens(slots, positions), (case.queries(len(slots)), case.sinks)
    bases = (positions - back).clamp_min(0)
    seen = (2 << (positions - bases).long()) - 1
    for kernels in (CpuKernels(), REFERENCE):
        branches = Branches(bases, seen, positions)
        tree, prompt = (
            kernels.attend(*given, PagedKv(kv, table), TorchPlan(tokens, how), heads)
            for how in (branches, None)
        )
        assert torch.equal(tree, prompt)


@pytest.mark.parametrize("kind", [CpuKernels, ReferenceKernels])
def test_a_branch_gives_what_it_gives_alone(kind):
    """Tokens of a tree are stored side by side and rotated by their depth."""
    kernels = kind()
    heads, tree = heads_of(6, 2, 16, value_dim=10), grown(5, 12, Random(1), gaps=0)
    frequency, table = torch.rand(8), ints([0, 0, 0, 0, 0, 3, 1, 5, 2, 4]).view(2, 5)
    joined = torch.randn(17, sum(heads.sizes))  # stored tokens, then those of the tree

    def attention(which: list[int], depths: list[int], branches: Branches | None) -> Tensor:
        """Run attention over a prompt, then over these tokens, at the places after it."""
        kv = torch.full((6, 4, 2, 26), torch.nan)
        out = joined[:0]
        for begin, end, how in ((0, 5, None), (5, 5 + len(which), branches)):
            tokens = Tokens(ints([1] * (end - begin)), torch.arange(begin, end).int())
            rows = Rows(ints([1]), ints([begin]), ints([end - begin]), ints([end - begin]))
            angle = torch.tensor([*range(5), *depths])[begin:end, None, None] * frequency
            out = kernels.attention(
                joined[[*range(5), *which]][begin:end], QkNorms(None, None), None,
                Angles(angle.cos(), angle.sin()), PagedKv(kv, table),
                kernels.plan(tokens, rows, heads, how), heads,
            )  # fmt: skip
        return out

    branches = [tree.branch(i) for i in range(12)]
    seen = torch.tensor([tree.bits(i) for i in range(12)])
    depths = [4 + len(branch) for branch in branches]
    together = attention([*range(5, 17)], depths, Branches(ints([5] * 12), seen, ints(depths)))
    for i, branch in enumerate(branches):
        alone = attention([5 + j for j in branch], [*range(5, 5 + len(branch))], None)
        torch.testing.assert_close(together[i], alone[-1], atol=1e-5, rtol=1e-5)


def test_branches_are_refused_where_they_have_no_effect(kernels):
    tokens = Tokens(ints([1, 1]), ints([3, 4]))
    rows = Rows(ints([1]), ints([3]), ints([2]), ints([2]))
    good = Branches(ints([3, 3]), torch.tensor([1, 3]), ints([3, 4]))
    assert kernels.plan(tokens, rows, heads_of(4, 2, 8), good) == TorchPlan(tokens, good)
    with pytest.raises(ContractError, match="give its rows"):
        kernels.plan(tokens, None, heads_of(4, 2, 8), good)
    for bad, name in (
        (good._replace(seen=ints([1, 3])), "seen must be torch.int64"),
        (good._replace(bases=ints([3])), "bases must be torch.int32"),
        (good._replace(positions=torch.tensor([3, 4])), "positions must be torch.int32"),
    ):
        with pytest.raises(ContractError, match=name):
            kernels.plan(tokens, rows, heads_of(4, 2, 8), bad)
        with pytest.raises(RuntimeError, match="attend: of a tree's tensors each token has one"):
            kernels.attend(
                torch.randn(2, 4, 8),
                None,
                PagedKv(torch.randn(2, 8, 2, 16), ints([0, 1]).view(2, 1)),
                TorchPlan(tokens, bad),
                heads_of(4, 2, 8),
            )


@settings(max_examples=40, deadline=None)
@given(case=attendings())
def test_store_writes_each_token_once_and_drops_slot_0(case):
    kv, table = case.pages()
    slots, positions = case.tokens()
    k = torch.randn(len(slots), case.heads.num_kv_heads, case.heads.head_dim)
    v = torch.randn(len(slots), case.heads.num_kv_heads, case.heads.value_dim)
    before, expected = kv.clone(), kv.clone()
    REFERENCE.store_kv(k, v, PagedKv(expected, table), Tokens(slots, positions))
    CpuKernels().store_kv(k, v, PagedKv(kv, table), Tokens(slots, positions))
    assert torch.equal(kv.nan_to_num(nan=-1e9), expected.nan_to_num(nan=-1e9))
    assert kv[0].isnan().all(), "page 0 was written"
    written = (kv.nan_to_num(nan=-1e9) != before.nan_to_num(nan=-1e9)).any(-1).any(-1)
    assert written.sum() == (slots > 0).sum()


def test_attention_refuses_pages_of_another_shape(kernels):
    heads, table, one = heads_of(4, 2, 8), torch.zeros(2, 1, dtype=torch.int32), ints([1])
    q, k = torch.randn(1, 4, 8), torch.randn(1, 2, 8)
    tokens = Tokens(one, one)
    plan = TorchPlan(tokens, None)
    with pytest.raises(RuntimeError, match="attend: kv_pages do not fit"):
        kernels.attend(q, None, PagedKv(torch.randn(2, 4, 2, 15), table), plan, heads)
    with pytest.raises(RuntimeError, match=r"attend: .* must be contiguous"):
        kernels.attend(q, None, PagedKv(torch.randn(2, 2, 4, 16).mT, table), plan, heads)
    with pytest.raises(RuntimeError, match="attend: sinks"):
        kernels.attend(q, torch.randn(3), PagedKv(torch.randn(2, 4, 2, 16), table), plan, heads)
    with pytest.raises(RuntimeError, match="store_kv: kv_pages do not fit"):
        kernels.store_kv(k, k, PagedKv(torch.randn(2, 4, 4, 16), table), tokens)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(1, 70), out=st.integers(1, 70), inner=st.integers(1, 90), bias=st.booleans()
)
def test_linear_of_any_shape(rows, out, inner, bias):
    kernels = CpuKernels()
    x, weight = torch.randn(rows, inner), torch.randn(out, inner)
    b = torch.randn(out) if bias else None
    packed = DenseWeight(kernels.pack(weight), b, out)
    assert packed.data.shape == kernels.packed_shape(out, inner)
    got = kernels.product(x, packed)
    exact = F.linear(x.double(), weight.double(), b.double() if bias else None)
    assert torch.allclose(got.double(), exact, atol=1e-4)
    for i in range(rows):  # a row has the same bits alone and beside others
        assert torch.equal(kernels.product(x[i : i + 1].contiguous(), packed)[0], got[i])


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 9) | st.just(40), min_size=2, max_size=7),
    out=st.integers(1, 70),
    inner=st.integers(1, 90),
    bias=st.booleans(),
)
def test_grouped_rows_equal_linear_with_their_expert_to_the_bit(counts, out, inner, bias):
    """The last count is the number of rows without an expert."""
    kernels = CpuKernels()
    experts = len(counts) - 1
    which = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    x, weights = torch.randn(len(which), inner), torch.randn(experts, out, inner)
    biases = torch.randn(experts, out) if bias else None
    x[which == experts] = torch.nan
    packed = DenseWeight(kernels.pack(weights), biases, out)
    assert packed.data.shape == (experts, *kernels.packed_shape(out, inner))
    starts = torch.tensor([0, *counts[:-1]]).cumsum(0).int()
    got = kernels.grouped_product(x, packed, starts)
    for i in range(experts):
        its = DenseWeight(packed.data[i], biases[i] if bias else None, out)
        alone = kernels.product(x[which == i], its)
        assert torch.equal(got[which == i], alone)
    assert not got[which == experts].any()
    expected = REFERENCE.grouped_product(x, DenseWeight(weights, biases, out), starts)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_grouped_refuses_inputs_that_do_not_fit(kernels):
    x, starts = torch.randn(3, 8), ints([0, 2, 3])
    fit, unfit = (
        DenseWeight(kernels.pack(torch.randn(2, 16, inner)), None, 16) for inner in (8, 9)
    )
    with pytest.raises(RuntimeError, match="grouped: the packed weights do not fit"):
        kernels.grouped_product(x, unfit, starts)
    with pytest.raises(RuntimeError, match="grouped: starts must be int32"):
        kernels.grouped_product(x, fit, starts.long())
    for wrong in ([0, 2, 4], [0, 3, 2], [-1, 2, 3]):
        with pytest.raises(RuntimeError, match="grouped: starts must ascend"):
            kernels.grouped_product(x, fit, ints(wrong))


def test_embedding_reads_rows_of_the_packed_head():
    kernels = CpuKernels()
    weight = torch.randn(37, 20)
    packed = DenseWeight(kernels.pack(weight), None, 37)
    tokens = ints([0, 36, 5, 16, 15])
    assert torch.equal(kernels.embed_ids(tokens, packed), weight[tokens])


EXPERTS = {
    "softmax": Experts(8, 3, 32, "silu", scores="softmax_of_chosen"),
    "softmax, clamped": Experts(8, 4, 48, "clamped_silu", scores="softmax_of_chosen"),
    "one of many": Experts(40, 1, 16, "gelu_tanh", scores="softmax_of_chosen"),
    "sigmoid": Experts(8, 2, 32, "silu", scores="sigmoid"),
    "sigmoid, normed": Experts(
        8, 2, 32, "clamped_silu", scores="sigmoid", is_corrected=True, is_normed=True
    ),
    "groups": Experts(
        12, 3, 16, "silu", scores="sigmoid", is_corrected=True, is_normed=True, factor=2.5,
        num_groups=4, top_groups=2,
    ),
    "softmax, corrected": Experts(8, 3, 32, "silu", scores="softmax", is_corrected=True),
    "shared": Experts(8, 2, 32, "silu", scores="sigmoid", is_corrected=True, num_shared=1),
    "softmax of all, groups, shared": Experts(
        12, 3, 16, "silu", scores="softmax", factor=2.0, num_groups=4, top_groups=2,
        scores_per_group=1, num_shared=2,
    ),
}  # fmt: skip


def expert_weights(shape: Experts, hidden: int, bias: bool) -> ExpertWeights:
    """Return random expert weights, not packed yet."""
    n, inner = shape.num_all, shape.inner_size
    return ExpertWeights(
        router=DenseWeight(
            torch.randn(shape.num_experts, hidden),
            torch.randn(shape.num_experts) if bias else None,
            shape.num_experts,
        ),
        correction=torch.randn(shape.num_experts) if shape.is_corrected else None,
        gate_up=DenseWeight(
            torch.randn(n, 2 * inner, hidden),
            torch.randn(n, 2 * inner) if bias else None,
            2 * inner,
        ),
        down=DenseWeight(
            torch.randn(n, hidden, inner), torch.randn(n, hidden) if bias else None, hidden
        ),
    )


def packed(kernels: TorchKernels, weights: ExpertWeights) -> ExpertWeights:
    def pack(weight: LinearWeight) -> LinearWeight:
        return weight._replace(data=kernels.pack(weight.data))

    return weights._replace(
        router=pack(weights.router), gate_up=pack(weights.gate_up), down=pack(weights.down)
    )


def choose(scores: list[float], correction: list[float], shape: Experts) -> dict[int, float]:
    """Return the chosen experts of one token and the weight of each."""
    shared = dict.fromkeys(range(shape.num_experts, shape.num_all), 1.0)
    if shape.scores == "softmax_of_chosen":
        best = sorted(range(len(scores)), key=lambda i: -scores[i])[: shape.top_k]
        shares = torch.tensor([scores[i] for i in best]).softmax(0).tolist()
        return dict(zip(best, shares, strict=True))
    numbers = torch.tensor(scores)
    numbers = numbers.sigmoid() if shape.scores == "sigmoid" else numbers.softmax(0)
    likings = numbers.tolist()
    wanted = [a + b for a, b in zip(likings, correction, strict=True)]
    size = len(scores) // shape.num_groups
    groups = [range(i, i + size) for i in range(0, len(scores), size)]
    groups.sort(key=lambda group: -sum(sorted(wanted[i] for i in group)[-shape.scores_per_group :]))
    open_to = [i for group in groups[: shape.top_groups] for i in group]
    best = sorted(open_to, key=lambda i: -wanted[i])[: shape.top_k]
    total = sum(likings[i] for i in best) if shape.is_normed else 1
    return {i: likings[i] / total * shape.factor for i in best} | shared


def one_token(x: Tensor, weights: ExpertWeights, shape: Experts) -> Tensor:
    """Apply the experts to one token x [hidden] by definition, in double precision."""
    x, weights = x.double(), tree_map_only(Tensor, Tensor.double, weights)
    scores = F.linear(x, weights.router.data, weights.router.bias).tolist()
    correction = None if weights.correction is None else weights.correction.tolist()
    out = torch.zeros_like(x)
    for i, share in choose(scores, correction or [0.0] * len(scores), shape).items():
        biases = (None if b is None else b[i] for b in (weights.gate_up.bias, weights.down.bias))
        up, down = biases
        inner = activate(F.linear(x, weights.gate_up.data[i], up), shape.activation)
        out += share * F.linear(inner, weights.down.data[i], down)
    return out


def activate(joined: Tensor, activation: str) -> Tensor:
    gate, value = joined.chunk(2, -1)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * value
    if activation == "gelu_tanh":
        inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate / 2 * (1 + torch.tanh(inner)) * value
    gate, value = torch.clip(gate, None, 7), torch.clip(value, -7, 7)
    return (value + 1) * gate / (1 + torch.exp(-1.702 * gate))


def through(kernels, x, slots, weights, shape: Experts, starts: Tensor) -> Tensor:
    routed = kernels.route(x, slots, weights, shape)
    return kernels.experts(routed, weights, shape, starts)


def starts_of(shape: Experts) -> Tensor:
    """Return uninitialised memory for the start of each expert's rows."""
    return ints([-1] * (shape.num_all + 1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", EXPERTS)
def test_experts_equal_the_reference_and_the_definition(kernels, name, bias):
    shape, hidden = EXPERTS[name], 48
    weights = expert_weights(shape, hidden, bias)
    slots = ints([3, 0, 1, 2, 0, 1, 1, 4, 0])
    x = torch.randn(len(slots), hidden)
    x[slots == 0] = torch.nan
    starts, wanted = starts_of(shape), starts_of(shape)
    got = through(kernels, Normed(x), slots, packed(kernels, weights), shape, starts)
    expected = through(REFERENCE, Normed(x), slots, weights, shape, wanted)
    assert torch.equal(starts, wanted) and starts[-1] == 6 * shape.num_chosen
    assert not got[slots == 0].any() and not expected[slots == 0].any()
    close = {"atol": 2e-4, "rtol": 1e-4}
    torch.testing.assert_close(got, expected, **close)
    for t in slots.nonzero()[:, 0].tolist():
        torch.testing.assert_close(got[t].double(), one_token(x[t], weights, shape), **close)


@pytest.mark.parametrize("name", EXPERTS)
def test_the_experts_of_a_token_do_not_depend_on_its_neighbours(kernels, name):
    shape, hidden = EXPERTS[name], 48
    weights = packed(kernels, expert_weights(shape, hidden, bias=True))

    def experts(x: Tensor, slots: Tensor) -> Tensor:
        return through(kernels, Normed(x), slots, weights, shape, starts_of(shape))

    x, slots = torch.randn(50, hidden), torch.arange(50, dtype=torch.int32) % 5
    before = experts(x, slots)
    kept, others = torch.arange(50) % 3 == 0, torch.arange(50) % 3 == 1
    x[others] = torch.randn_like(x[others])
    x[~kept & ~others], slots[~kept & ~others] = torch.nan, 0
    assert torch.equal(experts(x, slots)[kept], before[kept])
    for i in range(0, 50, 3):
        assert torch.equal(experts(x[i : i + 1], slots[i : i + 1]), before[i : i + 1])


def test_experts_without_any_token(kernels):
    shape = EXPERTS["softmax"]
    weights = packed(kernels, expert_weights(shape, 48, bias=True))
    x = Normed(torch.full((4, 48), torch.inf))
    starts = starts_of(shape)
    assert not through(kernels, x, ints([0] * 4), weights, shape, starts).any()
    assert not starts.any()


def test_gates_and_caps_at_the_ends_of_the_range(kernels):
    limits = [0.0, -0.0, 1e-30, 1e-4, 0.6249, 0.6251, 20, 87, 88.5, 104, 200, 3e38, torch.inf]
    x = torch.tensor([limits, [-value for value in limits]])
    ones = torch.ones_like(x)
    got = kernels.gate(x, ones, "sigmoid").double()
    torch.testing.assert_close(got, x.double().sigmoid(), atol=1e-38, rtol=3e-7)
    for cap in (1.0, 30.0):
        expected = cap * (x.double() / cap).tanh()
        torch.testing.assert_close(kernels.softcap(x, cap).double(), expected, atol=0, rtol=3e-7)
    assert kernels.gate(ones * torch.nan, ones, "silu").isnan().all()
    assert kernels.softcap(ones * torch.nan, 5.0).isnan().all()


def test_softmax(kernels):
    x = torch.randn(9, 19) * 20
    torch.testing.assert_close(kernels.softmax(x).double(), x.double().softmax(-1))
    x[3, 7] = torch.nan
    assert kernels.softmax(x)[3].isnan().all() and not kernels.softmax(x)[4].isnan().any()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_silu"])
def test_gates(kernels, activation):
    joined = torch.randn(9, 40) * 6  # larger than the limits of gates and values
    expected = activate(joined.double(), activation)
    for got in (each.gate(*joined.chunk(2, -1), activation) for each in (REFERENCE, kernels)):
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)
    x, weight, bias = torch.randn(5, 24), torch.randn(34, 24), torch.randn(34)
    packed = DenseWeight(kernels.pack(weight), bias, 34)
    expected = activate(F.linear(x, weight, bias).double(), activation)
    got = kernels.linear_gated(Normed(x), packed, activation).x.double()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-5)


def norm(x: Tensor, weight: Tensor, is_centred: bool = False) -> Tensor:
    """Return the RMSNorm of each row, in double precision; if centred, its LayerNorm."""
    x = x.double()
    if is_centred:
        x = x - x.mean(-1, keepdim=True)
    return x / ((x**2).sum(-1, keepdim=True) / x.shape[-1] + EPS) ** 0.5 * weight


@pytest.mark.parametrize("is_centred", [False, True])
@pytest.mark.parametrize("has_after", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_add_norm_with_and_without_each_norm(kernels, has_after, has_norm, is_centred):
    x, residual, (after, before) = torch.randn(5, 24), torch.randn(5, 20), torch.randn(2, 20)
    weight, bias = torch.randn(20, 24), torch.randn(20)
    change = F.linear(x, weight, bias)
    total = residual + (norm(change, after, is_centred) if has_after else change)
    normed = norm(total, before, is_centred) if has_norm else total
    norms = ResidualNorms(
        after if has_after else None, before if has_norm else None, EPS, is_centred
    )
    packed = DenseWeight(kernels.pack(weight), bias, 20)
    for got in (
        kernels.add_norm(change, residual.clone(), norms),
        kernels.linear_add_norm(Normed(x), packed, residual.clone(), norms),
    ):
        torch.testing.assert_close(got[0].double(), total.double(), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(got[1].x.double(), normed.double(), atol=1e-5, rtol=1e-5)
        assert got[1].squares is None
    if has_norm:
        got = kernels.norm(got[0], before, EPS, is_centred).x
        torch.testing.assert_close(got.double(), normed, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_logits_are_capped_and_slot_0_has_none(kernels, softcap):
    x, weight, slots = torch.randn(6, 24), torch.randn(70, 24), ints([1, 0, 2, 0, 3, 0])
    expected = F.linear(x, weight).double()
    if softcap is not None:
        expected = softcap * torch.tanh(expected / softcap)
    expected[slots == 0] = 0
    x[slots == 0] = torch.nan
    out = torch.full((6, 70), torch.nan)
    head = DenseWeight(kernels.pack(weight), None, 70)
    kernels.logits(Normed(x), head, slots, softcap, out)
    torch.testing.assert_close(out.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("is_whole", "norms_values"), [(False, False), (True, False), (False, True)]
)
@pytest.mark.parametrize(("window", "is_chunked"), [(None, False), (3, False), (3, True)])
def test_attention_norms_rotates_stores_and_attends(
    kernels, is_whole, norms_values, window, is_chunked
):
    """A prompt of 7 tokens, of which the first 2 came in an earlier step, gives attention by its
    definition; then its queries alone, over the stored keys, give the same."""
    heads = heads_of(
        6, 2, 16, value_dim=10, window=window, is_chunked=is_chunked, norms_whole=is_whole,
        norms_values=norms_values,
    )  # fmt: skip
    joined, sinks = torch.randn(7, sum(heads.sizes)), torch.randn(6)
    q_norm, k_norm = (torch.randn(n * 16 if is_whole else 16) for n in (6, 2))
    frequency = torch.rand(8)
    kv, table = torch.full((5, 4, 2, 26), torch.nan), ints([0, 0, 3, 1]).view(2, 2)
    outs = []
    for span in ((0, 2), (2, 7)):
        tokens = Tokens(ints([1] * (span[1] - span[0])), torch.arange(*span).int())
        plan = kernels.plan(tokens, None, heads)
        angle = tokens.positions[:, None, None] * frequency
        outs.append(
            kernels.attention(
                joined[slice(*span)], QkNorms(q_norm, k_norm), sinks,
                Angles(angle.cos(), angle.sin()), PagedKv(kv, table), plan, heads,
            )
        )  # fmt: skip
    q, k, v = joined.double().split(heads.sizes, -1)
    if is_whole:
        q, k = norm(q, q_norm), norm(k, k_norm)
    q, k, v = q.view(7, 6, 16), k.view(7, 2, 16), v.view(7, 2, 10)
    if not is_whole:
        q, k = norm(q, q_norm), norm(k, k_norm)
    if norms_values:
        v = norm(v, torch.ones(10))
    turns = torch.polar(torch.ones(1).double(), torch.arange(7)[:, None, None] * frequency.double())
    q, k = rotated(q, turns), rotated(k, turns)
    expected = torch.zeros(7, 6, 10, dtype=torch.float64)
    for t in range(7):
        first = t // 3 * 3 if is_chunked else max(0, t + 1 - (window or 7))
        seen = slice(first, t + 1)
        for head in range(6):
            shares = (k[seen, head // 3] @ q[t, head] * heads.scale).exp()
            shares = shares / (shares.sum() + sinks[head].double().exp())
            expected[t, head] = shares @ v[seen, head // 3]
    torch.testing.assert_close(torch.cat(outs).double(), expected.flatten(1), atol=1e-5, rtol=1e-5)
    readers, before = dataclasses.replace(heads, stores=False), kv.clone()
    queries = torch.cat((joined[:, : 6 * 16], torch.full((2, 6 * 16), torch.inf)))
    tokens = Tokens(ints([1] * 7 + [0] * 2), ints([*range(7), 0, 0]))
    angle = tokens.positions[:, None, None] * frequency
    read = kernels.attention(
        queries, QkNorms(q_norm, None), sinks, Angles(angle.cos(), angle.sin()), PagedKv(kv, table),
        kernels.plan(tokens, None, readers), readers,
    )  # fmt: skip
    torch.testing.assert_close(read[:7].double(), expected.flatten(1), atol=1e-5, rtol=1e-5)
    assert not read[7:].any()
    torch.testing.assert_close(kv, before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("stores", [True, False])
def test_heads_are_rotated_and_then_normed(kernels, stores):
    heads = heads_of(6, 2, 16, value_dim=10, stores=stores)
    joined, norms = torch.randn(7, sum(heads.sizes)), torch.randn(2, 16)
    angles = torch.rand(2, 7, 1, 8)
    both = [Angles(angle.cos(), 2 * angle.sin()) for angle in angles]
    q, k, v = joined.double().split(heads.sizes, -1)
    wanted = []
    for x, turn, weight in zip((q, k), both, norms, strict=True):
        turned = rotated(x.view(7, -1, 16), torch.complex(*(part.double() for part in turn)))
        wanted.append((turned, norm(turned, weight)))
    for index, weights in enumerate((QkNorms(None, None), QkNorms(*norms))):
        expected = torch.cat([*(each[index].flatten(1) for each in wanted), v], dim=-1)
        got = kernels.rotate_heads(joined, weights, *both, heads)
        torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    """Rotate pairs (i, i + size / 2), taken as complex numbers."""
    pairs = torch.complex(*x.chunk(2, -1)) * turns
    return torch.cat((pairs.real, pairs.imag), -1)


def test_a_compiler_can_trace_every_op(kernels):
    heads = heads_of(4, 2, 8, value_dim=6, window=3, softcap=5.0)
    with FakeTensorMode():
        k, v, kv = torch.empty(3, 2, 8), torch.empty(3, 2, 6), torch.empty(5, 4, 2, 14)
        table, slots = (torch.empty(size, dtype=torch.int32) for size in ((3, 2), (3,)))
        stored, tokens = PagedKv(kv, table), Tokens(slots, slots)
        kernels.store_kv(k, v, stored, tokens)
        sinks, q = torch.empty(4), torch.empty(3, 4, 8)
        plan = TorchPlan(tokens, None)
        assert kernels.attend(q, sinks, stored, plan, heads).shape == (3, 4, 6)
        tree = Branches(slots, torch.empty(3, dtype=torch.int64), slots)
        plan = TorchPlan(tokens, tree)
        assert kernels.attend(q, None, stored, plan, heads).shape == (3, 4, 6)
        x, starts = torch.empty(3, 24), torch.empty(6, dtype=torch.int32)
        weights = torch.empty(5, *kernels.packed_shape(20, 24))
        assert kernels.product(x, DenseWeight(weights[0], None, 20)).shape == (3, 20)
        assert kernels.grouped_product(x, DenseWeight(weights, None, 20), starts).shape == (3, 20)
