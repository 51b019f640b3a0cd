"""A decoder layer: a mixer and an MLP, each between norms and added to the residual.

The input of a layer is already normalised: the layer before it (or the embedding) applies the input
norm, so that one kernel can add to the residual and norm the sum.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import ExpertWeights, Normed, ResidualNorms
from slotzero.kernels.types_recurrent import RecurrentStep
from slotzero.models.blocks.attention import (
    Attention,
    AttentionInputs,
    AttentionWeights,
    KvGroup,
)
from slotzero.models.blocks.block import Block, BlockContext
from slotzero.models.blocks.dense_mlp import DenseMlp, DenseMlpWeights
from slotzero.models.blocks.kda import KdaMixer, KdaWeights
from slotzero.models.blocks.layer_input import LayerInputMixer, LayerInputWeights
from slotzero.models.blocks.mla import MlaAttention, MlaAttentionWeights
from slotzero.models.blocks.moe import MoeInputs, MoeMlp
from slotzero.models.blocks.moe_shared import (
    MoeBesideMlp,
    MoeBesideMlpWeights,
    MoeWithSharedMlp,
    MoeWithSharedWeights,
)
from slotzero.models.blocks.parallel import ParallelInputs, ParallelMixers, ParallelWeights
from slotzero.models.blocks.recurrent import RecurrentBlock, RecurrentMixer, RecurrentWeights
from slotzero.models.blocks.short_conv import ShortConv, ShortConvWeights
from slotzero.models.param import Param, Params, Source, norm

Mixer = Attention | MlaAttention | RecurrentMixer | KdaMixer | ShortConv | ParallelMixers
MixerInputs = AttentionInputs | RecurrentStep | ParallelInputs
MixerWeights = (
    AttentionWeights
    | MlaAttentionWeights
    | RecurrentWeights
    | KdaWeights
    | ShortConvWeights
    | ParallelWeights
)
Mlp = DenseMlp | MoeMlp | MoeWithSharedMlp | MoeBesideMlp
MlpWeights = DenseMlpWeights | ExpertWeights | MoeWithSharedWeights | MoeBesideMlpWeights


class NormWeights(NamedTuple):
    """Norm weights of a layer, [hidden] each; None where the family has no such norm."""

    input: Tensor | None
    post_mixer: Tensor | None
    mlp: Tensor | None
    post_mlp: Tensor | None


@dataclass(frozen=True)
class LayerNorms(Block):
    """The norms of a layer by their names in the checkpoint; by default, those of a pre-norm layer.

    None means that the layer has no such norm.
    """

    hidden_size: int
    eps: float
    input: str | None = "input_layernorm"
    post_mixer: str | None = None
    mlp: str | None = "post_attention_layernorm"
    post_mlp: str | None = None
    offset: float = 0.0
    """Added to the stored weights."""
    is_centred: bool = False
    """LayerNorm without a bias instead of RMSNorm."""

    name = "norms"
    weights_type = NormWeights

    def shard(self, ranks: Ranks) -> Self:
        return self

    def params(self) -> Params:
        names = {field: getattr(self, field) for field in NormWeights._fields}
        return {
            field: None if name is None else norm(name, self.hidden_size, self.offset)
            for field, name in names.items()
        }


class LayerScaleWeights(NamedTuple):
    scale: Tensor  # [1]


@dataclass(frozen=True)
class LayerScale(Block):
    """A learned factor on the layer's result."""

    name = "layer_scale"
    weights_type = LayerScaleWeights

    def shard(self, ranks: Ranks) -> Self:
        return self

    def params(self) -> Params:
        return {"scale": Param((Source("layer_scalar", 1),), starts_at_one=True)}


class LayerWeights(NamedTuple):
    norms: NormWeights
    mixer: MixerWeights | None = None
    mlp: MlpWeights | None = None
    input_mixer: LayerInputWeights | None = None
    scale: LayerScaleWeights | None = None


