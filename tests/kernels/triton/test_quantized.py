"""Products with quantised weights against the reference: every format, ragged shapes, and NaN
around all that may be read."""

import itertools
from dataclasses import replace

import pytest
import torch
from distinct_tiles import distinct

from slotzero.kernels import quantized
from slotzero.kernels.quantized import (
    FLOAT8,
    QuantizedRows,
    dequantise,
    pack_rows,
    quantise,
    unpack_rows,
)
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.linear import (
    library,
    linear_quantized,
    linear_tma,
    tiles_quantized,
)
from slotzero.kernels.triton.linear.elementwise import (
    add_norm,
    apply_norm,
    gate,
    gate_float8,
)
from slotzero.kernels.triton.linear.linear import linear, linear_add
from slotzero.kernels.triton.linear.operands import multiplies_float8, operands
from slotzero.kernels.triton.linear.round_float8 import round_input, rounded
from slotzero.kernels.triton.linear.tiles import float8_tiles_for
from slotzero.kernels.triton.linear.tiles_quantized import tile_for
from slotzero.kernels.types import (
    Experts,
    ExpertWeights,
    Normed,
    PairNorms,
    ResidualNorms,
    Routed,
    Tokens,
)
from slotzero.kernels.weights import (
    DenseWeight,
    JoinedWeight,
    LinearWeight,
    QuantizedWeight,
    WeightFormat,
)

