"""A check that the layers of a model mix tokens in attention only.

A step packs the tokens of all its rows into one sequence. A convolution, a recurrence or a shift
over that sequence would mix requests, and so would a position counted from its beginning. Shapes do
not show it, so this is tried with the model's weights: when every token attends to itself alone, a
token must come out the same beside other tokens and at another place.
"""

import torch
from torch import Tensor, nn

from slotzero.errors import UnsupportedModelError
from slotzero.models.bridge.attention import AttentionCall, Hook, attach_hook
from slotzero.models.bridge.config import BridgedConfig
from slotzero.models.bridge.parts import Parts

NUM_TOKENS = 16
_ROUNDING = {torch.float32: 1e-4}  # relative to the largest value
_OTHER_ROUNDING = 5e-2
_MOST_CHANGED = 0.25  # of the tokens: in 16 bits, a router near a tie may choose another expert


class _OwnValues(Hook):
    """Every token attends to itself alone."""

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        group = call.query.shape[1] // call.value.shape[1]
        return call.value[0].repeat_interleave(group, dim=0).transpose(0, 1)


def refuse_mixing(config: BridgedConfig, parts: Parts) -> None:
    """Raise if a token's result depends on its neighbours or on its place in the sequence."""
    attach_hook(parts.trunk, _OwnValues())
    device = parts.like.device
    ids = (torch.arange(NUM_TOKENS, device=device) * 7 + 3) % config.vocab_size
    positions = torch.arange(NUM_TOKENS, device=device) % config.max_position
    half = NUM_TOKENS // 2
    others = torch.arange(half, NUM_TOKENS, device=device)  # they stay, and the first half changes
    order = others.flip(0)
    changed = (ids[:half] + 1) % config.vocab_size
    with torch.inference_mode():
        first = parts.hidden(ids, positions)[order]
        second = parts.hidden(
            torch.cat((ids[order], changed)), torch.cat((positions[order], positions[:half]))
        )[: len(order)]
    bound = _ROUNDING.get(first.dtype, _OTHER_ROUNDING) * first.float().abs().max()
    is_near = ((first - second).float().abs() <= bound).all(-1)
    allowed = 0.0 if first.dtype is torch.float32 else _MOST_CHANGED
    if float((~is_near).float().mean()) > allowed:  # waits: once, at the start
        raise UnsupportedModelError(
            f"{config.architecture}: a token's result depends on the tokens beside it outside of "
            "attention (a convolution, a recurrence, or positions of its own), so requests would "
            "mix in a batch; the bridge to transformers cannot run it"
        )
