"""The loss of a head: soft cross entropy with the target's distribution.

This module knows the target only as two frozen tables and its hidden states. The output table is
large, so logits exist only for some rows at a time, and gradients are computed with them.

The rule: token j is predicted by the target's state at j - 1 and, in pass s, by the head's row
j - s - 2.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.errors import ConfigError
from slotzero.training.head import EagleHead
from slotzero.training.samples import TrainingBatch

PASS_DECAY = 0.8
"""Weight of a pass relative to the one before, since later drafts are reached less often."""
_MAX_LOGITS = 2**27  # at once: half a gigabyte of float32


@final
class TargetTables:
    """The target's two tables, and the rows of the second that the head may draft."""

    def __init__(self, head: EagleHead, embedding: Tensor, lm_head: Tensor) -> None:
        shape = (head.config.vocab_size, head.config.hidden_size)
        for name, table in (("embedding", embedding), ("lm_head", lm_head)):
            if table.shape != shape:
                raise ConfigError(f"{name} is {list(shape)}, got {list(table.shape)}")
        self.embedding = embedding.detach()
        self.lm_head = lm_head.detach()
        self.rows = self.lm_head
        self._ids = head.draft_ids
        if self._ids is not None:
            self._ids = self._ids.to(lm_head.device)
            self.rows = self.lm_head[self._ids]
            self._is_drafted = torch.zeros(shape[0], dtype=torch.bool, device=lm_head.device)
            self._is_drafted[self._ids] = True

    def drafted(self, hidden: Tensor) -> Tensor:
        """Return the token ids that a head with these outputs drafts: [n, hidden] -> [n]."""
        best = _best(hidden, self.rows)
        return best if self._ids is None else self._ids[best]

    def learnable(self, batch: TrainingBatch) -> Tensor:
        """Return [batch, places]: the `wanted` tokens that the head is able to draft."""
        if self._ids is None:
            return batch.wanted
        return batch.wanted & self._is_drafted[batch.tokens]


class Distilled(NamedTuple):
    loss: Tensor  # mean over passes, by their weights
    hits: Tensor  # [passes]: how often head and target agree on the most likely token
    counts: list[int]  # of how many


def distil(
    head: EagleHead, target: TargetTables, batch: TrainingBatch, num_passes: int
) -> Distilled:
    learnable = target.learnable(batch)
    loss = torch.zeros((), device=batch.tokens.device)
    hits, counts = [], []
    unrolled = head.unroll(target.embedding, batch.tokens, batch.features, num_passes)
    for s, hidden in enumerate(unrolled):
        rows, starts = learnable[:, s + 2 :].nonzero(as_tuple=True)
        losses, hit = _SoftCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden[rows, starts], batch.final[rows, starts + s + 1], target.rows
        )
        loss = loss + PASS_DECAY**s * losses.sum() / max(len(rows), 1)
        hits.append(hit.sum())
        counts.append(len(rows))
    total = sum(PASS_DECAY**s for s in range(num_passes))
    return Distilled(loss / total, torch.stack(hits), counts)


@final
class _SoftCrossEntropy(torch.autograd.Function):
    """(hidden [n, h], final [n, h], rows [v, h]) -> losses [n], is the most likely equal [n]."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, final: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        losses = hidden.new_zeros(len(hidden), dtype=torch.float32)
        slopes = torch.zeros_like(hidden)
        hits = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        compare = _compare_fused() if hidden.is_cuda else _compare
        for piece in _pieces(hidden, rows):
            own, theirs = (_product(x[piece], rows) for x in (hidden, final))
            losses[piece], hits[piece], slope = compare(own, theirs)
            slopes[piece] = _product(slope, rows.T)
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(hits)
        return losses, hits

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor, None, None]:
        (own,) = ctx.saved_tensors
        return own * slopes[0][:, None], None, None


def _compare(own: Tensor, theirs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, v] of both -> losses [n], is the most likely equal [n], slopes of own [n, v]"""
    dtype, own, theirs = own.dtype, own.float().log_softmax(-1), theirs.float().softmax(-1)
    hits = own.argmax(-1) == theirs.argmax(-1)
    return -(theirs * own).sum(-1), hits, (own.exp() - theirs).to(dtype)


@cache
def _compare_fused() -> Any:
    """Return the compiled form; importing the compiler takes seconds."""
    return torch.compile(_compare, dynamic=True)


def _pieces(hidden: Tensor, rows: Tensor) -> Iterator[slice]:
    size = max(_MAX_LOGITS // len(rows), 1)
    return (slice(start, start + size) for start in range(0, len(hidden), size))


def _product(hidden: Tensor, rows: Tensor) -> Tensor:
    """Compute logits in the rows' dtype like the engine, regardless of autocast."""
    with torch.autocast(hidden.device.type, enabled=False):
        return F.linear(hidden.to(rows.dtype), rows)


def _best(hidden: Tensor, rows: Tensor) -> Tensor:
    best = torch.zeros(len(hidden), dtype=torch.int64, device=hidden.device)
    for piece in _pieces(hidden, rows):
        best[piece] = _product(hidden[piece], rows).argmax(-1)
    return best
