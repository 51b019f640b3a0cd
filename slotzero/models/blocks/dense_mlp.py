"""A dense MLP, with gates (SwiGLU and its variants) or without."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Activation, Normed, ResidualNorms
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.block import Block, BlockContext, split_evenly, sum_over
from slotzero.models.param import Params, Source, linear, side_by_side


class MlpNames(NamedTuple):
    """Names of the projections in a checkpoint's layer."""

    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    gate: str | None = "mlp.gate_proj"
    """None: `up` holds the gates, followed by the values."""

    @classmethod
    def below(cls, prefix: str) -> "MlpNames":
        return cls(f"{prefix}.up_proj", f"{prefix}.down_proj", f"{prefix}.gate_proj")


MLP_NAMES = MlpNames()
FUSED_NAMES = MlpNames("mlp.gate_up_proj", "mlp.down_proj", gate=None)


class DenseMlpWeights(NamedTuple):
    gate_up: LinearWeight  # [2 * inner, hidden]: gates, then values; without gates [inner, hidden]
    down: LinearWeight  # [hidden, inner]


@dataclass(frozen=True)
class DenseMlp(Block):
    hidden_size: int
    inner_size: int
    activation: Activation
    is_gated: bool = True
    """False: the up projection gates itself, without a gate projection."""
    has_bias: bool = False
    gate_scale: float = 1.0
    down_scale: float = 1.0
    names: MlpNames = MLP_NAMES
    size_field: str = "intermediate_size"  # config field of inner_size, for error messages

    name = "mlp"
    weights_type = DenseMlpWeights

    def shard(self, ranks: Ranks) -> Self:
        return replace(self, inner_size=split_evenly(self.inner_size, self.size_field, ranks.size))

    def params(self) -> Params:
        down = Source(self.names.down, self.hidden_size, scale=self.down_scale)
        gate_up = self._gate_up_sources()
        return {
            "gate_up": linear(self.hidden_size, *gate_up, biases=gate_up if self.has_bias else ()),
            "down": linear(
                self.inner_size, down, biases=[down] if self.has_bias else (), summed_over="mlp"
            ),
        }

    def _gate_up_sources(self) -> Sequence[Source]:
        names, inner = self.names, self.inner_size
        if not self.is_gated:
            return [Source(names.up, inner)]
        if names.gate is None:
            return side_by_side(names.up, (inner, inner))
        return [Source(names.gate, inner, scale=self.gate_scale), Source(names.up, inner)]

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        weights: DenseMlpWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        inner = self._inner(context, context.gather_rows(x), weights.gate_up)
        return context.linear_add_norm(context.ranks, inner, weights.down, residual, norms)

    def apply(self, context: BlockContext, x: Normed, weights: DenseMlpWeights) -> Tensor:
        """Return the MLP's result, [T, hidden], without adding it to the residual."""
        inner = self._inner(context, context.gather_rows(x), weights.gate_up)
        return sum_over(context.ranks, context.kernels.linear(inner, weights.down))

    def _inner(self, context: BlockContext, x: Normed, gate_up: LinearWeight) -> Normed:
        kernels = context.kernels
        if self.is_gated:
            return kernels.linear_gated(x, gate_up, self.activation)
        up = kernels.linear(x, gate_up)
        return Normed(kernels.gate(up, up, self.activation))
