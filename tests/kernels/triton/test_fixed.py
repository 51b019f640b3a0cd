"""Tests of deterministic mode's kernels: one result to the bit, whatever the step looks like."""

from dataclasses import replace

import pytest
import torch
from order import sum_like_a_gpu
from recurrence import KINDS as RECURRENT
from recurrence import Mixer, Step
from torch.nn import functional as F

from slotzero.kernels.quantized import QuantizedRows, dequantise, quantise
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.attention import fixed, fixed_plan
from slotzero.kernels.triton.attention.per_head_fixed import per_head_fixed
from slotzero.kernels.triton.deterministic import DeterministicKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.linear import linear_fixed, linear_quantized, tiles_fixed
from slotzero.kernels.triton.linear.operands import Operands
from slotzero.kernels.triton.linear.tiles_fixed import FixedTile, shares_of
from slotzero.kernels.triton.moe import experts
from slotzero.kernels.types import Heads, MlaShape, Normed, PagedKv, Rows, Tokens
from slotzero.kernels.weights import DenseWeight, QuantizedWeight, WeightFormat

FEATURES, INNER = 192, 1040  # in two shares, or three; the last one is not full
SHARES = shares_of(FEATURES, INNER)
EPS = 1e-3
TILES = [  # one row, some and many; narrow and wide; with shares apart or in turn
    (1, FixedTile(64, 16, 128, 3, 4), 132),
    (3, FixedTile(64, 16, 256, 3, 4), 132),
    (40, FixedTile(64, 32, 64, 3, 4), 132),
    (40, FixedTile(128, 16, 64, 3, 8), 1),
    (70, FixedTile(128, 128, 64, 3, 8), 1),
]
KINDS = ["linear", "gated", "add", "logits"]


@pytest.fixture(autouse=True)
def orders_of_a_gpu(monkeypatch):
    if INTERPRETED:
        sum_like_a_gpu(monkeypatch)


