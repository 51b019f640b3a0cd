"""Lists of modules in quantization_config: what they name, and how long it takes to ask."""

import time

import pytest

from slotzero.quantization.compressed_tensors import CompressedTensorsMethod
from slotzero.quantization.fp8 import Fp8Method
from slotzero.quantization.method import Method, matches

MODULE = "model.layers.1.mlp.up_proj"


@pytest.mark.parametrize(
    "pattern",
    [
        MODULE,
        "model.layers.1.",
        "mlp.up_proj",
        "up_proj",
        "language_model.model.layers.1",
        "re:.*up_proj$",
        "model.layers.1*",
        "*.mlp",
    ],
)
def test_patterns_that_fit(pattern: str) -> None:
    assert matches(MODULE, ("lm_head", pattern))


@pytest.mark.parametrize(
    "pattern", ["", ".", "up", "layers.11", "1.up_proj", "re:up_proj", "mlp*", "self_attn.up_proj"]
)
def test_patterns_that_do_not_fit(pattern: str) -> None:
    assert not matches(MODULE, ("lm_head", pattern))


def method_of(name: str, ignored: list[str]) -> Method:
    if name == "fp8":
        given = {"weight_block_size": [128, 128], "modules_to_not_convert": ignored}
        return Fp8Method.parse({"quantization_config": given})
    weights = {"type": "float", "num_bits": 8, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    given = {"format": "float-quantized", "config_groups": groups, "ignore": ignored}
    return CompressedTensorsMethod.parse({"quantization_config": given})


@pytest.mark.parametrize("name", ["fp8", "compressed-tensors"])
def test_many_experts_and_many_ignored_modules_take_little_time(name: str) -> None:
    """Trying every name on every module took half a minute for 48 layers of 512 experts."""
    ignored = [f"model.layers.{i}.{part}" for i in range(60) for part in "abcdefgh"]
    method, start = method_of(name, ignored), time.process_time()
    for expert in range(20_000):
        assert method.format_of(f"model.layers.7.mlp.experts.{expert}.up_proj") is not None
    assert method.format_of("model.layers.7.a") is None
    assert time.process_time() - start < 3
