"""EAGLE heads: one layer that guesses from the target's hidden states, and then from its own.

Location i of its KV holds a pair: the token at i + 1 and the target's hidden state at i, so it
guesses the token at i + 2. Where no hidden state of the target is there yet it takes its own.
EAGLE-1 and -2 are one kind of head (the last hidden state, joined with the embedding by `fc`);
EAGLE-3 is the other (states of three layers, joined by `fc`, each side under a norm). The embedding
is the target's, and the vocabulary head too unless a checkpoint brings its own.

The last location of a prefix that was found in the cache holds the pair of whoever computed it: its
token may be another one. The guesses that follow may be a little worse.
"""

from dataclasses import replace

import torch
from torch import Tensor

from slotzero.graph import Pieces, Registry
from slotzero.kernels.contract import Kernels
from slotzero.kernels.nouns import Branches, Normed, Rows, Tokens, standing
from slotzero.models.config import ModelConfig
from slotzero.models.decoder import Kind, KvPages
from slotzero.models.rope import frequencies
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import Followed
from slotzero.speculative.drafter import Guess, Guesser
from slotzero.speculative.eagle_config import GROUP, EagleConfig
from slotzero.speculative.eagle_weights import HeadWeights

HIDDEN = "draft_hidden"


class EagleDrafter(Guesser):
    behind = 1

    def __init__(
        self,
        config: EagleConfig,
        target: ModelConfig,
        weights: HeadWeights,
        kernels: Kernels,
        registry: Registry,
        tables: SlotTables,
        pending: Tensor,
        kv: KvPages,
    ) -> None:
        super().__init__(kernels, tables, pending)
        self.name = "eagle3" if config.is_third else "eagle"
        self.groups, self.taps = (config.group,), config.taps
        self._config, self._weights, self._kv = config, weights, kv
        self._kind = Kind(_as_model(config, target), config.group, None, kernels)
        speed = frequencies(config.group.rope).to(registry.device)
        self._frequency = registry.constant(f"rope_{GROUP}", speed)
        rows = len(tables["length"])
        shape = rows, config.hidden_size
        hidden = torch.zeros(shape, dtype=weights.fc.dtype, device=registry.device)
        self._hidden = registry.table(HIDDEN, hidden)

    def extend(self, followed: Followed, pieces: Pieces) -> None:
        super().extend(followed, pieces)
        weights, hidden = self._weights, followed.features
        if self._config.is_third:
            hidden = self._product(hidden, weights.fc, weights.fc_bias)
        hidden, _ = self._forward(followed.tokens, hidden, pieces, followed.rows)
        self.kernels.keep_last(followed.rows.slots, followed.last, hidden, self._hidden)

    def first(self, tokens: Tokens, pieces: Pieces) -> Guess:
        """The newest pair was computed by `extend`."""
        hidden = self.kernels.fetch(tokens.slots, self._hidden[:, None])
        normed = self.kernels.norm(hidden, self._weights.norm, self._config.norm_eps)
        return Guess(hidden, self._logits(normed, tokens.slots))

    def next(
        self,
        tokens: Tokens,
        state: Tensor | None,
        pieces: Pieces,
        rows: Rows | None = None,
        branches: Branches | None = None,
    ) -> Guess:
        assert state is not None
        hidden, normed = self._forward(tokens, state, pieces, rows, branches)
        return Guess(hidden, self._logits(normed, tokens.slots))

    def _forward(
        self,
        tokens: Tokens,
        hidden: Tensor,
        pieces: Pieces,
        rows: Rows | None,
        branches: Branches | None = None,
    ) -> tuple[Tensor, Normed]:
        """Pairs of the token after each of these and a hidden state [T, hidden] -> hidden states,
        and they under the last norm"""
        config, weights, kernels = self._config, self._weights, self.kernels
        eps, rope = config.norm_eps, config.group.rope
        after = self.tables["tokens"][:, 1:]  # by the position of the token before
        x = kernels.open_pair(
            tokens, after, weights.embedding, weights.embed_norm, hidden, weights.hidden_norm, eps
        )
        normed = Normed(x, None)
        if not config.is_third:
            hidden = self._product(x, weights.fc, weights.fc_bias)
            normed = kernels.norm(hidden, weights.first_norm, eps)
        angles = kernels.turn(standing(tokens, branches), self._frequency, rope.attention_factor)
        plan = kernels.plan(tokens, rows, config.group.heads, branches)
        hidden, *parts = pieces(
            self._kind.run, hidden, *normed, None, tokens.slots, *angles,
            self._kv.pages[0], self._kv.page_table, *weights.layer, weights.norm, *plan,
        )  # fmt: skip
        return hidden, Normed(*parts)

    def _product(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        config = self._config
        return self.kernels.linear(
            Normed(x, None), config.norm_eps, weight, bias, config.hidden_size
        )

    def _logits(self, normed: Normed, slots: Tensor) -> Tensor:
        config, weights = self._config, self._weights
        few = normed.x.new_empty(len(slots), config.draft_vocab)
        self.kernels.logits(normed, config.norm_eps, weights.head, slots, None, few)
        return few if weights.draft_of is None else self.kernels.spread(few, weights.draft_of)


def _as_model(config: EagleConfig, target: ModelConfig) -> ModelConfig:
    """What a layer of it needs to know."""
    return replace(
        target,
        intermediate_size=config.intermediate_size,
        norm_eps=config.norm_eps,
        activation="silu",
        experts=None,
        sparse_layers=(),
    )
