"""Experts of transformers in a recorded graph.

transformers has several implementations. One gathers the weights of every token's experts, and it
alone works in every type without a read on the host. In a long step it would gather many times the
layer's weights, so tokens go through it in slices.
"""

from typing import Any

import torch
from torch import Tensor


def forward_in_slices(
    experts: Any,
    hidden_states: Tensor,  # [T, hidden]
    top_k_index: Tensor,  # [T, top_k]
    top_k_weights: Tensor,
) -> Tensor:
    """Gather at most as many weights at once as the layer has experts."""
    from transformers.integrations import batched_mm_experts_forward

    size = max(1, experts.num_experts // top_k_index.shape[-1])
    inputs = hidden_states, top_k_index, top_k_weights
    slices = zip(*(torch.split(x, size) for x in inputs), strict=True)
    return torch.cat([batched_mm_experts_forward(experts, *each) for each in slices])
