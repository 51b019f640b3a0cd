"""The layers of a bridged model as pieces of a step.

The model of transformers calls its layers. What it calls is the forward method of a `LayerPiece`,
which hands the layer's code, arguments, weights and KV pages to the backend.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from slotzero.errors import ContractError
from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Heads, QkNorms
from slotzero.models.blocks.attention import AttentionInputs
from slotzero.models.bridge.attention import AttentionCall, Hook, attach_hook
from slotzero.models.bridge.body import Arguments, Body

NO_NORMS = QkNorms(None, None)


class StepInputs(NamedTuple):
    """What the layers of one step need besides what the model gives them."""

    pieces: Pieces
    attention: tuple[AttentionInputs | None, ...]  # by layer
    taps: Mapping[int, Tensor]


class CurrentStep:
    """The step that one model computes; None outside of its forward pass."""

    inputs: StepInputs | None = None


class LayerPiece(Hook):
    """One layer. As a hook, it computes the attention of equal layers too, with their pages."""

    def __init__(
        self, layer: nn.Module, index: int, heads: Heads | None, kernels: Kernels, step: CurrentStep
    ) -> None:
        self._body, self._index, self._heads = Body(layer), index, heads
        self._kernels, self._step = kernels, step
        self._attention: AttentionInputs | None = None  # set while `run` runs
        self.weights = self._body.weights
        self.code = self
        """The first equal layer."""
        attach_hook(layer, self)
        layer.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take the place of the layer's forward method."""
        inputs = self._step.inputs
        if inputs is None:
            raise ContractError("a bridged layer runs in the forward pass of its model only")
        arguments = Arguments.of(type(self._body.layer).__name__, args, kwargs)
        if self._index in inputs.taps:
            inputs.taps[self._index].copy_(arguments.leaves[0][0])
        attention = inputs.attention[self._index]
        return inputs.pieces(self.code.run, arguments, self.weights, attention)

    def run(
        self,
        arguments: Arguments,
        weights: tuple[Tensor, ...],
        attention: AttentionInputs | None,
    ) -> Any:
        self._attention = attention
        try:
            return self._body.call(arguments, weights)
        finally:
            self._attention = None

    def attend(self, module: nn.Module, call: AttentionCall) -> Tensor:
        heads, inputs = self._heads, self._attention
        if heads is None or inputs is None or call.mask is not None:
            raise ContractError(f"{type(module).__name__} attends otherwise than when examined")
        if call.heads(heads.window) != heads:
            raise ContractError(f"{type(module).__name__}: its attention has changed its shape")
        angles, kv, plan = inputs.angles, inputs.kv, inputs.plan
        out = self._kernels.attention(call.qkv, NO_NORMS, call.sinks, angles, kv, plan, heads)
        return out.view(-1, heads.num_heads, heads.value_dim)
