"""FP8 weights with one scale per block of 128 by 128 values, the format of DeepSeek-V3.

A tensor NAME in float8 and its scales NAME_scale_inv are presented as one tensor NAME.
"""

from collections.abc import Collection
from typing import final

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.models.checkpoint import Checkpoint, CheckpointView

SCALES = "_scale_inv"
BLOCK = 128


def dequantise(weight: Tensor, scales: Tensor) -> Tensor:
    """Dequantise a weight [rows, columns] in float8, with one scale per block, to bfloat16."""
    rows, columns = weight.shape
    factors = scales.float().repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)
    return (weight.float() * factors[:, :columns]).to(torch.bfloat16)


@final
class Fp8Checkpoint(CheckpointView):
    """View of a checkpoint with its FP8 tensors dequantised."""

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        size = dict(stored.config["quantization_config"]).get("weight_block_size")
        if size not in ([BLOCK, BLOCK], (BLOCK, BLOCK)):
            raise UnsupportedModelError(
                f"{self.name}: config field quantization_config has weight_block_size={size!r}; "
                f"only [{BLOCK}, {BLOCK}] is implemented"
            )

    def names(self) -> Collection[str]:
        return {name for name in self._stored.names() if not name.endswith(SCALES)}

    def read(self, name: str) -> Tensor:
        weight = self._stored.read(name)
        is_small, is_scaled = weight.itemsize == 1, name + SCALES in self._stored.names()
        if not is_small and not is_scaled:
            return weight
        if weight.dtype is not torch.float8_e4m3fn:
            raise UnsupportedModelError(
                f"{self.name}: tensor {name} has scales, but is stored as {weight.dtype}; "
                "only float8_e4m3fn is implemented"
            )
        if not is_scaled:
            raise CorruptCheckpointError(
                f"{self.name}: tensor {name} is in FP8, but its scales {name + SCALES} are "
                "missing; download the checkpoint again"
            )
        scales = self._stored.read(name + SCALES)
        blocks = [-(-size // BLOCK) for size in weight.shape]
        if list(scales.shape) != blocks:
            raise CorruptCheckpointError(
                f"{self.name}: the shape {list(scales.shape)} of tensor {name + SCALES} does not "
                f"match the shape {list(weight.shape)} of {name}; download the checkpoint again"
            )
        return dequantise(weight, scales)
