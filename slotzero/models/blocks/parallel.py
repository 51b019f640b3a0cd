"""Attention and a recurrent mixer side by side, as in Falcon-H1: both read the same input."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Normed, ResidualNorms
from slotzero.kernels.types_recurrent import RecurrentStep
from slotzero.models.blocks.attention import Attention, AttentionInputs, AttentionWeights
from slotzero.models.blocks.block import Block, BlockContext
from slotzero.models.blocks.recurrent import RecurrentMixer, RecurrentWeights
from slotzero.models.param import Params


class ParallelWeights(NamedTuple):
    attention: AttentionWeights
    recurrent: RecurrentWeights


class ParallelInputs(NamedTuple):
    attention: AttentionInputs
    recurrent: RecurrentStep


@dataclass(frozen=True)
class ParallelMixers(Block):
    """Attention and a recurrent mixer, both added to the residual."""

    attention: Attention
    recurrent: RecurrentMixer

    name = "mixers"
    weights_type = ParallelWeights

    def shard(self, ranks: Ranks) -> Self:
        attention, recurrent = self.attention.shard(ranks), self.recurrent.shard(ranks)
        return replace(self, attention=attention, recurrent=recurrent)

    def params(self) -> Params:
        return {"attention": self.attention.params(), "recurrent": self.recurrent.params()}

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: ParallelInputs,
        weights: ParallelWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        no_norms = ResidualNorms(None, None, norms.eps)
        residual, _ = self.attention.forward(
            context, x, inputs.attention, weights.attention, residual, no_norms
        )
        return self.recurrent.forward(
            context, x, inputs.recurrent, weights.recurrent, residual, norms
        )
