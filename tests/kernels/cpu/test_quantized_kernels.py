"""C++ products of quantised weights.

Products in integers equal the slow definition, exactly where float32 is exact. Others equal, to the
bit, those of the numbers that the codes stand for.
"""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slotzero.kernels.cpu.kernels import CpuKernels, chunk_of, is_integer
from slotzero.kernels.quantized import (
    FLOAT8,
    QuantizedRows,
    dequantise,
    integer_product,
    quantise,
    round_input,
    select_expert,
)
from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.weights import DenseWeight, QuantizedWeight, WeightFormat
from slotzero.quantization.gguf import BLOCK_FORMATS

REFERENCE = ReferenceKernels()
FORMATS = {
    "uint4": WeightFormat("uint4", 32, 8),
    "uint4, whole rows": WeightFormat("uint4", None, 8),
    "uint4, offsets": WeightFormat("uint4", 16, has_offsets=True),
    "uint8": WeightFormat("uint8", 32, 128),
    "uint8, offsets": WeightFormat("uint8", 64, has_offsets=True, scale_dtype=torch.float16),
    "fp8": WeightFormat("float8", None, activations="float8_row"),
    "fp8, groups": WeightFormat("float8", 128, activations="float8_group"),
    "fp8, static": WeightFormat("float8", None, activations="float8_static"),
    "mxfp4": WeightFormat("mxfp4", 32, scale_dtype=torch.uint8),
    "scattered": WeightFormat("uint4", 32, 8, is_scattered=True),
    "Q4_1": BLOCK_FORMATS["Q4_1"].format,
    "Q6_K": BLOCK_FORMATS["Q6_K"].format,
}
ROWS = 1, 2, 3, 4, 5, 33, 70


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels()


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_of(format: WeightFormat, *shape: int, seed: int = 0) -> QuantizedRows:
    rows, columns = quantise(values(*shape, seed=seed), format), shape[-1]
    if format.is_scattered:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))
        group_of = (order // format.group).int().expand(*shape[:-2], columns).contiguous()
        rows = rows._replace(group_of=group_of)
    if format.activations == "float8_static":
        rows = rows._replace(input_scale=torch.tensor([0.01]))
    return rows


def weight_of(
    kernels: CpuKernels | ReferenceKernels,
    rows: QuantizedRows,
    format: WeightFormat,
    bias: Tensor | None,
) -> QuantizedWeight:
    out_features, in_features = rows.codes.shape[-2:]
    tensors = kernels.pack_quantized(rows, format)
    for field, (shape, dtype) in kernels.quantized_shapes(
        out_features, in_features, format
    ).items():
        assert tensors[field].shape[-len(shape) :] == shape
        assert tensors[field].dtype is dtype
    return QuantizedWeight(
        **tensors,
        bias=bias,
        out_features=out_features,
        in_features=in_features,
        dtype=torch.float32,
        format=format,
    )


def numbers_of(rows: QuantizedRows, format: WeightFormat) -> Tensor:
    if rows.group_of is None or rows.codes.ndim == 2:
        return dequantise(rows, format)
    parts = [rows._replace(codes=c, scales=s, group_of=g)
             for c, s, g in zip(rows.codes, rows.scales, rows.group_of, strict=True)]  # fmt: skip
    return torch.stack([dequantise(part, format) for part in parts])


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("out_features", "in_features"), [(37, 80), (16, 128), (50, 200)])
def test_products(kernels: CpuKernels, name: str, out_features: int, in_features: int) -> None:
    format = FORMATS[name]
    rows, bias = rows_of(format, out_features, in_features), values(out_features, seed=1)
    ours, plain = (weight_of(k, rows, format, bias) for k in (kernels, REFERENCE))
    dense = DenseWeight(kernels.pack(numbers_of(rows, format)), bias, out_features)
    for num in ROWS:
        x = values(num, in_features, seed=num)
        rounded = kernels.round_input(x, ours)
        assert torch.equal(rounded, round_input(x, ours))
        made = kernels.product(x, ours)
        if is_integer(format):
            expected = integer_product(x, rows, format, chunk_of(format)) + bias
            torch.testing.assert_close(made, expected, atol=2e-4, rtol=2e-5)
            continue
        assert torch.equal(made, kernels.dense_product(rounded, dense))
        torch.testing.assert_close(made, REFERENCE.product(x, plain), atol=1e-3, rtol=1e-4)


def whole_activations(rows: int, columns: int) -> Tensor:
    """Return activations that 8 bits hold exactly: a chunk's largest size is 127."""
    draw = torch.Generator().manual_seed(rows)
    x = torch.randint(-127, 128, (rows, columns), generator=draw).float()
    x[:, ::16] = 127.0 * torch.where(x[:, ::16] < 0, -1.0, 1.0)
    return x


