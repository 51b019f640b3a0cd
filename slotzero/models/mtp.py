"""Parameters and weights of multi-token prediction (MTP) layers.

A checkpoint stores them after the model's last layer. Each one projects a token's embedding and a
hidden state to one vector, and runs a decoder layer on it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.weights import LinearWeight
from slotzero.models.config import ModelConfig
from slotzero.models.layer import LayerWeights
from slotzero.models.param import LinearParam, Source, linear, norm
from slotzero.models.stacks import (
    Formats,
    LayerStacks,
    StackedParam,
    assemble_linear,
    layer_stacks,
    sharded_params,
    source_formats,
    split_param,
)
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
    join, formats = _join(config, index)
    params = [
        *split_param("join", join.weight, formats, None),
        *(
            StackedParam(field, norm(names[field], hidden, offset), None)
            for field in ("embed_norm", "hidden_norm", "norm")
        ),
    ]
    for stack in _stacks(config, index).stacks:
        params += sharded_params(stack, ranks)
    return params


def mtp_weights(
    config: ModelConfig,
    index: int,
    tensors: Mapping[str, Tensor],
    ranks: Ranks,
    dtype: torch.dtype,
) -> MtpWeights:
    """Assemble the weights of the `index`th MTP layer."""
    stacks = _stacks(config, index).shard(ranks).by_layer[index]
    join, formats = _join(config, index)
    return MtpWeights(
        assemble_linear("join", join, formats, lambda name: tensors[name], dtype),
        tensors["embed_norm"],
        tensors["hidden_norm"],
        tensors["norm"],
        layer_weights(stacks, tensors, index, dtype),
    )


def _join(config: ModelConfig, index: int) -> tuple[LinearParam, Formats]:
    """Return the linear layer that joins both sides, and its formats."""
    join = linear(2 * config.hidden_size, Source(_names(config, index)["join"], config.hidden_size))
    return join, source_formats(join.weight, "", config.quantization)


def _stacks(config: ModelConfig, index: int) -> LayerStacks:
    assert config.mtp is not None
    layers = {index: (config.mtp.layer, _names(config, index)["layer"])}
    return layer_stacks(layers, config.quantization)


def mtp_layer_prefix(config: ModelConfig, index: int) -> str:
    """Return what the names of the `index`th MTP layer's tensors begin with."""
    prefix: str = _names(config, index)["layer"]
    return prefix


def _names(config: ModelConfig, index: int) -> dict[str, Any]:
    assert config.mtp is not None
    numbers = {"layer": config.num_layers + index, "index": index}
    return {field: name.format(**numbers) for field, name in config.mtp.names._asdict().items()}
