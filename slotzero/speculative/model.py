"""A small model with the same vocabulary as drafter.

Position i of its KV cache holds the token at i, as in any model: `extend` computes confirmed tokens
with the draft model too, and drafting begins with the newest token.
"""

from collections.abc import Mapping

from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Branches, PagedKv, Rows, Tokens
from slotzero.models.decoder import Decoder
from slotzero.models.model import DecoderBatch
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import DrafterInputs
from slotzero.speculative.drafter import LogitsDrafter, Prediction


class ModelDrafter(LogitsDrafter):
    name = "draft"
    behind = 0

    def __init__(
        self,
        decoder: Decoder,
        kernels: Kernels,
        tables: SlotTables,
        pending: Tensor,
        kv: Mapping[str, PagedKv],
    ) -> None:
        super().__init__(kernels, tables, pending)
        self.groups, self.writes = decoder.config.groups, decoder.writes
        self._decoder, self._kv = decoder, kv

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None:
        super().extend(inputs, pieces)
        self._decoder.forward(self._batch(inputs.tokens, inputs.rows, None), self._kv, pieces)

    def first(self, tokens: Tokens, pieces: Pieces) -> Prediction:
        return self.next(tokens, None, pieces)

    def next(
        self,
        tokens: Tokens,
        state: Tensor | None,
        pieces: Pieces,
        rows: Rows | None = None,
        branches: Branches | None = None,
    ) -> Prediction:
        normed = self._decoder.forward(self._batch(tokens, rows, branches), self._kv, pieces)
        logits = normed.x.new_empty(len(tokens.slots), self._decoder.config.vocab_size)
        self._decoder.logits(normed, tokens.slots, logits)
        return Prediction(None, logits)

    def _batch(self, tokens: Tokens, rows: Rows | None, branches: Branches | None) -> DecoderBatch:
        tables = self.tables
        return DecoderBatch(tokens, tables.tokens, tables.sampling.prompt_len, rows, branches)
