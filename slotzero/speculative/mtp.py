"""A model's own multi-token prediction (MTP) layers as drafters, as in DeepSeek-V3.

Each joins the embedding of a token with a hidden state, both under norms, and is a decoder layer
like the others. The embedding and the vocabulary head are the model's; copies that a checkpoint
holds of them are not read.
"""

from dataclasses import replace

from slotzero.distributed.ranks import ALONE
from slotzero.errors import CorruptCheckpointError
from slotzero.kernels.types import PairNorms
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.mtp import mtp_params, mtp_weights
from slotzero.models.vocabulary import Vocabulary
from slotzero.models.weight_store import WeightSet, WeightStore
from slotzero.models.weights import expected_names, load_params
from slotzero.speculative.eagle_config import GROUP, EagleConfig
from slotzero.speculative.eagle_weights import HeadWeights


def mtp_config(target: ModelConfig) -> EagleConfig:
    assert target.mtp is not None
    layers = tuple(range(target.num_mtp_layers))
    return EagleConfig(
        is_third=False,
        taps=(target.num_layers,),
        group=replace(target.mtp.group, name=GROUP, layers=layers),
        hidden_size=target.hidden_size,
        intermediate_size=target.mlp_size,
        norm_eps=target.norm_eps,
        vocab_size=target.vocab_size,
        draft_vocab=target.vocab_size,
        chains_normed=target.mtp.chains_normed,
    )


def load_mtp(
    target: ModelConfig,
    vocabulary: Vocabulary,
    checkpoint: Checkpoint,
    store: WeightStore,
) -> list[HeadWeights]:
    layers, ranks, names = [], vocabulary.ranks, set(checkpoint.names())
    for index in range(target.num_mtp_layers):
        params = mtp_params(target, index, ranks)
        expected, _ = expected_names(params, target.quantization)
        if missing := sorted(expected - names):
            raise CorruptCheckpointError(
                f"{checkpoint.name}: tensor {missing[0]} is missing: the checkpoint was saved "
                "without its MTP layers, drop --speculative mtp"
            )
        tensors = load_params(params, checkpoint, store, f"{GROUP}.{index}.", target.quantization)
        whole = tuple(mtp_params(target, index, ALONE))
        store.sets.append(WeightSet(tuple(params), whole, tensors, target.quantization, True))
        weights = mtp_weights(target, index, tensors, ranks, store.dtype)
        layers.append(
            HeadWeights(
                fc=weights.join,
                layer=weights.layer,
                norms=PairNorms(weights.embed_norm, weights.hidden_norm, target.norm_eps),
                first_norm=weights.layer.norms.input,
                norm=weights.norm,
                vocabulary=vocabulary,
                head=None,
                draft_of=None,
            )
        )
    return layers
