"""One vector per row, computed in a prefill step from hidden states or logits.

A vector is complete in the step that computes the last token of its prompt; before that it is
overwritten. It does not know what a vector is for, or which requests want one.

The rule: a mean is that of all tokens of the slot, also if several steps compute them, and has the
same bits however they are divided. So a slot's tokens are summed from position 0 on, in float64,
where sums of hidden states that are multiples of 2**-24 are exact in any order.
"""

import torch
from torch import Tensor

from slotzero.graph import Registry
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Normed, Rows, Tokens
from slotzero.models.pooling import Pooling

POOLED, POOLED_SUMS = "pooled", "pooled_sums"
LABEL_IDS = "label_ids"
BLOCK = 1024  # tokens of which hidden states are in float64 at once
STEPS = 2.0**24  # multiples of 1 / STEPS below 2**29 are exact in float64


class Pooler:
    """Writes the vector of each row; zeros for padding."""

    writes = (POOLED,)

    def __init__(
        self, registry: Registry, kernels: Kernels, pooling: Pooling, max_rows: int, logits: Tensor
    ) -> None:
        """`max_rows`: also the number of slots; `logits` [rows, vocab]: of the step's last tokens,
        when `write` is called."""
        self._kernels, self._pooling, self._logits = kernels, pooling, logits
        self._vectors = registry.output(POOLED, (max_rows, pooling.size), torch.float32)
        self._sums: Tensor | None = None
        self._labels: Tensor | None = None
        if pooling.kind == "mean":
            shape = max_rows + 1, pooling.size
            sums = torch.zeros(shape, dtype=torch.float64, device=registry.device)
            self._sums = registry.table(POOLED_SUMS, sums)
        elif pooling.kind == "labels":
            labels = torch.tensor(pooling.labels, dtype=torch.long, device=registry.device)
            self._labels = registry.constant(LABEL_IDS, labels)

    def write(self, tokens: Tokens, rows: Rows, normed: Normed) -> None:
        """Write the vectors of `rows`, given the hidden states of `tokens` under the final norm."""
        num_rows = len(rows.slots)
        if self._labels is not None:
            vectors = self._logits[:num_rows][:, self._labels].float()
        elif self._sums is not None:
            vectors = self._means(self._sums, tokens, rows, normed)
        else:
            last = (rows.ends - 1).clamp_min(0)
            vectors = self._kernels.apply_norm(normed.select(last)).float()
        self._vectors[:num_rows].copy_(vectors.masked_fill((rows.slots == 0)[:, None], 0))

    def _means(self, sums: Tensor, tokens: Tokens, rows: Rows, normed: Normed) -> Tensor:
        """Add the step's tokens to the sums of their slots; return each row's mean so far."""
        slots = rows.slots.long()
        earlier = sums[slots].masked_fill((rows.starts == 0)[:, None], 0)
        sums.index_copy_(0, slots, earlier)  # of slot 0, which several rows may have: zeros again
        both = self._kernels.apply_norm(normed), tokens.slots.long()
        for part, of_part in zip(*(torch.split(one, BLOCK) for one in both), strict=True):
            exact = part.double().mul_(STEPS).round_().div_(STEPS)
            sums.index_add_(0, of_part, exact.masked_fill_((of_part == 0)[:, None], 0))
        return (sums[slots] / (rows.starts + rows.counts)[:, None]).float()
