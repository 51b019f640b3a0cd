"""Tokens in and tokens out: the embedding and the vocabulary head, of which a rank may have a part.

Whoever embeds tokens or wants logits asks here, the drafters included: what the ranks exchange for
it is nobody else's business.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import LinearWeight, Normed, PairNorms, Tokens
from slotzero.models.shards import vocabulary_part


@dataclass(frozen=True)
class Vocabulary:
    size: int
    embedding: Tensor  # packed [size, hidden], or the rank's part of it
    head: Tensor
    kernels: Kernels
    ranks: Ranks = ALONE

    def embed(
        self, tokens: Tokens, table: Tensor, scale: float, norm: Tensor | None, eps: float
    ) -> tuple[Tensor, Normed]:
        """Looks up and embeds every token -> what the first layer begins with, and its RMSNorm."""
        if not self.ranks.attention.is_distributed:
            return self.kernels.embed(tokens, table, self._weight(self.embedding), scale, norm, eps)
        residual = self._embedded(tokens, table)
        if scale != 1:
            residual = residual * scale
        return residual, self.kernels.norm(residual, norm, eps)

    def open_pair(
        self,
        tokens: Tokens,
        table: Tensor,
        embed_norm: Tensor | None,
        hidden: Tensor,
        hidden_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        """See Kernels.open_pair."""
        if not self.ranks.attention.is_distributed:
            norms = PairNorms(embed_norm, hidden_norm, eps)
            return self.kernels.embed_pair(
                tokens, table, self._weight(self.embedding), hidden, norms
            )
        sides = (self._embedded(tokens, table), embed_norm), (hidden, hidden_norm)
        normed = [self.kernels.norm(side, norm, eps) for side, norm in sides]
        return torch.cat([self.kernels.apply_norm(side) for side in normed], dim=-1)

    def logits(
        self,
        x: Normed,
        slots: Tensor,
        softcap: float | None,
        out: Tensor,
    ) -> None:
        """Into out [rows, size]; zeros for rows of slot 0"""
        if not self.ranks.attention.is_distributed:
            self.kernels.logits(x, self._weight(self.head), slots, softcap, out)
            return
        part = out.new_empty(len(slots), vocabulary_part(self.size, self.ranks.attention))
        self.kernels.logits(x, self._weight(self.head), slots, softcap, part)
        out.copy_(self.ranks.join(part)[:, : self.size])

    def head_of(self, ids: Tensor) -> Tensor:
        """Rows of the head, [ids, hidden]"""
        return self._rows(ids, self.head)

    def _weight(self, weight: Tensor) -> LinearWeight:
        return LinearWeight(weight, None, vocabulary_part(self.size, self.ranks.attention))

    def _embedded(self, tokens: Tokens, table: Tensor) -> Tensor:
        return self._rows(table[tokens.slots, tokens.positions], self.embedding)

    def _rows(self, ids: Tensor, weight: Tensor) -> Tensor:
        if not self.ranks.attention.is_distributed:
            return self.kernels.embed_ids(ids, self._weight(weight))
        part = vocabulary_part(self.size, self.ranks.attention)
        local = ids - self.ranks.rank * part
        is_ours = (local >= 0) & (local < part)
        rows = self.kernels.embed_ids(local * is_ours, self._weight(weight))
        return self.ranks.sum(rows * is_ours[:, None])
