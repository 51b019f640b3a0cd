"""AWQ: weights packed as AutoAWQ packs them are read exactly."""

from typing import Any

import pytest
import torch
from memory_source import MODULE, MemorySource, read_numbers, read_rows
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.quantization.awq import AwqMethod

ROWS, COLUMNS, GROUP = 48, 128, 32
SHAPE = ROWS, COLUMNS
PLAIN = {"bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}


def parse(**changes: Any) -> AwqMethod:
    given = {"quant_method": "awq", **PLAIN, **changes}
    return AwqMethod.parse({"dtype": "float16", "quantization_config": given})


def pack(codes: Tensor) -> Tensor:
    """Pack codes [length, out] as AutoAWQ does: a word's i-th code is that of ORDER[i]."""
    words = torch.zeros(len(codes), codes.shape[1] // 8, dtype=torch.int64)
    for place, feature in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= codes[:, feature::8].long() << (4 * place)
    return words.to(torch.int32)


def make(group: int = GROUP, has_zeros: bool = True) -> tuple[MemorySource, Tensor]:
    """Return a checkpoint with a random weight, and the weight."""
    generator = torch.Generator().manual_seed(0)
    groups = COLUMNS // group
    codes = torch.randint(0, 16, (COLUMNS, ROWS), generator=generator)
    zeros = torch.full((groups, ROWS), 8)
    if has_zeros:
        zeros = torch.randint(0, 16, (groups, ROWS), generator=generator)
    scales = torch.rand(groups, ROWS, generator=generator).half()
    order = torch.arange(COLUMNS) // group
    numbers = (scales[order].double() * (codes - zeros[order])).float().T
    tensors = {"qweight": pack(codes), "qzeros": pack(zeros), "scales": scales}
    return MemorySource(tensors, MODULE), numbers


@pytest.mark.parametrize("group", [GROUP, -1])
@pytest.mark.parametrize("has_zeros", [True, False])
def test_numbers_are_those_that_were_packed(group: int, has_zeros: bool) -> None:
    source, numbers = make(COLUMNS if group == -1 else group, has_zeros)
    method = parse(group_size=group, zero_point=has_zeros)
    assert torch.equal(read_numbers(method, source, SHAPE), numbers)
    if not has_zeros:
        without = source.replaced(qzeros=None)
        assert torch.equal(read_numbers(method, without, SHAPE), numbers)


def test_modules_may_be_left_out() -> None:
    method = parse(modules_to_not_convert=["self_attn.q_proj", "model.layers.1.", "visual"])
    assert method.format_of("model.layers.0.self_attn.q_proj") is None
    assert method.format_of("model.layers.1.mlp.up_proj") is None
    assert method.format_of("model.layers.10.mlp.up_proj") is not None
    for plain in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"):
        assert method.format_of(plain) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bits", 8),
        ("bits", None),
        ("group_size", -2),
        ("group_size", True),
        ("zero_point", "no"),
        ("version", "gemv"),
        ("version", "marlin"),
        ("checkpoint_format", "gemv_fast"),
        ("backend", "llm-awq"),
        ("modules_to_not_convert", {"a": 1}),
    ],
)
def test_other_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config has {field}="):
        parse(**{field: value})


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("qweight", torch.zeros(COLUMNS, ROWS // 4, dtype=torch.int32)),
        ("qweight", torch.zeros(COLUMNS, ROWS // 8)),
        ("qzeros", torch.zeros(1, ROWS // 8, dtype=torch.int32)),
        ("scales", torch.ones(1, ROWS)),
        ("scales", torch.full((COLUMNS // GROUP, ROWS), float("inf"))),
        ("scales", torch.full((COLUMNS // GROUP, ROWS), 1e6)),
    ],
)
def test_broken_tensors_are_refused(name: str, tensor: Tensor) -> None:
    source, _ = make()
    with pytest.raises(CorruptCheckpointError, match=f"tensor {MODULE}.{name} "):
        read_rows(parse(), source.replaced(**{name: tensor}), SHAPE)


def test_weights_without_zeros_must_have_the_middle_as_zero() -> None:
    source, _ = make(has_zeros=True)
    with pytest.raises(CorruptCheckpointError, match=r"up_proj\.qzeros .* zero_point=false"):
        read_rows(parse(zero_point=False), source, SHAPE)
