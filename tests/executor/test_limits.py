"""Choices that depend on the device."""

import pytest
import torch

from slotzero.checkpoint.tiny import tiny_configs
from slotzero.executor.limits import unpack_if_faster
from slotzero.models.families.family import parse_config


@pytest.mark.parametrize(
    ("device", "dtype", "wanted", "unpacks"),
    [
        ("cuda", torch.float32, "auto", True),
        ("cuda", torch.float16, "auto", False),
        ("cpu", torch.float32, "auto", False),
        ("cuda", torch.float32, "int4", False),
    ],
)
def test_float32_on_a_gpu_unpacks_a_gguf_file(
    device: str, dtype: torch.dtype, wanted: str, unpacks: bool
) -> None:
    config = tiny_configs()["llama"]
    types = {"quant_method": "gguf", "types": {"lm_head": "Q8_0"}}
    packed = parse_config({**config, "quantization_config": types})
    chosen = unpack_if_faster(packed, wanted, torch.device(device), dtype)
    assert chosen.quantization.unpacks == unpacks
    plain = parse_config(config)
    assert unpack_if_faster(plain, wanted, torch.device(device), dtype) is plain
