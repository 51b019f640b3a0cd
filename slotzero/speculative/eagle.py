"""EAGLE heads: one layer that drafts from the target's hidden states, and then from its own.

Position i of its KV cache holds a pair: the token at i + 1 and the target's hidden state at i, from
which it predicts the token at i + 2. Where the target's hidden state is not known yet, it uses its
own. EAGLE-1 and -2 heads join the last hidden state with the embedding by `fc`; EAGLE-3 heads join
the states of three layers by `fc`, and normalise state and embedding. The embedding is the
target's, and so is the vocabulary head unless the checkpoint has its own.

MTP layers (mtp.py) are heads of the first kind. If there are several, they take turns: at position
i, layer k pairs the token at i + 1 + k with the hidden state of the layer before it, and predicts
the token at i + 2 + k. It lags k tokens behind.

The last position of a cached prefix holds the pair of the request that computed it, whose next
token may differ. The drafts after it may be slightly worse.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slotzero.graph import Pieces, Registry
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Branches, Normed, PagedKv, Rows, Tokens, standing
from slotzero.kernels.types_speculation import DraftRows
from slotzero.models.blocks.attention import AttentionInputs
from slotzero.models.blocks.moe import MoeInputs
from slotzero.models.layer import LayerForward, LayerStep
from slotzero.models.rope import frequencies
from slotzero.models.routing import Routing
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import DrafterInputs
from slotzero.speculative.drafter import DRAFTER_LEN, LogitsDrafter, Prediction
from slotzero.speculative.eagle_config import GROUP, EagleConfig
from slotzero.speculative.eagle_weights import HeadWeights

HIDDEN = "draft_hidden"


class EagleDrafter(LogitsDrafter):
    behind = 1

    def __init__(
        self,
        name: str,
        config: EagleConfig,
        layer: LayerForward,
        layers: Sequence[HeadWeights],
        routing: Routing | None,
        kernels: Kernels,
        registry: Registry,
        tables: SlotTables,
        pending: Tensor,
        kv: PagedKv,
    ) -> None:
        super().__init__(kernels, tables, pending)
        self.name = name
        self.groups, self.taps = (config.group,), config.taps
        self.writes = () if routing is None else (routing.name,)
        self._expert_starts = None if routing is None else routing.starts
        self._config, self._forward_layer, self._layers, self._kv = config, layer, layers, kv
        speed = frequencies(config.group.rope).to(registry.device)
        self._frequency = registry.constant(f"rope_{GROUP}", speed)
        rows, dtype = len(tables.length), layers[0].fc.dtype
        self.num_turns = len(layers)
        self.states = HIDDEN, *(f"{HIDDEN}_{i}" for i in range(1, len(layers) - 1))
        self._hidden = []  # of the newest pair of each layer that another one follows
        for name in self.states:
            hidden = torch.zeros(rows, config.hidden_size, dtype=dtype, device=registry.device)
            self._hidden.append(registry.table(name, hidden))

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None:
        tokens, rows, hidden, last = inputs
        is_first = tokens.positions == self.tables[DRAFTER_LEN][tokens.slots]
        super().extend(inputs, pieces)
        if self._config.is_third:
            hidden = self.kernels.linear(Normed(hidden), self._layers[0].fc)
        for layer in range(len(self._layers)):
            if layer:  # a new text uses no state of the slot's previous owner
                tokens, rows = _one_before(tokens, rows)
                before = self.kernels.load_features(tokens.slots, self._hidden[layer - 1][:, None])
                self.kernels.store_last(rows.slots, last, hidden, self._hidden[layer - 1])
                hidden = torch.where(is_first[:, None], before, hidden.roll(1, 0))
            hidden, _ = self._forward(layer, tokens, hidden, pieces, rows)
        if len(self._layers) == 1:
            self.kernels.store_last(rows.slots, last, hidden, self._hidden[0])

    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        if len(self._layers) == 1:
            return super().draft(slots, length, num, steps, pieces)
        aims = self.kernels.draft_targets(DraftRows(slots, length, num), steps, self.behind)
        state, logits = self.first(Tokens(aims.slots[0], aims.places[0]), pieces)
        assert state is not None
        for layer, (wanted, after) in enumerate(zip(aims.slots, aims.after, strict=True)):
            if layer > 1:  # its first pair ends with a draft token, so it is not computed yet
                before = self.kernels.load_features(wanted, self._hidden[layer - 1][:, None])
                state = torch.cat((before[:, None], state.view(len(slots), layer - 1, -1)), dim=1)
            if layer:
                tokens, rows = _newest(wanted, aims.places[0], layer)
                state, normed = self._forward(layer, tokens, state.flatten(0, -2), pieces, rows)
                logits = self._logits(layer, normed.select(rows.ends - 1), wanted)
            drawn = self.sample(logits, wanted, after, self.tables.sampling)
            self.write(wanted, after, drawn.tokens)
        return num

    def first(self, tokens: Tokens, pieces: Pieces) -> Prediction:
        """Predict from the newest pair, which `extend` has computed."""
        hidden = self.kernels.load_features(tokens.slots, self._hidden[0][:, None])
        normed = Normed(hidden)
        if not self._config.chains_normed:
            normed = self.kernels.norm(hidden, self._layers[0].norm, self._config.norm_eps)
        return Prediction(hidden, self._logits(0, normed, tokens.slots))

    def next(
        self,
        tokens: Tokens,
        state: Tensor | None,
        pieces: Pieces,
        rows: Rows | None = None,
        branches: Branches | None = None,
    ) -> Prediction:
        assert state is not None
        hidden, normed = self._forward(0, tokens, state, pieces, rows, branches)
        return Prediction(hidden, self._logits(0, normed, tokens.slots))

    def _forward(
        self,
        layer: int,
        tokens: Tokens,
        hidden: Tensor,
        pieces: Pieces,
        rows: Rows | None,
        branches: Branches | None = None,
    ) -> tuple[Tensor, Normed]:
        """Run a layer over pairs of the token after each of these and a hidden state [T, hidden];
        return its hidden states, as the next pairs use them and under the last norm."""
        config, weights, kernels = self._config, self._layers[layer], self.kernels
        eps, rope = config.norm_eps, config.group.rope
        after = self.tables.tokens[:, 1 + layer :]  # by the pair's location
        x = weights.vocabulary.embed_pair(tokens, after, hidden, weights.norms)
        normed = Normed(x)
        if not config.is_third:
            hidden = kernels.linear(normed, weights.fc)
            normed = kernels.norm(hidden, weights.first_norm, eps)
        plan = kernels.plan(tokens, rows, config.group.heads, branches)
        angles = kernels.rope_angles(
            standing(tokens, branches), self._frequency, rope.attention_factor
        )
        kv, starts = self._kv.of_layer(layer), self._expert_starts
        moe = None if starts is None else MoeInputs(tokens.slots, starts)
        step = LayerStep(hidden, normed, AttentionInputs(angles, kv, plan), moe, None)
        made: tuple[Tensor, Normed] = pieces(
            self._forward_layer.run, step, weights.layer, weights.norm
        )
        if config.chains_normed:
            hidden = kernels.apply_norm(made[1])
            return hidden, Normed(hidden)
        return made

    def _logits(self, layer: int, normed: Normed, slots: Tensor) -> Tensor:
        config, weights = self._config, self._layers[layer]
        few = normed.x.new_empty(len(slots), config.draft_vocab)
        if weights.head is None:
            weights.vocabulary.logits(normed, slots, None, few)
        else:
            self.kernels.logits(normed, weights.head, slots, None, few)
        return (
            few
            if weights.draft_of is None
            else self.kernels.expand_draft_vocab(few, weights.draft_of)
        )


def _newest(slots: Tensor, places: Tensor, span: int) -> tuple[Tokens, Rows]:
    """Return the newest `span` pairs of each slot, the last of them at its place."""
    offset = torch.arange(span, dtype=places.dtype, device=places.device)
    place = places[:, None] - (span - 1) + offset  # [R, span]
    is_there = (slots[:, None] > 0) & (place >= 0)
    tokens = Tokens((slots[:, None] * is_there).flatten(), (place * is_there).flatten())
    counts = is_there.sum(1, dtype=places.dtype)
    ends = span * (torch.arange(len(slots), dtype=places.dtype, device=places.device) + 1)
    starts = (places - span + 1) * (slots > 0)
    return tokens, Rows(slots, starts, counts, ends, span)


def _one_before(tokens: Tokens, rows: Rows) -> tuple[Tokens, Rows]:
    """Move all tokens one position back. A row that begins a text has one token fewer, as nothing
    precedes its first. With uniform rows it keeps its place, and its row begins before the text."""
    is_there = tokens.positions > 0
    tokens = Tokens(tokens.slots * is_there, (tokens.positions - 1) * is_there)
    begins = 0 if rows.span else (rows.starts == 0).int()
    counts = (rows.counts - begins).clamp_min(0)
    return tokens, rows._replace(starts=rows.starts - 1 + begins, counts=counts)
