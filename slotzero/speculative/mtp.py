"""MTP (multi-token prediction) layers of a model, stored after its last layer, as in DeepSeek.

Each joins the normalised embedding of a token with a normalised hidden state, and is otherwise a
layer like the others. The embedding and the vocabulary head are the model's; copies of them in a
checkpoint are not read.
"""

from dataclasses import replace

import torch

from slotzero.errors import CorruptCheckpointError
from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.decoder import LAYER_WEIGHTS
from slotzero.models.params import ahead_params
from slotzero.models.shards import cut, sharded
from slotzero.models.vocabulary import Vocabulary
from slotzero.models.weights import load_params
from slotzero.speculative.eagle_config import GROUP, EagleConfig
from slotzero.speculative.eagle_weights import HeadWeights


def mtp_config(target: ModelConfig) -> EagleConfig:
    layers = tuple(range(target.num_mtp_layers))
    return EagleConfig(
        is_third=False,
        taps=(target.num_layers,),
        group=replace(target.groups[-1], name=GROUP, layers=layers),
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        norm_eps=target.norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab=target.vocab_size,
    )


def load_mtp(
    target: ModelConfig,
    vocabulary: Vocabulary,
    checkpoint: Checkpoint,
    registry: Registry,
    kernels: Kernels,
    dtype: torch.dtype,
) -> list[HeadWeights]:
    layers, ranks = [], vocabulary.ranks
    for index in range(target.num_mtp_layers):
        layer = target.num_layers + index
        params = cut(
            ahead_params(target, layer), ahead_params(sharded(target, ranks), layer), ranks
        )
        names = set(checkpoint.names())
        for param in params:
            for stored in param.stored(layer):
                if stored.name not in names:
                    raise CorruptCheckpointError(
                        f"{checkpoint.name}: tensor {stored.name} is missing: the checkpoint was "
                        "saved without its MTP layers, drop --speculative mtp"
                    )
        read = load_params(params, checkpoint, registry, kernels, dtype, f"{GROUP}.{index}.")
        own = {field: tensor[0] for field, tensor in read.items()}
        layers.append(
            HeadWeights(
                fc=own["join"],
                fc_bias=None,
                layer=[own.get(field) for field in LAYER_WEIGHTS],
                embed_norm=own["embed_norm"],
                hidden_norm=own["hidden_norm"],
                first_norm=own["input_norm"],
                norm=own["norm"],
                vocabulary=vocabulary,
                head=None,
                draft_of=None,
            )
        )
    return layers
