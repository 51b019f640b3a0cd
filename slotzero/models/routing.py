"""Expert routing as a registered tensor: where the rows of each expert begin.

One tensor serves all layers and holds what the last of them wrote. It is registered so that checks
can see that padding is routed nowhere.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.graph import Registry
from slotzero.models.config import ModelConfig

EXPERT_STARTS = "expert_starts"


class Routing(NamedTuple):
    name: str
    starts: Tensor  # [experts + 1]

    @classmethod
    def of(
        cls, config: ModelConfig, registry: Registry, name: str = EXPERT_STARTS
    ) -> "Routing | None":
        """Return None for a model without experts."""
        if config.experts is None:
            return None
        shape = (config.experts.num_held + 1,)
        return cls(name, registry.output(name, shape, torch.int32, per="step"))