@pytest.mark.parametrize("name", [name for name in FORMATS if is_integer(FORMATS[name])])
@pytest.mark.parametrize("in_features", [96, 208])
def test_integer_arithmetic_is_exact(kernels: CpuKernels, name: str, in_features: int) -> None:
    """All numbers are integers below 2**24: every instruction set gives the exact product. The
    rows are a matrix tile and the remainders."""
    format, out_features = FORMATS[name], 37
    groups = format.num_groups(in_features)
    draw = torch.Generator().manual_seed(1)
    top = (1 << format.bits) - 1
    codes = torch.randint(0, top + 1, (out_features, in_features), generator=draw)
    codes[:3], codes[3:5] = top, 0
    offsets = torch.randint(-4, 5, (out_features, groups), generator=draw).float()
    scales = torch.ones(out_features, groups)
    scales[:, ::2] = 2.0
    rows = QuantizedRows(codes.to(torch.uint8), scales, offsets if format.has_offsets else None)
    weight = weight_of(kernels, rows, format, None)
    for num in (1, 2, 3, 7, 16, 37):
        x = whole_activations(num, in_features)
        expected = x.double() @ dequantise(rows, format).double().T
        assert expected.abs().max() < 1 << 24
        assert torch.equal(kernels.product(x, weight).double(), expected)


def test_activations_that_are_not_finite(kernels: CpuKernels) -> None:
    """They spoil their own row; tiny and zero ones give zeros."""
    format = FORMATS["uint8"]
    weight = weight_of(kernels, rows_of(format, 16, 64), format, None)
    x = values(5, 64)
    expected = kernels.product(x, weight)
    x[1, 40], x[2, 3], x[3], x[4] = torch.nan, torch.inf, 1e-40, 0.0
    made = kernels.product(x, weight)
    assert torch.equal(made[0], expected[0])
    assert made[1:3].isnan().all()
    assert (made[3:] == 0).all()


@pytest.mark.parametrize("name", FORMATS)
def test_experts(kernels: CpuKernels, name: str) -> None:
    format, (num, out_features, in_features) = FORMATS[name], (5, 37, 64)
    rows, bias = rows_of(format, num, out_features, in_features), values(num, out_features, seed=1)
    weights = weight_of(kernels, rows, format, bias)
    starts = torch.tensor([0, 3, 3, 12, 50, 51], dtype=torch.int32)
    x = values(55, in_features, seed=2)
    made = kernels.grouped_product(x, weights, starts)
    for expert in range(num):
        first, last = int(starts[expert]), int(starts[expert + 1])
        one = select_expert(weights, expert)
        assert torch.equal(made[first:last], kernels.product(x[first:last], one))
    assert (made[51:] == 0).all()


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "scattered"])
def test_embeddings(kernels: CpuKernels, name: str) -> None:
    format = FORMATS[name]
    rows = rows_of(format, 70, 96)
    ours, plain = (weight_of(k, rows, format, None) for k in (kernels, REFERENCE))
    ids = torch.tensor([0, 69, 15, 16, 16, 7, 8])
    expected = dequantise(rows, format)[ids]
    assert torch.equal(kernels.embed_ids(ids, ours), expected)
    assert torch.equal(REFERENCE.embed_ids(ids, plain), expected)


@pytest.mark.parametrize("codes", ["float8", "mxfp4"])
def test_every_code(kernels: CpuKernels, codes: str) -> None:
    """All codes that are numbers, zeros of both signs and the smallest ones included."""
    every = torch.arange(256 if codes == "float8" else 16, dtype=torch.uint8)
    if codes == "float8":
        every = every[every.view(FLOAT8).float().isfinite()]
    scales = torch.ones(len(every), 1)
    format = WeightFormat("float8") if codes == "float8" else FORMATS["mxfp4"]
    if codes == "mxfp4":
        scales = torch.full((16, 1), 127, dtype=torch.uint8)
    rows = QuantizedRows(every[:, None].expand(-1, 32).contiguous(), scales)
    weight, x = weight_of(kernels, rows, format, None), torch.zeros(1, 32)
    x[0, 3] = 1.0
    assert torch.equal(kernels.product(x, weight)[0], dequantise(rows, format)[:, 3])


def test_values_between_two_codes_are_rounded_to_even(kernels: CpuKernels) -> None:
    steps = torch.arange(256, dtype=torch.uint8).view(FLOAT8).float()
    numbers = steps[steps.isfinite()].sort().values
    middles = (numbers[1:] + numbers[:-1]) / 2
    x = torch.cat((numbers, middles, torch.tensor([448.0])))[None]
    format = WeightFormat("float8", activations="float8_row")
    weight = weight_of(kernels, rows_of(format, 16, x.shape[1]), format, None)
    assert torch.equal(kernels.round_input(x, weight), round_input(x, weight))
    assert torch.equal(kernels.round_input(0 * x, weight), 0 * x)
    x[0, 5] = torch.nan
    assert kernels.round_input(x, weight).isnan().all()