class LayerStep(NamedTuple):
    """The inputs of one layer in a step."""

    residual: Tensor  # [T, hidden]
    normed: Normed  # the residual under the layer's input norm
    mixer: MixerInputs | None
    moe: MoeInputs | None
    layer_input: Tensor | None  # [T, input_size]


@dataclass(frozen=True)
class DecoderLayer:
    """Config of one decoder layer: the blocks that it is made of."""

    norms: LayerNorms
    mixer: Mixer | None
    mlp: Mlp | None
    input_mixer: LayerInputMixer | None = None
    scale: LayerScale | None = None
    is_parallel: bool = False
    """Whether the MLP reads the input of the mixer, and the layer has no norm between them."""

    @property
    def group(self) -> KvGroup | None:
        """The KV group of the layer's attention; None if it has no attention."""
        match self.mixer:
            case Attention() | MlaAttention():
                return self.mixer.group
            case ParallelMixers():
                return self.mixer.attention.group
        return None

    @property
    def recurrent(self) -> RecurrentBlock | None:
        match self.mixer:
            case RecurrentBlock():
                return self.mixer
            case ParallelMixers():
                return self.mixer.recurrent
        return None

    @property
    def moe(self) -> MoeMlp | None:
        match self.mlp:
            case MoeMlp():
                return self.mlp
            case MoeWithSharedMlp() | MoeBesideMlp():
                return self.mlp.moe
        return None

    def blocks(self) -> dict[str, Block]:
        """Return the layer's blocks by field of LayerWeights."""
        named: dict[str, Block | None] = {
            "norms": self.norms,
            "mixer": self.mixer,
            "mlp": self.mlp,
            "input_mixer": self.input_mixer,
            "scale": self.scale,
        }
        return {field: block for field, block in named.items() if block is not None}

    def shard(self, ranks: Ranks) -> "DecoderLayer":
        parts: dict[str, Any] = {f: block.shard(ranks) for f, block in self.blocks().items()}
        return replace(self, **parts)


@dataclass(frozen=True)
class LayerForward:
    """A layer bound to kernels and ranks. Equal layers are compiled once."""

    layer: DecoderLayer
    context: BlockContext

    def run(
        self, step: LayerStep, weights: LayerWeights, next_norm: Tensor | None
    ) -> tuple[Tensor, Normed]:
        """Return the residual after this layer, as is and under the next layer's input norm."""
        layer, context, norms = self.layer, self.context, weights.norms
        residual, normed = step.residual, step.normed
        eps, last = layer.norms.eps, None if layer.scale is not None else next_norm
        is_centred = layer.norms.is_centred
        if layer.mixer is not None:
            after = norms.mlp if layer.mlp is not None else last
            add = ResidualNorms(norms.post_mixer, after, eps, is_centred)
            residual, normed = self._mix(normed, step.mixer, weights.mixer, residual, add)
        if layer.mlp is not None:
            add = ResidualNorms(norms.post_mlp, last, eps, is_centred)
            normed = step.normed if layer.is_parallel else normed
            residual, normed = self._mlp(normed, step.moe, weights.mlp, residual, add)
        if layer.input_mixer is not None:
            assert step.layer_input is not None and weights.input_mixer is not None
            residual = layer.input_mixer.forward(
                context, normed, step.layer_input, weights.input_mixer, residual
            )
        if weights.scale is not None:
            residual = residual * weights.scale.scale
            normed = context.kernels.norm(residual, next_norm, eps, is_centred)
        return residual, normed

    def _mix(
        self, x: Normed, inputs: Any, weights: Any, residual: Tensor, norms: ResidualNorms
    ) -> tuple[Tensor, Normed]:
        assert self.layer.mixer is not None
        return self.layer.mixer.forward(self.context, x, inputs, weights, residual, norms)

    def _mlp(
        self, x: Normed, inputs: Any, weights: Any, residual: Tensor, norms: ResidualNorms
    ) -> tuple[Tensor, Normed]:
        mlp = self.layer.mlp
        if isinstance(mlp, DenseMlp):
            return mlp.forward(self.context, x, weights, residual, norms)
        assert mlp is not None
        return mlp.forward(self.context, x, inputs, weights, residual, norms)
