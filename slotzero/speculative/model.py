"""A small model of the same vocabulary as drafter.

Location i of its KV holds the token at i, as in any model: `extend` computes what has become
certain once more, and drafting begins with the newest token.
"""

from collections.abc import Mapping

from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels, Tokens
from slotzero.models.decoder import Batch, Decoder, KvPages
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import Followed
from slotzero.speculative.drafter import Drafter


class ModelDrafter(Drafter):
    name = "draft"

    def __init__(
        self, decoder: Decoder, kernels: Kernels, tables: SlotTables, kv: Mapping[str, KvPages]
    ) -> None:
        super().__init__(kernels, tables)
        self.groups = decoder.config.groups
        self._decoder, self._kv = decoder, kv

    def extend(self, followed: Followed, pieces: Pieces) -> None:
        tables = self.tables
        batch = Batch(followed.tokens, tables["tokens"], tables["prompt_len"], followed.rows)
        self._decoder.forward(batch, self._kv, pieces)

    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        tables, config = self.tables, self._decoder.config
        aims = self.kernels.aim(slots, length, num, steps, behind=0)
        for wanted, position, after in zip(*aims, strict=True):
            batch = Batch(Tokens(wanted, position), tables["tokens"], tables["prompt_len"], None)
            normed = self._decoder.forward(batch, self._kv, pieces)
            logits = normed.x.new_empty(len(slots), config.vocab_size)
            self._decoder.logits(normed, wanted, logits)
            self.choose(logits, wanted, after)
        return num
