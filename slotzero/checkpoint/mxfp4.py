"""MXFP4, the format of gpt-oss's experts: blocks of 32 four-bit numbers that share a power of two.

Tensors NAME_blocks and NAME_scales are presented as one tensor NAME. In this format experts have
their output features first; the dequantised tensor has them last.
"""

from collections.abc import Collection
from typing import final

import torch
from torch import Tensor

from slotzero.errors import CorruptCheckpointError
from slotzero.models.checkpoint import CheckpointView

BLOCKS, SCALES = "_blocks", "_scales"
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # the other eight are their negatives
BIAS = 127


def dequantise(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantise blocks [..., groups, 16] with scales [..., groups], both uint8.

    The result is [..., groups * 32] in bfloat16, which represents all values exactly. The low half
    of a byte comes first.
    """
    values = torch.tensor([*VALUES, *(-v for v in VALUES)], dtype=torch.bfloat16)
    pairs = torch.stack((blocks & 15, blocks >> 4), dim=-1)
    numbers = values[pairs.int()].flatten(-2)  # [..., groups, 32]
    powers = (scales.float() - BIAS).exp2().to(torch.bfloat16)
    return (numbers * powers[..., None]).flatten(-2)


@final
class Mxfp4Checkpoint(CheckpointView):
    """View of a checkpoint with its MXFP4 tensors dequantised."""

    def names(self) -> Collection[str]:
        names = set(self._stored.names())
        blocks = {name for name in names if name.endswith(BLOCKS)}
        scales = {name.removesuffix(BLOCKS) + SCALES for name in blocks}
        return (names - blocks - scales) | {name.removesuffix(BLOCKS) for name in blocks}

    def read(self, name: str) -> Tensor:
        if name + BLOCKS not in self._stored.names():
            return self._stored.read(name)
        blocks, scales = self._stored.read(name + BLOCKS), self._stored.read(name + SCALES)
        if blocks.shape[:-1] != scales.shape or blocks.shape[-1] != 16:
            raise CorruptCheckpointError(
                f"{self.name}: the shapes {list(blocks.shape)} of tensor {name + BLOCKS} and "
                f"{list(scales.shape)} of {name + SCALES} do not match; download the checkpoint "
                "again"
            )
        return dequantise(blocks, scales).transpose(-1, -2)
