"""Static scales of experts' inputs: one for all experts of a layer, on any number of ranks."""

from collections.abc import Iterator, Mapping

import pytest
import torch
from memory_source import PackedCheckpoint, load
from torch import Tensor

from slotzero.checkpoint.tiny import tiny_checkpoint
from slotzero.distributed.ranks import Ranks
from slotzero.quantization.method import is_layer_linear

MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}


@pytest.fixture
def checkpoint() -> PackedCheckpoint:
    """A model with 8 experts and a shared one, whose inputs all have different scales."""
    scales = iter(torch.rand(1000, generator=torch.Generator().manual_seed(0)) + 0.1)

    def pack(shape: tuple[int, ...]) -> Mapping[str, Tensor]:
        return {
            ".weight": torch.ones(shape).to(torch.float8_e4m3fn),
            ".weight_scale": torch.tensor(1.0),
            ".input_scale": next(scales),
        }

    def chosen(module: str) -> bool:
        return is_layer_linear(module) and not module.endswith("bias")

    return PackedCheckpoint(tiny_checkpoint("tiny:deepseek-v3"), MODELOPT, chosen, pack)


def largest(checkpoint: PackedCheckpoint, layer: int, *projections: str) -> Tensor:
    def scales() -> Iterator[Tensor]:
        for name, tensor in checkpoint.tensors.items():
            is_expert = f"layers.{layer}.mlp." in name and "expert" in name
            if is_expert and name.endswith(tuple(f"{p}.input_scale" for p in projections)):
                yield tensor

    found = list(scales())
    assert len(found) == 9 * len(projections)
    return torch.stack(found).amax()


@pytest.mark.parametrize("size", [1, 2, 4])
def test_experts_on_all_ranks_share_the_largest_scale(
    checkpoint: PackedCheckpoint, size: int
) -> None:
    for rank in range(size):
        registry = load(checkpoint, Ranks(rank, size, expert_parallel=True, dp_attention=True))
        assert len(registry["weight.moe.down.codes"][0]) == 8 // size + 1
        for field, projections in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
            held = registry[f"weight.moe.{field}.input_scale"]
            expected = [largest(checkpoint, layer, *projections) for layer in (1, 2)]
            assert torch.equal(held.flatten(), torch.stack(expected))