def product(kind, rows, tile, x, weight, bias, norm, before, shares=SHARES):
    """Return what a product of the first rows makes."""
    x, features = x[:rows], len(weight)
    tile = replace(tile, shares=1 if kind == "gated" else shares)
    squares = x.float().square().unflatten(1, (-1, INNER // 4)).sum(-1).t().contiguous()
    given = Operands(x, weight, bias, squares, EPS)
    if kind == "gated":
        out = x.new_empty(rows, features // 2)
        linear_fixed.product(given, out, tile, activation="silu")
        return (out,)
    if kind == "logits":
        out, slots = torch.empty(rows, features, device=x.device), torch.arange(rows).to(x.device)
        linear_fixed.product(given, out, tile, slots=slots.int())
        return (out,)
    if kind == "linear":
        out = x.new_empty(rows, features)
        linear_fixed.product(given, out, tile)
        return (out,)
    residual, sums = before[:rows].clone(), torch.empty(features // 64, rows, device=x.device)
    made = Normed(torch.empty_like(residual), sums, EPS)
    linear_fixed.product(given, residual, tile, adds=True, norm=norm, made=made)
    return residual, made.x, sums.t()


def inputs(device, half):
    torch.manual_seed(0)
    shapes = (70, INNER), (FEATURES, INNER), (FEATURES,), (FEATURES,), (70, FEATURES)
    return [torch.randn(shape).to(device, half) for shape in shapes]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_has_the_same_bits_in_every_tile(device, half, monkeypatch, kind):
    given, results = inputs(device, half), []
    for rows, tile, processors in TILES:
        monkeypatch.setattr(tiles_fixed, "num_processors", lambda num=processors: num)
        results.append(product(kind, rows, tile, *given))
        assert not linear_fixed.linear_tma.arrivals().any()
    for made in results[1:]:
        for got, expected in zip(made, results[0], strict=True):
            assert torch.equal(got[:1], expected[:1])
    x, weight, bias, norm, before = (of.float() for of in given)
    expected = F.linear(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS), weight, bias)
    if kind == "gated":
        expected = ReferenceKernels().gate(*expected.chunk(2, -1), "silu")
    if kind == "logits":
        expected[0] = 0
    if kind == "add":
        expected += before
        residual, weighted, sums = results[-1]
        assert torch.equal(weighted, (residual.float() * norm).to(half))
        assert torch.allclose(sums.sum(-1), residual.float().square().sum(-1), rtol=1e-4)
    assert (results[-1][0].float() - expected).norm() < 1e-2 * expected.norm()


def test_other_shares_have_other_bits(device, half):
    """So the test above would see shares that depend on the rows."""
    given, tile = inputs(device, half), TILES[1][1]
    right = product("logits", 3, tile, *given)[0]
    assert not torch.equal(product("logits", 3, tile, *given, shares=1)[0], right)


def test_rows_that_cannot_be_copied_in_bulk(device, half):
    x, weight, *_ = inputs(device, half)
    expected = product("linear", 3, TILES[0][1], x, weight, None, None, None)[0]
    apart = torch.zeros(70, INNER + 4, device=device).to(half)
    apart[:, 4:] = x
    squares = x[:3].float().square().unflatten(1, (-1, INNER // 4)).sum(-1).t().contiguous()
    out = torch.empty_like(expected)
    given = Operands(apart[:3, 4:], weight, None, squares, EPS)
    assert not linear_fixed.linear_tma.takes(given.x, weight)
    linear_fixed.product(given, out, replace(TILES[0][1], shares=SHARES))
    assert torch.equal(out, expected)


def test_shares_follow_from_the_weight_and_cover_it():
    for features in (1, 64, 576, 1024, 4096, 6144, 151936):
        for inner in (16, 64, 576, 1024, 3072, 14336):
            shares = shares_of(features, inner)
            depth = tiles_fixed.share_depth(inner, shares)
            assert (shares - 1) * depth < inner <= shares * depth
    assert [shares_of(*of) for of in ((1024, 2048), (4096, 14336), (28672, 4096))] == [4, 2, 1]


def test_every_number_of_rows_has_tiles_of_one_order():
    """What a tile may not change: matrix units take at least 64 features, and sums of codes in
    float8 are rounded at one depth."""
    for rows in (1, 8, 16, 17, 64, 65, 256, 257, 8192):
        for tile in tiles_fixed.fixed_tiles_for(rows, torch.bfloat16, 1):
            assert tile.features >= 64 and tiles_fixed.SHARE_STEP % tile.depth == 0
        depths = {t.depth for t in tiles_fixed.fixed_tiles_for(rows, torch.float8_e4m3fn, 1)}
        assert depths == {128}


PAGE, DIM = 16, 16


class Texts:
    """Stored keys and values of two texts, and queries of their tokens."""

    def __init__(self, device, dtype, length, **kind):
        torch.manual_seed(1)
        self.heads = Heads(4, 2, DIM, DIM, 1e-6, DIM**-0.5, **kind)
        pages = -(-length // PAGE)
        self.kv = PagedKv(
            torch.randn(2 * pages + 1, PAGE, 2, 2 * DIM).to(device, dtype),
            torch.randperm(3 * pages)[: 3 * pages].view(3, pages).int().to(device) % (2 * pages),
        )
        self.q = torch.randn(2, length, 4, DIM).to(device, dtype)
        self.sinks = torch.randn(4).to(device, dtype)
        self.device = device

    def attend(self, rows, span=None):
        """Return results by token of rows (slot, start, count); span None: a decode step."""
        ints = {"dtype": torch.int32, "device": self.device}
        places = [(s, p) for s, start, count in rows for p in range(start, start + count)]
        slots, positions = torch.tensor(places, **ints).t().contiguous()
        tokens, step = Tokens(slots, positions), None
        if span is not None:
            slot, start, count = torch.tensor(rows, **ints).t().contiguous()
            step = Rows(slot, start, count, count.cumsum(0).int(), span)
        plan = fixed_plan.plan(tokens, step, self.heads)
        q = self.q[[s - 1 for s, _ in places], [p for _, p in places]]
        out = fixed.attend(q, self.sinks, self.kv, plan, self.heads)
        assert plan.runs is None or not plan.runs.done.any()
        return dict(zip(places, out, strict=True))

    def expected(self, slot, position):
        heads, of_slot = self.heads, self.kv.pages[self.kv.page_table[slot].long()].float()
        low = heads.first_key(position)
        keys, values = of_slot.flatten(0, 1)[low : position + 1].chunk(2, -1)
        q = self.q[slot - 1, position].float().view(2, 2, DIM)
        scores = torch.einsum("kgd,tkd->kgt", q, keys) * heads.scale
        if heads.softcap is not None:
            scores = heads.softcap * torch.tanh(scores / heads.softcap)
        sinks = self.sinks.float().view(2, 2, 1)
        weights = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
        return torch.einsum("kgt,tkd->kgd", weights, values).reshape(4, DIM)


@pytest.mark.parametrize(
    ("kind", "is_wide"),
    [({}, False), ({}, True), ({"window": 70}, True), ({"softcap": 2.0}, True)],
)
def test_attention_of_a_token_has_the_same_bits_in_every_step(
    device, half, monkeypatch, kind, is_wide
):
    dtype = torch.float32 if is_wide else half
    texts, at = Texts(device, dtype, 300, **kind), (1, 296)
    monkeypatch.setattr(fixed_plan, "PROGRAMS", 12)
    steps = [texts.attend([(1, 296, 1)])]  # alone, with its chunks spread over programs
    monkeypatch.setattr(fixed_plan, "PROGRAMS", 1)
    steps.append(texts.attend([(2, 40, 1), (1, 296, 1)]))
    steps.append(texts.attend([(1, 295, 3), (2, 131, 3)], span=3))
    steps.append(texts.attend([(2, 0, 5), (1, 230, 70)], span=0))
    monkeypatch.setattr(fixed_plan, "FEW_TOKENS", 8)  # tiles of many pairs, each over all chunks
    steps.append(texts.attend([(1, 290, 10)], span=0))
    for step in steps[1:]:
        assert torch.equal(step[at], steps[0][at])
    for place in (at, (1, 231), (1, 255), (2, 4)):
        near = 4e-3 if dtype.itemsize > 2 or INTERPRETED else 2e-2
        assert torch.allclose(steps[3][place].float(), texts.expected(*place), atol=near)


def test_no_token_of_a_text_has_other_bits_when_decoded(device):
    """In float16, whose bits show an order of summation soonest, over many tokens."""
    texts = Texts(device, torch.float16, 200)
    whole = texts.attend([(1, 100, 100)], span=0)
    for place, result in texts.attend([(1, p, 1) for p in range(100, 200)]).items():
        assert torch.equal(result, whole[place])


def test_chunks_of_long_texts_are_longer(device, monkeypatch):
    texts = Texts(device, torch.float32, 1400)
    monkeypatch.setattr(fixed_plan, "PROGRAMS", 40)
    alone = texts.attend([(1, 1390, 1)])[1, 1390]
    monkeypatch.setattr(fixed_plan, "FEW_TOKENS", 0)
    assert torch.equal(texts.attend([(1, 1390, 2)], span=0)[1, 1390], alone)
    assert torch.allclose(alone.float(), texts.expected(1, 1390), atol=4e-3)


def test_experts_of_a_token_have_the_same_bits_beside_any_others(device, half):
    torch.manual_seed(0)
    x = torch.randn(70, 80, device=device).to(half)
    weight = torch.randn(2, 64, 80, device=device).to(half)
    gate_up, chosen = DenseWeight(weight, None, 64), torch.rand(70, 2).argsort().int().to(device)

    def result(rows):
        starts = chosen.new_empty(3)
        order = experts.sort(chosen[:rows].contiguous(), starts, half, is_fixed=True)
        assert order.is_fixed
        made = experts.gated(x[:rows], gate_up, order, "silu")
        at = order.order.argsort()[:2]  # of the first token's choices
        return made[at], order.tile.rows

    (alone, few), (beside, many) = result(1), result(70)
    assert few < many and torch.equal(alone, beside)
    gates, values = F.linear(x[0].float(), weight[chosen[0, 0].item()].float()).chunk(2)
    assert torch.allclose(alone[0].float(), F.silu(gates) * values, rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("inner", [24, 200])
def test_products_of_heads_have_the_same_bits_at_any_number_of_rows(device, inner):
    torch.manual_seed(0)
    x = torch.randn(40, 2, inner, device=device).half()
    weight = torch.randn(2, 70, inner, device=device).half().transpose(1, 2)
    whole, few = torch.empty(40, 2, 70, device=device), torch.empty(3, 2, 70, device=device)
    per_head_fixed(x, weight, whole)
    per_head_fixed(x[:3], weight, few)
    assert torch.equal(whole[:3], few)
    expected = torch.einsum("rhi,hic->rhc", x.float(), weight.float())
    assert torch.allclose(whole, expected, atol=1e-2)


@pytest.mark.parametrize("shape", RECURRENT[:2], ids=lambda shape: shape.kind)
def test_recurrent_rows_have_the_same_bits_however_they_are_cut(device, shape):
    """As one row, as two, token by token, and beside another row; with chunks they would not."""
    cuts = (
        [Step([(1, 0, 19)])],
        [Step([(1, 0, 6)]), Step([(1, 6, 13), (2, 0, 3)])],
        [Step([(1, 0, 17)]), *(Step([(1, i, 1)], span=None) for i in (17, 18))],
    )
    ends = []
    for steps in cuts:
        mixer = Mixer(DeterministicKernels(), shape, device)
        for step in steps:
            out = mixer.run(step)
        ends.append(mixer.states.scan[1])
    assert all(torch.equal(end, ends[0]) for end in ends)
    reference = Mixer(ReferenceKernels(), shape)
    for step in cuts[-1]:
        expected = reference.run(step)
    assert torch.allclose(out, expected, atol=1e-4)


@pytest.mark.parametrize("heads", [4, 80])
def test_latent_attention_of_a_token_has_the_same_bits_in_every_step(device, monkeypatch, heads):
    """80 heads are two parts, and a latent of 144 dimensions is two parts, too."""
    torch.manual_seed(0)
    shape = Heads(heads, 1, 160, 144, 1e-6, 0.1, mla=MlaShape(16, 16, 16))
    pages = torch.randn(20, PAGE, 1, 160, device=device)
    kv = PagedKv(pages, torch.arange(20, dtype=torch.int32, device=device)[None].repeat(2, 1))
    q = torch.randn(2, heads, 160, device=device)
    results = []
    for programs, few, rows in ((40, 1024, None), (1, 1024, None), (1, 0, 1)):
        monkeypatch.setattr(fixed_plan, "PROGRAMS", programs)
        monkeypatch.setattr(fixed_plan, "FEW_TOKENS", few)
        num = 1 if rows is None else 2
        ones = torch.ones(num, dtype=torch.int32, device=device)
        tokens = Tokens(ones, 300 + torch.arange(num, dtype=torch.int32, device=device))
        one = ones[:1]
        step = Rows(one, 300 * one, 2 * one, 2 * one) if rows else None
        plan = fixed_plan.plan(tokens, step, shape)
        results.append(fixed.attend(q[:num], None, kv, plan, shape)[0])
    assert all(torch.equal(result, results[0]) for result in results)
    keys = pages.flatten(0, 2)[:301]
    weights = (q[0] @ keys.T * 0.1).softmax(-1)
    assert torch.allclose(results[0], weights @ keys[:, 16:], atol=1e-5)


PACKED = {
    "offsets": WeightFormat("uint4", 64, has_offsets=True),
    "whole rows, offsets": WeightFormat("uint8", has_offsets=True),
    "mxfp4": WeightFormat("mxfp4", 32, scale_dtype=torch.uint8),
    "float8": WeightFormat("float8", 128, activations="float8_group"),
}


@pytest.mark.parametrize("name", PACKED)
def test_packed_weights_have_one_order_at_any_number_of_rows(device, half, name):
    """As products and as experts; they are not stored in fragments, whose tiles follow the rows."""
    torch.manual_seed(0)
    format, kernels, features, inner = PACKED[name], DeterministicKernels(), 72, 256
    rows = quantise(torch.randn(2, features, inner) * inner**-0.5, format)
    tensors = kernels.pack_quantized(rows, format)
    assert {n: t.shape[1:] for n, t in tensors.items()} == {
        n: shape for n, (shape, _) in kernels.quantized_shapes(features, inner, format).items()
    }

    def weight_of(part):
        its = {field: tensor[part].to(device) for field, tensor in tensors.items()}
        return QuantizedWeight(**its, bias=None, out_features=features, in_features=inner,
                               dtype=half, format=format)  # fmt: skip

    x = torch.randn(40, inner, device=device).to(half)
    one, both = weight_of(0), weight_of(slice(None))
    results = []
    for num in (1, 40):
        out = torch.empty(num, features, device=device)
        linear_quantized.product_fixed(x[:num], one, out)
        starts, chosen = torch.empty(3, dtype=torch.int32, device=device), torch.zeros(num, 1)
        order = experts.sort(chosen.int().to(device), starts, half, is_fixed=True)
        results.append((out, experts.gated(x[:num], both, order, "silu")))
    for few, many in zip(*results, strict=True):
        assert torch.equal(few[0], many[0])
    numbers = dequantise(QuantizedRows(*(None if t is None else t[0] for t in rows)), format)
    expected = x.float().cpu() @ numbers.T
    error = (results[1][0].cpu() - expected).norm() / expected.norm()
    assert error < (0.05 if name == "float8" else 0.01)
