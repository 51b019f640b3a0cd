"""The parameters of multi-token prediction (MTP) layers, stored behind a model's last layer.

Each joins a token's embedding with a hidden state and is a decoder layer like the rest.
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
    join: LinearWeight  # [hidden, 2 * hidden]: an embedding, a hidden state
    embed_norm: Tensor
    hidden_norm: Tensor
    norm: Tensor  # before the vocabulary head
    layer: LayerWeights


def mtp_params(config: ModelConfig, index: int, ranks: Ranks) -> list[StackedParam]:
    """Return the parameters of the `index`th MTP layer, or one rank's part of them."""
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
    """Put the weights of the `index`th MTP layer together."""
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