def test_tensors_that_do_not_fit_are_refused(kernels: CpuKernels) -> None:
    format = FORMATS["mxfp4"]
    weight = weight_of(kernels, rows_of(format, 32, 64), format, None)
    x = values(2, 64)
    for wrong, message in (
        ({"codes": weight.codes[:, :4]}, "must be contiguous"),
        ({"codes": weight.codes.int()}, "uint8"),
        ({"scales": weight.scales[:, :1].contiguous()}, "groups do not fit"),
        ({"out_features": 50}, "does not fit x and out"),
    ):
        with pytest.raises(RuntimeError, match=message):
            kernels.product(x, weight._replace(**wrong))


def test_integer_products_check_their_tensors(kernels: CpuKernels) -> None:
    format = FORMATS["Q4_1"]
    weight = weight_of(kernels, rows_of(format, 32, 64), format, values(32))
    assert weight.bias is not None and weight.offsets is not None
    x, wide = values(2, 64), values(2, 128)
    for wrong, given, message in (
        ({"codes": weight.codes[:, :4]}, x, "codes must be contiguous"),
        ({"codes": weight.codes.int()}, x, "codes must be uint8"),
        ({"codes": weight.codes[None]}, x, "codes must have 3 axes"),
        ({"scales": weight.scales[:, :1].contiguous()}, x, "scales has the wrong shape"),
        ({"scales": weight.scales.double()}, x, "scales must be float32"),
        ({"offsets": weight.offsets[:1].contiguous()}, x, "offsets has the wrong shape"),
        ({"bias": weight.bias.double()}, x, "bias must be float32"),
        ({"bias": weight.bias[:16]}, x, "bias has the wrong shape"),
        ({"out_features": 50}, x, "codes has the wrong shape"),
        ({}, x.double(), "x must be float32"),
        ({}, wide[:, ::2], "x must be contiguous"),
        ({}, wide, "codes has the wrong shape"),
        ({}, x[0], "x and out must have two axes"),
    ):
        with pytest.raises(RuntimeError, match=f"integer: {message}"):
            torch.ops.slotzero.integer(
                given, *_tensors(weight._replace(**wrong)), 4, 0, 32,
                torch.empty(len(given), wrong.get("out_features", 32)),
            )  # fmt: skip
    call = torch.ops.slotzero.integer
    for number, message in (
        ((3, 0, 32), "4 or 8 bits"),
        ((4, 16, 32), "zero must be a code"),
        ((4, 0, 8), "a multiple of 16"),
        ((4, 0, 0), "groups of them"),
    ):
        with pytest.raises(RuntimeError, match=message):
            call(x, *_tensors(weight), *number, torch.empty(2, 32))
    with pytest.raises(RuntimeError, match="starts has the wrong shape"):
        experts = (None if t is None else t[None] for t in _tensors(weight))
        starts = torch.zeros(1, dtype=torch.int32)
        torch.ops.slotzero.integer_grouped(x, *experts, starts, 4, 0, 32, torch.empty(2, 32))
    with pytest.raises(RuntimeError, match="ids must be int32"):
        rows = weight.codes, weight.scales, weight.offsets, 4, 0, 32, 32, torch.empty(2, 64)
        torch.ops.slotzero.integer_rows(torch.zeros(2), *rows)
    with pytest.raises(RuntimeError, match="out does not fit the codes"):
        codes = torch.zeros(2, 32, 64, dtype=torch.uint8)
        torch.ops.slotzero.pack_integer(codes, 4, weight.codes[None])


def _tensors(weight: QuantizedWeight) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    return weight.codes, weight.scales, weight.offsets, weight.bias


class LargestFloats(TorchDispatchMode):
    """Records the size of the largest tensor of floats that is computed."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.is_floating_point() and not out._is_view():
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "scattered"])
def test_experts_are_rounded_one_after_the_other(name: str) -> None:
    """All at once, the numbers in between would take ten times the memory of the weights."""
    experts = values(6, 48, 256)
    with LargestFloats() as seen:
        rows = quantise(experts, FORMATS[name])
    assert seen.numel <= experts[0].numel()
    for i, expert in enumerate(experts):
        one = quantise(expert, FORMATS[name])
        for field in ("codes", "scales", "offsets"):
            whole, part = getattr(rows, field), getattr(one, field)
            assert part is whole is None or torch.equal(whole[i], part)
