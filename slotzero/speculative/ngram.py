"""N-gram drafter: drafts the tokens that followed an earlier occurrence of the newest tokens.

It has no weights and no KV cache. The longest match wins, and among equal ones the latest.
"""

from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.types_speculation import DraftRows
from slotzero.speculative.drafter import Drafter

SHORTEST, LONGEST = 2, 4  # length of a match in tokens


class NgramDrafter(Drafter):
    name = "ngram"

    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        tokens = self.tables.tokens
        return self.kernels.propose_ngrams(
            DraftRows(slots, length, num), tokens, steps, SHORTEST, LONGEST
        )
