"""FP8 weights in blocks and with one scale: what is read, and what is refused."""

from typing import Any

import pytest
import torch
from memory_source import MODULE, MemorySource, read_numbers, read_rows
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.quantization.fp8 import Fp8Method
from slotzero.quantization.modelopt import ModelOptMethod

SHAPE = ROWS, COLUMNS = 40, 72
FLOAT8 = torch.float8_e4m3fn


def parse(**given: Any) -> Fp8Method:
    return Fp8Method.parse({"quantization_config": {"quant_method": "fp8", **given}})


def parse_modelopt(**given: Any) -> ModelOptMethod:
    given = {"quant_method": "modelopt", "quant_algo": "FP8", **given}
    return ModelOptMethod.parse({"quantization_config": given})


def random_codes() -> Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(FLOAT8)


def in_blocks() -> MemorySource:
    scales = torch.rand(3, 5, generator=torch.Generator().manual_seed(1))
    return MemorySource({"weight": random_codes(), "weight_scale_inv": scales}, MODULE)


def with_one_scale(**more: Tensor) -> MemorySource:
    tensors = {"weight": random_codes(), "weight_scale": torch.tensor(0.3)}
    return MemorySource(tensors | more, MODULE)


def test_blocks() -> None:
    source, method = in_blocks(), parse(weight_block_size=[16, 16])
    format = method.format_of(MODULE)
    assert format is not None
    assert (format.group, format.activations) == (16, "float8_group")
    scales = source.read(f"{MODULE}.weight_scale_inv")
    each = scales.repeat_interleave(16, 0)[:ROWS].repeat_interleave(16, 1)[:, :COLUMNS]
    assert torch.equal(read_numbers(method, source, SHAPE), random_codes().float() * each)


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_scale(shape: tuple[int, ...]) -> None:
    expected = random_codes().float() * torch.tensor(0.3)
    source = with_one_scale(weight_scale=torch.full(shape, 0.3))
    assert torch.equal(read_numbers(parse(), source, SHAPE), expected)
    source = source.replaced(input_scale=torch.full(shape, 0.25))
    for method in (parse(activation_scheme="static"), parse_modelopt()):
        assert torch.equal(read_numbers(method, source, SHAPE), expected)
        assert read_rows(method, source, SHAPE).input_scale == torch.tensor([0.25])


def test_routers_embeddings_and_ignored_modules_are_not_quantised() -> None:
    for method in (
        parse(modules_to_not_convert=["model.layers.1.mlp"], ignored_layers=["o_proj"]),
        parse_modelopt(ignore=["model.layers.1*"], exclude_modules=["*.o_proj"]),
    ):
        assert method.format_of(MODULE) is not None
        for plain in ("lm_head", "model.embed_tokens", "model.layers.0.mlp.gate",
                      "model.layers.1.mlp.up_proj", "model.layers.0.self_attn.o_proj",
                      "model.layers.61.eh_proj"):  # fmt: skip
            assert method.format_of(plain) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_scheme", "none"),
        ("fmt", "e5m2"),
        ("weight_block_size", [128]),
        ("weight_block_size", [128, 0]),
        ("modules_to_not_convert", "lm_head"),
    ],
)
def test_other_settings_are_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config has {field}="):
        parse(**{field: value})


def test_blocks_with_static_inputs_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="activation_scheme='static'"):
        parse(activation_scheme="static", weight_block_size=[128, 128])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("quant_algo", "NVFP4"),
        ("quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"),
        ("quant_algo", None),
        ("kv_cache_quant_algo", "NVFP4"),
        ("kv_cache_scheme", {"num_bits": 4, "type": "float"}),
        ("exclude_modules", [None]),
    ],
)
def test_other_settings_of_modelopt_are_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config has {field}="):
        parse_modelopt(**{field: value})


def test_cache_of_modelopt() -> None:
    assert not parse_modelopt().kv_cache_scheme
    assert parse_modelopt(kv_cache_quant_algo="FP8").kv_cache_scheme
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    assert parse_modelopt(kv_cache_scheme=scheme).kv_cache_scheme
    nested = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    given = {"quant_method": "modelopt", "quantization": nested}
    method = ModelOptMethod.parse({"quantization_config": given})
    assert method == ModelOptMethod(("lm_head",), kv_cache_scheme=True)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("weight", torch.zeros(ROWS, COLUMNS + 1).to(FLOAT8)),
        ("weight", torch.full(SHAPE, float("nan")).to(FLOAT8)),
        ("weight_scale", torch.ones(2)),
        ("weight_scale", torch.tensor(float("nan"))),
        ("weight_scale", torch.tensor(1)),
        ("input_scale", torch.tensor(0.0)),
        ("input_scale", torch.tensor([1.0, 1.0])),
        ("input_scale", torch.tensor(float("inf"))),
    ],
)
def test_broken_tensors_are_refused(name: str, tensor: Tensor) -> None:
    source = with_one_scale(input_scale=torch.tensor(0.25)).replaced(**{name: tensor})
    with pytest.raises(CorruptCheckpointError, match=f"tensor {MODULE}.{name} "):
        read_rows(parse(activation_scheme="static"), source, SHAPE)


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(CorruptCheckpointError, match=r"up_proj\.weight_scale_inv has shape"):
        read_rows(parse(weight_block_size=[8, 8]), in_blocks(), SHAPE)


def test_a_weight_in_another_type_is_refused() -> None:
    for kind in (torch.bfloat16, torch.float8_e5m2):
        source = with_one_scale(weight=torch.zeros(SHAPE).to(kind))
        with pytest.raises(UnsupportedModelError, match=f"{MODULE}.weight is {kind}"):
            read_rows(parse(), source, SHAPE)
