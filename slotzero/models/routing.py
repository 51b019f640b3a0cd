"""Expert routing as a registered tensor: where the rows of each expert begin.

All layers write to the same tensor, so after a step it holds the routing of the last layer. It is
registered so that checks can verify that padding is not routed to any expert.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.graph import Registry
from slotzero.models.config import ModelConfig

EXPERT_STARTS = "expert_starts"
CHOSEN_EXPERTS = "chosen_experts"
"""The name, among the KV pages of a step, of the pages that store the target's experts."""


class Routing(NamedTuple):
    name: str
    starts: Tensor  # [experts + 1]

    @classmethod
    def of(
        cls, config: ModelConfig, registry: Registry, name: str = EXPERT_STARTS
    ) -> "Routing | None":
        """Register the tensor; return None for a model without experts."""
        if config.experts is None:
            return None
        shape = (config.experts.num_held + 1,)
        return cls(name, registry.output(name, shape, torch.int32, per="step"))
