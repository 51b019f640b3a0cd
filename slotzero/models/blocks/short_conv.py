"""Short convolution between gates, as in LFM2: a mixer whose state is its last few inputs."""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Normed, ResidualNorms
from slotzero.kernels.types_recurrent import RecurrentStep, Scan
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.block import BlockContext, split_evenly
from slotzero.models.blocks.recurrent import RecurrentBlock
from slotzero.models.param import Param, Params, Source, linear, side_by_side


class ShortConvWeights(NamedTuple):
    in_proj: LinearWeight  # [3 * channels, hidden]: gates, output gates and values
    conv: Tensor  # [channels, conv_width]
    conv_bias: Tensor | None
    out: LinearWeight  # [hidden, channels]


@dataclass(frozen=True)
class ShortConv(RecurrentBlock):
    scan: Scan
    hidden_size: int
    prefix: str
    has_bias: bool = False

    name = "short_conv"
    state_dtype = "float32"  # there is no scan
    weights_type = ShortConvWeights

    def shard(self, ranks: Ranks) -> Self:
        num = split_evenly(self.scan.num_heads, "hidden_size", ranks.attention.size)
        return replace(self, scan=replace(self.scan, num_heads=num))

    def params(self) -> Params:
        prefix, has_bias, channels = self.prefix, self.has_bias, self.scan.channels
        gates = side_by_side(f"{prefix}.in_proj", (channels,) * 3)
        conv, out = (
            Source(f"{prefix}.conv", channels),
            Source(f"{prefix}.out_proj", self.hidden_size),
        )
        weight = linear(self.scan.conv_width, conv).weight
        return {
            "in_proj": linear(self.hidden_size, *gates, biases=gates if has_bias else ()),
            "conv": replace(weight, is_packed=False, is_conv=True),
            "conv_bias": Param((conv.ending(".bias"),)) if has_bias else None,
            "out": linear(
                channels, out, biases=[out] if has_bias else (), summed_over="attention"
            ),
        }  # fmt: skip

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: RecurrentStep,
        weights: ShortConvWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        scan = self.scan_of(inputs.states)
        given = context.kernels.linear(x, weights.in_proj)
        mixed = context.kernels.convolve(given, weights.conv, weights.conv_bias, inputs, scan)
        ranks = context.ranks.attention
        return context.linear_add_norm(ranks, Normed(mixed), weights.out, residual, norms)
