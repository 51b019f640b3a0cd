"""Per-layer inputs, as in Gemma 4: each layer has its own embedding of every token.

The layer mixes it into the residual at its end.
"""

from dataclasses import dataclass
from typing import NamedTuple, Self

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Activation, Normed, ResidualNorms
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.block import Block, BlockContext
from slotzero.models.param import Params, Source, linear, norm


class LayerInputWeights(NamedTuple):
    gate: LinearWeight  # [input_size, hidden]
    out: LinearWeight  # [hidden, input_size]
    norm: Tensor


@dataclass(frozen=True)
class LayerInputMixer(Block):
    """Block at the end of a layer that mixes the layer's own input into the residual."""

    hidden_size: int
    input_size: int
    activation: Activation
    norm_eps: float

    name = "layer_input"
    weights_type = LayerInputWeights

    def shard(self, ranks: Ranks) -> Self:
        return self

    def params(self) -> Params:
        hidden, size = self.hidden_size, self.input_size
        return {
            "gate": linear(hidden, Source("per_layer_input_gate", size)),
            "out": linear(size, Source("per_layer_projection", hidden)),
            "norm": norm("post_per_layer_input_norm", hidden),
        }

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        layer_input: Tensor,  # [T, input_size]
        weights: LayerInputWeights,
        residual: Tensor,
    ) -> Tensor:
        kernels = context.kernels
        mixed = kernels.gate(kernels.linear(x, weights.gate), layer_input, self.activation)
        norms = ResidualNorms(weights.norm, None, self.norm_eps)
        residual, _ = kernels.linear_add_norm(Normed(mixed), weights.out, residual, norms)
        return residual


class LayerEmbeddingWeights(NamedTuple):
    embedding: LinearWeight  # [vocab, layers * input_size]
    projection: LinearWeight  # [layers * input_size, hidden]
    norm: Tensor  # [input_size]


@dataclass(frozen=True)
class LayerEmbedding(Block):
    """Block outside the layers that computes the per-layer inputs of all layers.

    An input is the sum of a per-layer embedding of the token and a projection of the token's common
    embedding.
    """

    hidden_size: int
    input_size: int
    num_layers: int
    vocab_size: int
    norm_eps: float

    name = "layer_embedding"
    weights_type = LayerEmbeddingWeights

    def shard(self, ranks: Ranks) -> Self:
        return self

    def params(self) -> Params:
        width = self.num_layers * self.input_size
        return {
            "embedding": linear(
                width,
                Source("model.embed_tokens_per_layer", self.vocab_size),
                is_sensitive=True,
            ),
            "projection": linear(
                self.hidden_size, Source("model.per_layer_model_projection", width)
            ),
            "norm": norm("model.per_layer_projection_norm", self.input_size),
        }