REFERENCE, TRITON = ReferenceKernels(), TritonKernels()
EPS = 1e-3
MXFP4 = WeightFormat("mxfp4", 32, scale_dtype=torch.uint8)
PLAIN = {
    "int4 of 128": WeightFormat("uint4", 128, zero=8),
    "int4 of 64, offsets": WeightFormat("uint4", 64, has_offsets=True, scale_dtype=torch.float16),
    "int4 of 32": WeightFormat("uint4", 32, zero=8, scale_dtype=torch.bfloat16),
    "int4 of 32, offsets": WeightFormat("uint4", 32, has_offsets=True),
    "int4 of rows, offsets": WeightFormat("uint4", has_offsets=True),
    "int4 of 24": WeightFormat("uint4", 24, zero=8),
    "int4, scattered": WeightFormat("uint4", 32, 8, is_scattered=True, groups=7),
    "int8 of 16": WeightFormat("uint8", 16, zero=128),
    "int8 of 128, offsets": WeightFormat("uint8", 128, has_offsets=True),
    "int8 of rows": WeightFormat("uint8", zero=128),
    "mxfp4": MXFP4,
    "fp8 of 128": WeightFormat("float8", 128),
    "fp8 of rows": WeightFormat("float8"),
}
FLOAT8_INPUTS = {
    "fp8 by row": WeightFormat("float8", activations="float8_row"),
    "fp8 by row, of 64": WeightFormat("float8", 64, activations="float8_row"),
    "fp8 by group": WeightFormat("float8", 128, activations="float8_group"),
    "fp8 by group of 32": WeightFormat("float8", 32, activations="float8_group"),
    "fp8 by group of 16": WeightFormat("float8", 16, activations="float8_group"),  # is unpacked
    "fp8, static": WeightFormat("float8", activations="float8_static"),
}
FORMATS = PLAIN | FLOAT8_INPUTS
each_format = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def surrounded(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to memory that has NaN before and behind it."""
    size, margin = tensor.numel(), 256
    memory = torch.full((2 * margin + size * tensor.itemsize,), 255, dtype=torch.uint8)
    inside = memory.to(device)[margin : margin + size * tensor.itemsize]
    return inside.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def drawn(format: WeightFormat, *shape: int) -> QuantizedRows:
    """A weight of numbers of about shape[-1] ** -0.5."""
    rows = quantise(torch.randn(shape) * shape[-1] ** -0.5, format)
    if format.is_scattered:
        scales = (torch.rand(*shape[:-1], format.groups) + 0.5) * shape[-1] ** -0.5 / 4
        group_of = torch.randint(format.groups, (*shape[:-2], shape[-1])).int()
        rows = rows._replace(scales=scales, group_of=group_of)
    if format.activations == "float8_static":
        rows = rows._replace(input_scale=torch.tensor([0.01]))
    return rows


def weight_of(
    format: WeightFormat, *shape: int, device, dtype=torch.float32, bias=True
) -> QuantizedWeight:
    packed = pack_rows(drawn(format, *shape), format)
    tensors = {field: surrounded(tensor, device) for field, tensor in packed.items()}
    added = surrounded(torch.randn(shape[:-1]).to(dtype), device) if bias else None
    return QuantizedWeight(
        **tensors, bias=added, out_features=shape[-2], in_features=shape[-1], dtype=dtype,
        format=format,
    )  # fmt: skip


def ours(weight: LinearWeight) -> LinearWeight:
    """Return a weight in the layout of our kernels, with NaN around it."""
    if isinstance(weight, JoinedWeight):
        return weight._replace(parts=tuple(ours(part) for part in weight.parts))
    if isinstance(weight, DenseWeight):
        return weight
    packed = TRITON.pack_quantized(unpack_rows(weight), weight.format)
    return weight._replace(
        **{field: surrounded(tensor, tensor.device) for field, tensor in packed.items()}
    )


def rows_of(num: int, size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return surrounded(torch.randn(num, size).to(dtype), device)


def late(x: torch.Tensor, parts: int = 3) -> Normed:
    """Rows whose norm is deferred, as a product that cut its features into parts leaves them."""
    cuts = x.float().square().tensor_split(parts, dim=-1)
    return Normed(x, torch.stack([cut.sum(-1) for cut in cuts]), EPS)


def close(got: torch.Tensor, wanted: torch.Tensor, unlike: float | None = None) -> bool:
    """In float32 only the order of sums differs. In 16 bits, the reference rounds its result, and
    a row in float8 once more before the product."""
    if unlike is None:
        unlike = 1e-5 if wanted.dtype is torch.float32 else 1e-2
    far = (got.float() - wanted.float()).norm() / wanted.float().norm()
    return bool(got.dtype is wanted.dtype and far < unlike)


def unlike(format: WeightFormat, dtype: torch.dtype) -> float | None:
    """How far from the reference a product may be; None: as far as any. The matrix units of a card
    add products of float8 up in fewer bits than float32 has."""
    multiplies = format.activations != "plain" and not INTERPRETED
    return 2e-3 if multiplies and dtype is torch.float32 else None


@pytest.mark.parametrize(("rows", "shape"), [(1, (70, 201)), (17, (64, 257)), (70, (33, 224))])
@each_format
def test_linear(device, half, format, rows, shape):
    """Features that no tile divides, and inner dimensions that neither tiles nor groups do."""
    torch.manual_seed(rows)
    for dtype in (torch.float32, half):
        weight = weight_of(format, *shape, device=device, dtype=dtype)
        x = Normed(rows_of(rows, shape[1], dtype, device))
        got, wanted = TRITON.linear(x, ours(weight)), REFERENCE.linear(x, weight)
        assert close(got, wanted, unlike(format, dtype)), dtype


@pytest.mark.parametrize("name", ["int4 of 128", "int4 of 24", "fp8 by group", "fp8, static"])
def test_bfloat16(device, name):
    """Which the interpreter multiplies in float32."""
    weight = weight_of(FORMATS[name], 40, 200, device=device, dtype=torch.bfloat16)
    x = Normed(rows_of(3, 200, torch.bfloat16, device))
    assert close(TRITON.linear(x, ours(weight)), REFERENCE.linear(x, weight))


@pytest.mark.parametrize("name", ["int4 of 24", "int4, scattered", "int8 of 16", "fp8 by group"])
@pytest.mark.parametrize("rows", [2, 20] if not INTERPRETED else [5])
def test_shares_of_the_inner_dimension(device, half, rows, name):
    """With every epilogue that follows them, and a deferred norm."""
    dtype, inner, format = half, 1100, FORMATS[name]
    weight = weight_of(format, 48, inner, device=device, dtype=dtype)
    x = late(rows_of(rows, inner, dtype, device))
    assert tile_for(rows, 48, format, inner, dtype).shares == 2
    normed = Normed(apply_norm(x))
    out = torch.full((rows, 48), torch.nan, device=device).to(dtype)
    slots = torch.arange(rows, device=device).int() % 3
    linear_quantized.product(x, ours(weight), out, slots)
    wanted = REFERENCE.linear(normed, weight) * (slots > 0)[:, None]
    assert (out[slots == 0] == 0).all() and close(out, wanted)
    got = linear_quantized.product_gated(x, ours(weight), "silu")
    assert close(got, REFERENCE.linear_gated(normed, weight, "silu").x)
    check_add(rows_of(rows, inner, dtype, device), weight)


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("name", ["int4 of 128", "mxfp4", "fp8 by group"])
def test_epilogues(device, half, rows, name):
    format, size = FORMATS[name], 150
    weight = weight_of(format, 140, size, device=device, dtype=half)
    x = late(rows_of(rows, size, half, device))
    normed = Normed(apply_norm(x))
    got = linear_quantized.product_gated(x, ours(weight), "clamped_silu")
    assert close(got, REFERENCE.linear_gated(normed, weight, "clamped_silu").x)
    check_add(rows_of(rows, size, half, device), weight)


def check_add(x: torch.Tensor, weight: QuantizedWeight) -> None:
    before = torch.randn(len(x), weight.out_features, device=x.device).to(x.dtype)
    norm = torch.randn(weight.out_features, device=x.device).to(x.dtype)
    norms = ResidualNorms(None, norm, EPS)
    wanted, wanted_normed = REFERENCE.linear_add_norm(Normed(x), weight, before, norms)
    residual = before.clone()
    made = linear_quantized.product_add(Normed(x), ours(weight), residual, norms)
    assert close(residual, wanted) and close(apply_norm(made), wanted_normed.x)
    for others in (norms, ResidualNorms(norm, None, EPS)):
        wanted, wanted_normed = REFERENCE.linear_add_norm(Normed(x), weight, before, others)
        residual, made = TRITON.linear_add_norm(Normed(x), ours(weight), before.clone(), others)
        assert close(residual, wanted) and close(apply_norm(made), wanted_normed.x)


@pytest.mark.parametrize("name", ["int4 of 128", "mxfp4", "fp8 by row", "fp8 by group of 16"])
def test_many_rows(device, name):
    """More than tiles are for, unless rows and weight are both codes in float8."""
    weight = weight_of(FORMATS[name], 48, 130, device=device)
    x = Normed(rows_of(260, 130, torch.float32, device))
    far = unlike(FORMATS[name], torch.float32)
    assert close(TRITON.linear(x, ours(weight)), REFERENCE.linear(x, weight), far)
    gated = TRITON.linear_gated(x, ours(weight), "silu")
    assert close(gated.x, REFERENCE.linear_gated(x, weight, "silu").x, far)


@pytest.mark.parametrize("rows", [3, 260])
@pytest.mark.parametrize("name", ["int8 of 128, offsets", "fp8 by row"])
def test_logits(device, rows, name):
    weight = weight_of(FORMATS[name], 50, 72, device=device, bias=False)
    x = rows_of(rows, 72, torch.float32, device)
    slots = torch.arange(rows, device=device).int() % 3
    x[slots == 0] = torch.nan
    got, wanted = (torch.full((rows, 50), torch.nan, device=device) for _ in range(2))
    TRITON.logits(Normed(x), ours(weight), slots, 5.0, got)
    REFERENCE.logits(Normed(x), weight, slots, 5.0, wanted)
    assert (got[slots == 0] == 0).all()
    assert close(got, wanted, unlike(FORMATS[name], torch.float32))


@pytest.mark.parametrize("code", ["uint4", "uint8", "mxfp4", "float8"])
def test_every_code_is_decoded_exactly(device, half, code):
    """In each type that rows may have: by a row of one 1, and as the weight is unpacked."""
    is_mxfp4 = code == "mxfp4"
    format = MXFP4 if is_mxfp4 else WeightFormat(code, 64, 3 if code.startswith("u") else 0)
    codes = torch.arange(64 * 64).view(64, 64) % (1 << format.bits)
    if code == "float8":
        codes[codes & 127 == 127] = 0  # NaN, which a checkpoint may not have
    scales = torch.full((64, format.num_groups(64)), 130 if is_mxfp4 else 0.5)
    scales = scales.to(format.scale_dtype)
    rows = QuantizedRows(codes.to(torch.uint8), scales)
    wanted = dequantise(rows, format)
    packed = {field: tensor.to(device) for field, tensor in pack_rows(rows, format).items()}
    for dtype in (torch.float32, half):
        weight = QuantizedWeight(**packed, bias=None, out_features=64, in_features=64,
                                 dtype=dtype, format=format)  # fmt: skip
        ones = torch.eye(64, device=device).to(dtype)
        assert torch.equal(TRITON.linear(Normed(ones), ours(weight)).cpu().float(), wanted.t())
        assert torch.equal(linear_quantized.unpack(ours(weight), dtype).cpu().float(), wanted)


def test_powers_of_two_that_scale(device):
    """The least is no normal float32; experts that no token chooses may have none at all."""
    scales = torch.tensor([[0], [1], [254]]).to(torch.uint8)
    rows = QuantizedRows(torch.full((3, 32), 1).to(torch.uint8), scales)
    packed = {field: tensor.to(device) for field, tensor in pack_rows(rows, MXFP4).items()}
    weight = QuantizedWeight(**packed, bias=None, out_features=3, in_features=32,
                             dtype=torch.float32, format=MXFP4)  # fmt: skip
    got = linear_quantized.unpack(ours(weight), torch.float32).cpu()
    assert torch.equal(got, dequantise(rows, MXFP4)) and got[0, 0] > 0


@pytest.mark.parametrize("format", FLOAT8_INPUTS.values(), ids=FLOAT8_INPUTS)
@pytest.mark.parametrize("size", [40, 261])
def test_rounding_equals_the_definition(device, half, format, size):
    """To the bit: halves between two codes, subnormal codes, zeros, and values beyond all codes."""
    weight = weight_of(format, 4, size, device=device)
    x = torch.randn(6, size) * torch.tensor([1, 1e-3, 1e3, 1e-9, 1, 1])[:, None]
    x[1], x[4] = 0, (torch.arange(size) % 64 - 32) / 64 * 4.48
    x[5, 3] = torch.nan
    for dtype in (torch.float32, half, torch.bfloat16):
        moved = surrounded(x.to(dtype), device)
        wanted = quantized.round_input(moved, weight)
        codes, scales = round_input(Normed(moved), weight)
        assert codes.dtype is torch.uint8 and scales.shape[1] == 6
        each = scales.t().repeat_interleave(-(-size // len(scales)), dim=1)
        if len(scales) > 1:
            each = scales.t().repeat_interleave(format.group, dim=1)
        got = codes.view(FLOAT8).float() * each[:, :size]
        assert torch.equal(got[:5], wanted[:5])
        if not (INTERPRETED and format.activations == "float8_static"):  # it has no code for NaN
            assert got[5].isnan().equal(wanted[5].isnan())
        got, near = rounded(Normed(moved), weight)[:5], wanted[:5].to(dtype)
        if INTERPRETED and dtype is torch.bfloat16:  # to which it does not round, it cuts
            assert torch.allclose(got, near, rtol=2**-7)
        else:
            assert torch.equal(got, near)


@pytest.mark.parametrize("name", ["fp8 by row", "fp8 by group"])
def test_a_late_norm_is_applied_before_rounding(device, half, name):
    weight = weight_of(FORMATS[name], 4, 261, device=device)
    for dtype in (torch.float32, half):
        x = late(torch.randn(5, 261, device=device).to(dtype))
        codes, scales = round_input(x, weight)
        wanted, wanted_scales = round_input(Normed(apply_norm(x)), weight)
        if INTERPRETED:
            assert torch.equal(codes, wanted) and torch.equal(scales, wanted_scales)
        else:  # a norm differs in its last bit, which moves some numbers to the next code
            assert (codes != wanted).float().mean() < 0.02
            assert torch.allclose(scales, wanted_scales, rtol=1e-2 if dtype is half else 1e-6)


def test_a_broken_row_does_not_change_others(device, half):
    for name in ("int4 of 128", "mxfp4", "fp8 by row", "fp8 by group"):
        weight = weight_of(FORMATS[name], 40, 160, device=device, dtype=half)
        x = rows_of(5, 160, half, device)
        wanted = TRITON.linear(Normed(x), ours(weight))
        x[2, 7] = torch.nan
        got = TRITON.linear(Normed(x), ours(weight))
        others = [0, 1, 3, 4]
        assert torch.equal(got[others], wanted[others]) and got[2].isnan().all(), name


def test_weights_side_by_side(device):
    """Parts of several formats, which write into columns of one result."""
    of = {"device": device}
    dense = DenseWeight(torch.randn(14, 100, device=device), torch.randn(14, device=device), 14)
    joined = JoinedWeight(
        (weight_of(FORMATS["int4 of 32"], 30, 100, **of), dense,
         weight_of(FORMATS["fp8 by row"], 20, 100, **of)), 64,
    )  # fmt: skip
    far = unlike(FORMATS["fp8 by row"], torch.float32)
    for rows in (3, 260):
        x = Normed(rows_of(rows, 100, torch.float32, device))
        assert close(TRITON.linear(x, ours(joined)), REFERENCE.linear(x, joined), far)
    gated = TRITON.linear_gated(x, ours(joined), "silu")
    wanted = REFERENCE.linear_gated(x, joined, "silu")
    assert close(gated.x, wanted.x, far)
    before = torch.randn(260, 64, device=device)
    norms = ResidualNorms(None, torch.randn(64, device=device), EPS)
    got = TRITON.linear_add_norm(x, ours(joined), before.clone(), norms)
    wanted, wanted_normed = REFERENCE.linear_add_norm(x, joined, before, norms)
    assert close(got[0], wanted, far)
    assert close(apply_norm(got[1]), wanted_normed.x, far)
    bare = JoinedWeight(tuple(part._replace(bias=None) for part in joined.parts), 64)
    slots = torch.arange(260, device=device).int() % 3
    outs = [torch.full((260, 64), torch.nan, device=device) for _ in range(2)]
    TRITON.logits(x, ours(bare), slots, None, outs[0])
    REFERENCE.logits(x, bare, slots, None, outs[1])
    assert close(*outs, far)


@pytest.mark.parametrize("name", ["int4 of 64, offsets", "mxfp4", "fp8 of rows"])
def test_embeddings(device, half, name):
    tokens = Tokens(*(torch.tensor(v, device=device).int() for v in ([0, 2, 1, 2], [0, 5, 9, 6])))
    table = torch.zeros(3, 10, dtype=torch.int32, device=device)
    table[1, 9], table[2, 5], table[2, 6] = 7, 3, 11
    weight = weight_of(FORMATS[name], 12, 75, device=device, dtype=half, bias=False)
    ids = torch.tensor([11, 0, 3], device=device).int()
    assert close(TRITON.embed_ids(ids, ours(weight)), REFERENCE.embed_ids(ids, weight))
    norm = torch.randn(75, device=device).to(half)
    for scale, with_norm in ((1.0, None), (3.5, norm)):
        got, normed = TRITON.embed(tokens, table, ours(weight), scale, with_norm, EPS)
        wanted, wanted_normed = REFERENCE.embed(tokens, table, weight, scale, with_norm, EPS)
        assert close(got, wanted) and close(apply_norm(normed), wanted_normed.x)
    hidden = torch.randn(4, 75, device=device).to(half)
    norms = PairNorms(norm, None, EPS)
    got = TRITON.embed_pair(tokens, table, ours(weight), hidden, norms)
    assert close(got, REFERENCE.embed_pair(tokens, table, weight, hidden, norms))


EXPERTS = ["int4 of 128", "int4 of 32, offsets", "int4, scattered", "mxfp4", "fp8 by group",
           "fp8, static"]  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_experts(device, half, name):
    check_experts(FORMATS[name], FORMATS[name], device, half)


def test_experts_of_several_formats(device, half):
    """Gates in one format, values in another or in none, and each with its part of the biases."""
    for joined in ((FORMATS["int4 of 32"], None), (None, MXFP4)):
        check_experts(joined, FORMATS["fp8 of rows"], device, half)


def check_experts(gate_up, down, device, half) -> None:
    """Some tokens are padding, expert 1 is not chosen, and expert 2 has more than a block."""
    hidden, inner, num, tokens = 170, 24, 4, 30
    shape = Experts(num, 2, inner, "clamped_silu", scores="softmax_of_chosen")
    chosen = torch.stack([torch.tensor([2, 3 * (i % 2)]) for i in range(tokens)])
    chosen[::4] = num
    for dtype in (torch.float32, half):
        bias = torch.randn(num, 2 * inner, device=device).to(dtype)
        if isinstance(gate_up, tuple):
            parts = []
            for i, format in enumerate(gate_up):
                its = bias[:, i * inner : (i + 1) * inner]
                data = (torch.randn(num, inner, hidden, device=device) * hidden**-0.5).to(dtype)
                part = DenseWeight(data, its, inner)
                if format is not None:
                    part = weight_of(format, num, inner, hidden, device=device, dtype=dtype)
                parts.append(part._replace(bias=its))
            up = JoinedWeight(tuple(parts), 2 * inner)
        else:
            up = weight_of(gate_up, num, 2 * inner, hidden, device=device, dtype=dtype)
            up.scales[1] = 255 if gate_up is MXFP4 else torch.nan
        fewer = replace(down, groups=2) if down.is_scattered else down
        its_down = weight_of(fewer, num, hidden, inner, device=device, dtype=dtype)
        weights = ExpertWeights(None, None, up, its_down)
        fast = weights._replace(gate_up=ours(up), down=ours(its_down))
        x = rows_of(tokens, hidden, dtype, device)
        x[::4] = torch.nan
        routed = Routed(x, torch.rand(tokens, 2, device=device), chosen.int().to(device))
        made = []
        for kernels, its in ((TRITON, fast), (REFERENCE, weights)):
            starts = torch.full((num + 1,), -1, dtype=torch.int32, device=device)
            made.append((kernels.experts(routed, its, shape, starts), starts))
        (got, starts), (wanted, wanted_starts) = made
        # the inner rows are rounded twice, and 1 in 20 may become another number of float8
        limit = 2e-5 if dtype is torch.float32 and down.activations == "plain" else 2e-2
        assert torch.equal(starts, wanted_starts)
        assert (got[::4] == 0).all() and close(got, wanted, limit), dtype


@each_format
def test_tiles_cover_a_weight_once(format):
    for rows, out, inner in itertools.product((1, 16, 17, 64, 65, 256, 4000), (48, 6144, 28672),
                                              (48, 1152, 4096, 28672)):  # fmt: skip
        for dtype in (torch.bfloat16, torch.float32):
            tile = tile_for(rows, out, format, inner, dtype)
            assert (tile.shares - 1) * tile.share < inner <= tile.shares * tile.share
            assert tile.shares == 1 or tile.share % tile.depth == 0
            if tile.by_sums and format.num_groups(inner) > 1:
                assert format.group % tile.depth == 0
            if tiles_quantized.multiplies_float8(format, inner):
                assert tile.by_sums and tile.depth >= tiles_quantized.LEAST_FLOAT8
            if dtype is torch.bfloat16:
                step = tile.rows * 2 + tile.features * format.bits // 8
                assert step * tile.stages * tile.depth <= 227 << 10


@pytest.mark.skipif(INTERPRETED, reason="cuBLAS multiplies codes on a card only")
@pytest.mark.parametrize("name", ["fp8 by row", "fp8, static"])
@pytest.mark.parametrize("shape", [(96, 256), (72, 250)])
def test_float8_products_of_the_library(device, name, shape):
    weight = weight_of(FORMATS[name], *shape, device=device, dtype=torch.bfloat16)
    for rows in (65, 300):
        x = Normed(rows_of(rows, shape[1], torch.bfloat16, device))
        if is_aligned := shape == (96, 256):
            assert library.takes_float8(operands(x, weight), x.x.new_empty(rows, 96))
        assert multiplies_float8(weight) == is_aligned
        assert close(TRITON.linear(x, ours(weight)), REFERENCE.linear(x, weight))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *itertools.product(("fp8 by row", "fp8 by group"), (1, 40, 130)),
        ("fp8 by group of 32", 70),
        ("fp8, static", 5),
    ],
)
def test_every_tile_of_float8_products(device, half, monkeypatch, name, rows):
    """With every epilogue; features that no tile divides; and the last tiles split."""
    num_out, inner = (72 if rows == 1 else 136, 528) if INTERPRETED else (208, 1104)
    if INTERPRETED:
        monkeypatch.setattr(linear_tma, "LEAST_SHARE", 256)  # so that the shorter rows are split
    weight = weight_of(FORMATS[name], num_out, inner, device=device, dtype=half)
    assert multiplies_float8(weight)
    x = late(rows_of(rows, inner, half, device))
    normed = Normed(apply_norm(x))
    wanted = REFERENCE.linear(normed, weight)
    slots = (torch.arange(rows, device=device).int() + 1) % 3
    given = operands(x, weight)
    before = torch.randn(rows, num_out, device=device).to(half)
    norms = ResidualNorms(None, torch.randn(num_out, device=device).to(half), EPS)
    sums, sums_normed = REFERENCE.linear_add_norm(normed, weight, before, norms)
    for tile in distinct(float8_tiles_for(rows, "linear", given.group)):
        out = torch.full((rows, num_out), torch.nan, device=device).to(half)
        linear(given, out, tile, slots=slots)
        assert (out[slots == 0] == 0).all(), tile
        assert close(out, wanted * (slots > 0)[:, None]), tile
        residual = before.clone()
        made = linear_add(given, residual, norms, tile)
        assert close(residual, sums) and close(apply_norm(made), sums_normed.x), tile
    for tile in distinct(float8_tiles_for(rows, "gated", given.group)):
        out = before.new_full((rows, num_out // 2), torch.nan)
        got = linear(given, out, tile, activation="silu")
        assert close(got, REFERENCE.linear_gated(normed, weight, "silu").x), tile
    assert not linear_tma.arrivals().any()


@pytest.mark.parametrize("size", [104, 1030])
def test_rows_rounded_by_the_kernel_before(device, half, size):
    weight = weight_of(FORMATS["fp8 by row"], 16, size, device=device, dtype=half)
    gates, values = rows_of(7, 2 * size, half, device).chunk(2, -1)
    norms = ResidualNorms(None, torch.randn(size, device=device).to(half), EPS)
    for made in (
        gate_float8(gates, values, "silu"),
        add_norm(gates.clone(), values.contiguous(), norms, late=False, rounds=True),
    ):
        codes, scales = round_input(Normed(made.x), weight)
        assert torch.equal(made.float8.codes.view(torch.uint8), codes)
        assert torch.equal(made.float8.scales, scales)
    assert torch.equal(gate_float8(gates, values, "silu").x, gate(gates, values, "silu"))


@pytest.mark.skipif(INTERPRETED, reason="a graph is captured on a card only")
@each_format
def test_a_captured_product_equals_an_eager_one(device, format):
    weight = ours(weight_of(format, 96, 256, device=device, dtype=torch.bfloat16))
    for rows in (1, 65, 300):
        x = Normed(rows_of(rows, 256, torch.bfloat16, device))
        wanted = TRITON.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = TRITON.linear(x, weight)
        graph.replay()
        assert torch.equal(got, wanted)
