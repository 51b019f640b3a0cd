"""A draft model without a KV cache of its own, which reads the target's: Gemma 4's assistant.

Its layers attend to the KV of the target's last layer of their kind that stores KV, for all
positions before the newest token, and store nothing. So its position is fixed: every draft token of
a cycle is predicted at the position of the newest token, and earlier draft tokens are known only
through its state, which starts as the target's last hidden state. Its vocabulary head may consider
only a few clusters of tokens.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.graph import Pieces, Registry
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Branches, Normed, PagedKv, PairNorms, Rows, Tokens
from slotzero.kernels.weights import DenseWeight, LinearWeight
from slotzero.models.blocks.attention import KvGroup
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import ModelConfig
from slotzero.models.decoder import Decoder
from slotzero.models.families.gemma4_assistant import (
    BACK,
    CENTROIDS,
    JOIN,
    ORDER,
    AssistantConfig,
    parse_assistant,
)
from slotzero.models.param import Param, Source
from slotzero.models.rope import frequencies
from slotzero.models.routing import EXPERT_STARTS, Routing
from slotzero.models.stacks import StackedParam
from slotzero.models.vocabulary import Vocabulary
from slotzero.models.weight_store import WeightStore
from slotzero.models.weights import Progress, load_params, load_weights
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import DrafterInputs
from slotzero.speculative.drafter import LogitsDrafter, Prediction
from slotzero.speculative.eagle import HIDDEN
from slotzero.speculative.eagle_config import GROUP, fits


class AssistantWeights(NamedTuple):
    decoder: Decoder
    join: LinearWeight  # [hidden, 2 * the target's hidden]: an embedding and a state
    back: LinearWeight  # [the target's hidden, hidden]
    centroids: LinearWeight | None  # [clusters, hidden]
    cluster_of: Tensor | None  # [vocab]


def fit_assistant(checkpoint: Checkpoint, target: ModelConfig) -> AssistantConfig:
    """Return the config of an assistant, or refuse one that was made for another target."""
    name, config = checkpoint.name, parse_assistant(checkpoint.config, checkpoint.name)
    fits(name, "backbone_hidden_size", config.backbone_size, target.hidden_size)
    fits(name, "vocab_size", config.model.vocab_size, target.vocab_size)
    theirs = {group.name: group for group in target.groups}
    fitted = {g.name: _reading(name, g, theirs.get(g.name)) for g in config.model.groups}
    return replace(config, model=config.model.with_groups(lambda group: fitted[group.name]))


def _reading(name: str, group: KvGroup, theirs: KvGroup | None) -> KvGroup:
    """Return the group as the assistant reads it. The newest token is not stored, so it is in the
    window but not among the keys."""
    if theirs is None:
        raise UnsupportedModelError(
            f"{name}: it has {group.name} layers and the target has none: "
            "it was made for another model"
        )
    for field in ("head_dim", "num_kv_heads", "window"):
        ours, wanted = getattr(group.heads, field), getattr(theirs.heads, field)
        fits(name, f"{field} of {group.name} layers", ours, wanted)
    window = group.heads.window
    heads = replace(group.heads, window=None if window is None else window - 1)
    return replace(group, heads=heads)


def load_assistant(
    config: AssistantConfig,
    target: ModelConfig,
    checkpoint: Checkpoint,
    store: WeightStore,
    progress: Progress,
    ranks: Ranks,
) -> AssistantWeights:
    model, prefix, registry = config.model, f"{GROUP}.", store.registry
    besides = [JOIN, BACK, *((CENTROIDS, ORDER) if config.num_clusters else ())]
    weights = load_weights(model, checkpoint, store, progress, prefix, frozenset(besides), ranks)
    hidden, theirs = model.hidden_size, target.hidden_size
    scales = [target.embedding_scale] * theirs + [1.0] * theirs  # of embeddings, as they come
    params = [
        StackedParam(
            "join", Param((Source(JOIN, hidden, column_scales=scales),), 2 * theirs), None
        ),
        StackedParam("back", Param((Source(BACK, theirs),), hidden), None),
    ]
    cluster_of = None
    if config.num_clusters:
        source = Source(CENTROIDS, config.num_clusters)
        params.append(StackedParam("centroids", Param((source,), hidden), None))
        order = checkpoint.read(ORDER).long()
        each = torch.arange(config.num_clusters).repeat_interleave(
            model.vocab_size // config.num_clusters
        )
        if not torch.equal(order.sort().values, torch.arange(model.vocab_size)):
            raise CorruptCheckpointError(
                f"{checkpoint.name}: tensor {ORDER} does not name each of {model.vocab_size} tokens"
            )
        cluster_of = torch.empty(model.vocab_size, dtype=torch.int64)
        cluster_of[order] = each
        cluster_of = registry.constant(f"weight.{prefix}cluster_of", cluster_of.to(registry.device))
    read = load_params(params, checkpoint, store, prefix)
    turns = {
        g.name: registry.constant(f"rope_{GROUP}_{g.name}", frequencies(g.rope).to(registry.device))
        for g in model.groups
    }
    routing = Routing.of(model, registry, f"{EXPERT_STARTS}_{GROUP}")
    decoder = Decoder(model.shard(ranks), weights, turns, store.kernels, routing, ranks)
    linear = {name: DenseWeight(read[name], None, param.out_features) for name, param, *_ in params}
    return AssistantWeights(
        decoder, linear["join"], linear["back"], linear.get("centroids"), cluster_of
    )


class AssistantDrafter(LogitsDrafter):
    name = "mtp"
    behind = 0
    states = (HIDDEN,)

    def __init__(
        self,
        config: AssistantConfig,
        target: ModelConfig,
        vocabulary: Vocabulary,  # the target's
        weights: AssistantWeights,
        kernels: Kernels,
        registry: Registry,
        tables: SlotTables,
        pending: Tensor,
        kv: Mapping[str, PagedKv],  # the target's
    ) -> None:
        super().__init__(kernels, tables, pending)
        self.taps, self.writes = (target.num_layers,), weights.decoder.writes
        self._config, self._weights, self._kv = config, weights, kv
        self._vocabulary, self._size = vocabulary, target.hidden_size
        shape = len(tables.length), target.hidden_size
        hidden = torch.zeros(shape, dtype=vocabulary.embedding.dtype, device=registry.device)
        self._hidden = registry.table(HIDDEN, hidden)

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None:
        super().extend(inputs, pieces)
        self.kernels.store_last(inputs.rows.slots, inputs.last, inputs.features, self._hidden)

    def stand(self, slots: Tensor) -> Tensor:
        """Return the position of every draft of a cycle: that of the newest token."""
        return self.tables.length[slots]

    def first(self, tokens: Tokens, pieces: Pieces) -> Prediction:
        return self.next(
            tokens, self.kernels.load_features(tokens.slots, self._hidden[:, None]), pieces
        )

    def next(
        self,
        tokens: Tokens,
        state: Tensor | None,
        pieces: Pieces,
        rows: Rows | None = None,
        branches: Branches | None = None,
    ) -> Prediction:
        """Predict the next tokens. Draft tokens of one row do not see each other, so each is a row
        of its own."""
        assert state is not None
        kernels, weights, slots = self.kernels, self._weights, tokens.slots
        model, place = self._config.model, self.stand(slots)
        no_norms = PairNorms(None, None, model.norm_eps)
        pair = self._vocabulary.embed_pair(tokens, self.tables.tokens, state, no_norms)
        begin = kernels.linear(Normed(pair), weights.join)
        normed = weights.decoder.forward_from(
            begin, Tokens(slots, (place - 1).clamp_min(0)), Tokens(slots, place),
            self.tables.sampling.prompt_len, self._kv, pieces,
        )  # fmt: skip
        state = kernels.linear(normed, weights.back)
        logits = state.new_empty(len(slots), model.vocab_size)
        weights.decoder.logits(normed, slots, logits)
        if weights.centroids is not None and weights.cluster_of is not None:
            top = self._config.top_clusters
            near = kernels.linear(normed, weights.centroids)
            chosen = near.topk(top, dim=-1).indices
            seen = torch.zeros_like(near, dtype=torch.bool).scatter_(1, chosen, True)
            is_out = ~seen[:, weights.cluster_of] & (slots > 0)[:, None]
            logits = logits.masked_fill(is_out, float("-inf"))
        return Prediction(state, logits)
