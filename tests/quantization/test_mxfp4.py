"""MXFP4: the joint experts of gpt-oss are read as transformers reads them."""

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from slotzero.errors import CorruptCheckpointError
from slotzero.kernels.quantized import QuantizedRows, dequantise
from slotzero.quantization.method import WeightPart
from slotzero.quantization.mxfp4 import FORMAT, Mxfp4Method

MODULE = "model.layers.0.mlp.experts.gate_up_proj"
EXPERTS, ROWS, COLUMNS = 4, 12, 96
METHOD = Mxfp4Method()


class Source:
    name = "memory"

    def __init__(self, blocks: Tensor, scales: Tensor) -> None:
        self.tensors = {f"{MODULE}_blocks": blocks, f"{MODULE}_scales": scales}

    def names(self) -> list[str]:
        return list(self.tensors)

    def read(self, name: str) -> Tensor:
        raise AssertionError("only the wanted part is to be read")

    def read_part(self, name: str, *wanted: slice) -> tuple[Tensor, tuple[int, ...]]:
        tensor = self.tensors[name]
        return tensor[wanted] if tensor.ndim == len(wanted) else tensor[:0], tuple(tensor.shape)


def random_tensors() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = EXPERTS, ROWS, COLUMNS // 32
    blocks = torch.randint(0, 256, (*shape, 16), generator=generator).to(torch.uint8)
    scales = torch.randint(100, 140, shape, generator=generator).to(torch.uint8)
    return blocks, scales


def read(blocks: Tensor, scales: Tensor, part: WeightPart | None = None) -> QuantizedRows:
    whole = WeightPart(slice(None), (ROWS, COLUMNS), slice(None), EXPERTS)
    return METHOD.read(Source(blocks, scales), MODULE, part or whole)


def test_numbers_are_those_of_transformers() -> None:
    blocks, scales = random_tensors()
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(dequantise(read(blocks, scales), FORMAT), expected)


@pytest.mark.parametrize("experts", [slice(0, 1), slice(1, 3)])
@pytest.mark.parametrize("rows", [slice(0, 4), slice(5, 12)])
def test_parts_agree_with_the_whole(experts: slice, rows: slice) -> None:
    blocks, scales = random_tensors()
    part = WeightPart(rows, (ROWS, COLUMNS), experts, EXPERTS)
    whole, some = read(blocks, scales), read(blocks, scales, part)
    assert torch.equal(some.codes, whole.codes[experts, rows])
    assert torch.equal(some.scales, whole.scales[experts, rows])


def test_only_experts_are_packed() -> None:
    given = {"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.1.mlp"]}
    method = Mxfp4Method.parse({"quantization_config": given})
    assert method.format_of(MODULE) == FORMAT
    assert method.format_of("model.layers.0.mlp.experts.down_proj") == FORMAT
    for plain in ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router", "lm_head",
                  "model.layers.1.mlp.experts.down_proj"):  # fmt: skip
        assert method.format_of(plain) is None
    assert METHOD.tensors(MODULE) == {f"{MODULE}_blocks": True, f"{MODULE}_scales": True}


def test_broken_tensors_are_refused() -> None:
    blocks, scales = random_tensors()
    not_a_number = scales.clone()
    not_a_number[1, 2, 0] = 255
    for wrong, name in (
        ((blocks[..., :8], scales), "blocks has shape"),
        ((blocks[:3], scales), "blocks has shape"),
        ((blocks.int(), scales), "blocks is torch.int32"),
        ((blocks, scales[..., :2]), "scales has shape"),
        ((blocks, scales.float()), "scales is torch.float32"),
        ((blocks, not_a_number), "scales holds a scale that is not a number"),
    ):
        with pytest.raises(CorruptCheckpointError, match=f"tensor {MODULE}_{name}"):
            read(*wrong)
