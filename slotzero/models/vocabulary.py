"""The vocabulary: token embedding and vocabulary head, or one rank's part of them.

All code that embeds tokens or computes logits, drafters included, goes through this class, so only
this file knows how the vocabulary is split over ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Normed, PairNorms, Tokens
from slotzero.kernels.weights import LinearWeight
from slotzero.models.stacks import vocabulary_part


@dataclass(frozen=True)
class Vocabulary:
    size: int
    embedding: LinearWeight  # [size, hidden], or the rank's part of it
    head: LinearWeight
    kernels: Kernels
    ranks: Ranks = ALONE

    def embed(
        self, tokens: Tokens, table: Tensor, scale: float, norm: Tensor | None, eps: float
    ) -> tuple[Tensor, Normed]:
        """Embed every token; return the residual of the first layer, as is and under the norm."""
        if not self.ranks.attention.is_distributed:
            return self.kernels.embed(tokens, table, self.embedding, scale, norm, eps)
        residual = self._embed(tokens, table)
        if scale != 1:
            residual = residual * scale
        return residual, self.kernels.norm(residual, norm, eps)

    def embed_pair(self, tokens: Tokens, table: Tensor, hidden: Tensor, norms: PairNorms) -> Tensor:
        """Return token embeddings and hidden states side by side, each under its norm.

        See Kernels.embed_pair.
        """
        if not self.ranks.attention.is_distributed:
            return self.kernels.embed_pair(tokens, table, self.embedding, hidden, norms)
        sides = (self._embed(tokens, table), norms.embed), (hidden, norms.hidden)
        normed = [self.kernels.norm(side, norm, norms.eps) for side, norm in sides]
        return torch.cat([self.kernels.apply_norm(side) for side in normed], dim=-1)

    def logits(self, x: Normed, slots: Tensor, softcap: float | None, out: Tensor) -> None:
        """Write logits to `out` [rows, size]; rows of slot 0 get zeros."""
        if not self.ranks.attention.is_distributed:
            self.kernels.logits(x, self.head, slots, softcap, out)
            return
        part = out.new_empty(len(slots), vocabulary_part(self.size, self.ranks.attention))
        self.kernels.logits(x, self.head, slots, softcap, part)
        out.copy_(self.ranks.join(part)[:, : self.size])

    def head_of(self, ids: Tensor) -> Tensor:
        """Return the rows of the vocabulary head for these tokens, [ids, hidden]."""
        return self._rows(ids, self.head)

    def _embed(self, tokens: Tokens, table: Tensor) -> Tensor:
        return self._rows(table[tokens.slots, tokens.positions], self.embedding)

    def _rows(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        if not self.ranks.attention.is_distributed:
            return self.kernels.embed_ids(ids, weight)
        part = vocabulary_part(self.size, self.ranks.attention)
        local = ids - self.ranks.rank * part
        is_local = (local >= 0) & (local < part)
        rows = self.kernels.embed_ids(local * is_local, weight)
        return self.ranks.sum(rows * is_local[:, None])
