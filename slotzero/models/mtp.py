"""Parameters and weights of multi-token prediction (MTP) layers.

A checkpoint stores them after the model's last layer. Each one projects a token's embedding and a
hidden state to one vector, and runs a decoder layer on it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import LinearWeight
from slotzero.models.blocks.block import Block
from slotzero.models.config import ModelConfig
from slotzero.models.layer import LayerWeights
from slotzero.models.param import Source, linear, norm
from slotzero.models.stacks import Stack, StackedParam, layer_stacks, sharded_params
from slotzero.models.weights import layer_weights


class MtpWeights(NamedTuple):
    join: LinearWeight  # [hidden, 2 * hidden]: takes an embedding and a hidden state
    embed_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor  # before the vocabulary head
    layer: LayerWeights


def mtp_params(config: ModelConfig, index: int, ranks: Ranks) -> list[StackedParam]:
    """Return this rank's part of the parameters of the `index`th MTP layer."""
    assert config.mtp is not None
    names, hidden, offset = _names(config, index), config.hidden_size, config.norm_offset
    params = [
        StackedParam("join", linear(2 * hidden, Source(names["join"], hidden)).weight, None),
        *(
            StackedParam(field, norm(names[field], hidden, offset), None)
            for field in ("embed_norm", "hidden_norm", "norm")
        ),
    ]
    for stack in _stacks(config, index).values():
        params += sharded_params(stack, ranks)
    return params


def mtp_weights(
    config: ModelConfig, index: int, tensors: Mapping[str, Tensor], ranks: Ranks
) -> MtpWeights:
    """Assemble the weights of the `index`th MTP layer."""
    stacks = {field: stack.shard(ranks) for (field, _), stack in _stacks(config, index).items()}
    return MtpWeights(
        LinearWeight(tensors["join"], None, config.hidden_size),
        tensors["embed_norm"],
        tensors["hidden_norm"],
        tensors["norm"],
        layer_weights(stacks, tensors, index),
    )


def _stacks(config: ModelConfig, index: int) -> dict[tuple[str, Block], Stack]:
    assert config.mtp is not None
    return layer_stacks({index: (config.mtp.layer, _names(config, index)["layer"])})


def _names(config: ModelConfig, index: int) -> dict[str, Any]:
    assert config.mtp is not None
    numbers = {"layer": config.num_layers + index, "index": index}
    return {field: name.format(**numbers) for field, name in config.mtp.names._asdict().items()}
