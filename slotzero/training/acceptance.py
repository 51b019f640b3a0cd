"""Acceptance length of a head in greedy decoding, measured without decoding.

It needs sequences that are the target's own greedy text. A draft is then right if it equals the
next token of the sequence, and as long as all earlier drafts were right, the drafted tokens are the
true ones.

The rule: positions are weighted as decoding meets them. Decoding skips the positions inside long
runs of right drafts, so the mean over all positions would be too high.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slotzero.errors import ConfigError
from slotzero.training.head import EagleHead
from slotzero.training.loss import TargetTables
from slotzero.training.samples import Sample, TrainingBatch, whole_batches


def check_walkable(what: str, samples: Sequence[Sample]) -> None:
    if all(len(sample.tokens) - sample.first < 2 for sample in samples):
        raise ConfigError(f"{what}: no answer has two tokens, so there is nothing to draft")


@torch.no_grad()
def acceptance_len(
    head: EagleHead,
    target: TargetTables,
    samples: Sequence[Sample],
    num_drafts: int,
    batch_tokens: int,
) -> float:
    """Return the mean tokens per step, including the target's own: from 1 to num_drafts + 1."""
    emitted: list[int] = []
    for group, batch in whole_batches(samples, batch_tokens, target.lm_head.device):
        accepted = num_accepted(head, target, batch, num_drafts).tolist()  # walked on the host
        for i, row in zip(group, accepted, strict=True):
            emitted += walk(row, samples[i].first, len(samples[i].tokens))
    return sum(emitted) / len(emitted)


def num_accepted(
    head: EagleHead, target: TargetTables, batch: TrainingBatch, num_drafts: int
) -> Tensor:
    """Return [batch, places]: how many drafts of the chain that begins at each place are right."""
    is_right = torch.ones_like(batch.wanted)
    count = torch.zeros_like(batch.tokens)
    unrolled = head.unroll(target.embedding, batch.tokens, batch.features, num_drafts)
    for s, hidden in enumerate(unrolled):
        rows, starts = batch.wanted[:, s + 2 :].nonzero(as_tuple=True)
        hit = torch.zeros_like(is_right)
        drafted = target.drafted(hidden[rows, starts])
        hit[rows, starts] = drafted == batch.tokens[rows, starts + s + 2]
        is_right &= hit
        count += is_right
    return count


def walk(accepted: Sequence[int], first: int, num_tokens: int) -> list[int]:
    """Yield the tokens of each step. Place p knows token p + 1 and drafts from token p + 2 on."""
    emitted = []
    place = first - 1  # prefill generated the answer's first token
    while place + 2 < num_tokens:
        emitted.append(accepted[place] + 1)
        place += emitted[-1]
    return emitted
