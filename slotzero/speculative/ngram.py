"""Guesses by looking back: what followed the last time that the newest tokens stood together.

It has no weights and no KV. The longest match wins, and of equals the latest.
"""

from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.types_speculation import DraftRows
from slotzero.speculative.drafter import Drafter

SHORTEST, LONGEST = 2, 4  # tokens that must stand together


class NgramDrafter(Drafter):
    name = "ngram"

    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        tokens = self.tables["tokens"]
        return self.kernels.propose_ngrams(
            DraftRows(slots, length, num), tokens, steps, SHORTEST, LONGEST
        )
