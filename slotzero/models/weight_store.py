"""Where the weights of a worker are: tensors of the registry, and what fills them.

A store is passed to every loader. It remembers which tensors were filled from which parameters, so
that `weight_update.py` can fill them again. It does not know how a tensor is read.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.models.stacks import StackedParam
from slotzero.quantization.quantization import Quantization


@dataclass(frozen=True)
class WeightSet:
    """Parameters that were loaded together."""

    params: tuple[StackedParam, ...]
    """This rank's part of them."""
    whole: tuple[StackedParam, ...]
    """Those of all ranks."""
    tensors: Mapping[str, Tensor]
    quantization: Quantization
    is_optional: bool = False
    """The layers of a drafter, which a checkpoint of the model may lack."""


@dataclass(frozen=True)
class WeightStore:
    registry: Registry
    kernels: Kernels
    dtype: torch.dtype
    sets: list[WeightSet] = field(default_factory=list)
    """What was loaded from the model's checkpoint."""

    def apart(self) -> "WeightStore":
        """Return the store for the weights of another checkpoint, such as a draft model's."""
        return replace(self, sets=[])
