"""The training loop: batches, gradients, a schedule, and reports.

This module does not know where samples come from or where the head is saved. On CUDA it computes in
bfloat16 with float32 weights, on a CPU in float32.

The rule: the learning rate follows the budget of steps or minutes, whichever is used up first, so
that training with a time limit ends with the same decay as training with a step limit.
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from slotzero.errors import ConfigError
from slotzero.system.progress import training_bar
from slotzero.training.acceptance import acceptance_len, check_walkable
from slotzero.training.head import EagleHead
from slotzero.training.loss import Distilled, TargetTables, distil
from slotzero.training.samples import MIN_LEN, Sample, check_samples, training_batches

NUM_DRAFTS = 4
"""Draft tokens per chain for the reported acceptance length."""
_WARMUP = 0.03  # fraction of the budget
_LEAST_RATE = 0.02  # fraction of the learning rate at both ends
_MAX_GRADIENT = 0.5


class Report(NamedTuple):
    step: int
    seconds: float
    loss: float  # loss and accuracy are means since the previous report
    accuracy: list[float]  # by pass: how often head and target agree on the most likely token
    acceptance_len: float  # of greedy chains of NUM_DRAFTS on held-out samples


def train(
    head: EagleHead,
    embedding: Tensor,
    lm_head: Tensor,
    samples: Sequence[Sample],
    held_out: Sequence[Sample],
    *,
    max_steps: int | None = None,
    max_minutes: float | None = None,
    batch_tokens: int = 16384,
    max_len: int = 512,
    num_passes: int = NUM_DRAFTS,
    lr: float = 3e-3,
    seed: int = 0,
    report_every: int = 200,
    show_progress: bool = True,
    report: Callable[[Report], None] = lambda report: None,
) -> list[Report]:
    """Train the head, which moves to the tables' device, and return all reports.

    `embedding` and `lm_head` are the target's, [vocab, hidden]; `held_out` is its greedy text.
    """
    for name, value, least in (
        ("max_len", max_len, MIN_LEN),
        ("num_passes", num_passes, 1),
        ("report_every", report_every, 1),
    ):
        if value < least:
            raise ConfigError(f"{name} must be at least {least}, got {value}")
    for what, given in (("samples", samples), ("held_out", held_out)):
        check_samples(what, given, head.config.hidden_size)
    check_walkable("held_out", held_out)
    device = lm_head.device
    head.to(device=device, dtype=torch.float32)
    target = TargetTables(head, embedding, lm_head)
    optimizers = _optimizers(head, lr)
    batches = training_batches(samples, batch_tokens, max_len, seed, device)
    budget, tally, reports = Budget(max_steps, max_minutes), _Tally(), list[Report]()
    step = 0

    def make_report() -> None:
        with _precision(device):
            length = acceptance_len(head, target, held_out, NUM_DRAFTS, batch_tokens)
        reports.append(Report(step, budget.seconds, *tally.take(), length))
        report(reports[-1])

    with training_bar(show_progress) as progress:
        while step == 0 or budget.used(step) < 1:
            _set_rate(optimizers, lr * rate(budget.used(step)))
            with _precision(device):
                distilled = distil(head, target, next(batches), num_passes)
            _descend(head, optimizers, distilled.loss)
            tally.add(distilled)
            step += 1
            if step % report_every == 0:
                make_report()
            progress(step, budget.used(step), _seen(reports))
        if not reports or reports[-1].step != step:
            make_report()
    return reports


def _seen(reports: Sequence[Report]) -> str:
    if not reports:
        return ""
    return f", loss {reports[-1].loss:.3f}, {reports[-1].acceptance_len:.2f} tokens"


@final
class Budget:
    def __init__(self, max_steps: int | None, max_minutes: float | None) -> None:
        if max_steps is None and max_minutes is None:
            raise ConfigError("no limit of training: give max_steps or max_minutes")
        for name, value in (("max_steps", max_steps), ("max_minutes", max_minutes)):
            if value is not None and value <= 0:
                raise ConfigError(f"{name} must be above 0, got {value}")
        self._max_steps = max_steps or math.inf
        self._max_seconds = 60 * (max_minutes or math.inf)
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def used(self, num_steps: int) -> float:
        """Fraction of the budget that is used; 1 or more when it is used up."""
        return max(num_steps / self._max_steps, self.seconds / self._max_seconds)


def rate(share: float) -> float:
    """Return the factor on the learning rate after this fraction of the budget: a linear warm-up,
    then a cosine decay."""
    cosine = 0.5 * (1 + math.cos(math.pi * share))
    return max(min(share / _WARMUP, cosine), _LEAST_RATE)


@final
class _Tally:
    """Sums on the device. Reading them waits for the device, so they are read only for reports."""

    def __init__(self) -> None:
        self._made: list[Distilled] = []

    def add(self, one: Distilled) -> None:
        self._made.append(Distilled(one.loss.detach(), one.hits, one.counts))

    def take(self) -> tuple[float, list[float]]:
        losses, hits, counts = zip(*self._made, strict=True)
        self._made.clear()
        totals = torch.stack(hits).sum(0).tolist()
        counted = (max(sum(by_pass), 1) for by_pass in zip(*counts, strict=True))
        accuracy = [hit / count for hit, count in zip(totals, counted, strict=True)]
        return torch.stack(losses).mean().item(), accuracy


def _precision(device: torch.device) -> torch.autocast:
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _optimizers(head: EagleHead, lr: float) -> list[torch.optim.Optimizer]:
    """Return the optimizers: Muon for matrices, with AdamW's learning rate, and AdamW for norms."""
    matrices = [p for p in head.parameters() if p.dim() == 2]
    rest = [p for p in head.parameters() if p.dim() != 2]
    return [
        torch.optim.Muon(matrices, lr=lr, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95)),
    ]


def _set_rate(optimizers: Sequence[torch.optim.Optimizer], lr: float) -> None:
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = lr


def _descend(head: EagleHead, optimizers: Sequence[torch.optim.Optimizer], loss: Tensor) -> None:
    head.zero_grad(set_to_none=True)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.nn.utils.clip_grad_norm_(head.parameters(), _MAX_GRADIENT)
    for optimizer in optimizers:
        optimizer.step()
