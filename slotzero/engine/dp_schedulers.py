"""The schedulers of an engine: one, or with data-parallel attention one for each rank.

Each scheduler has its own slots, pages and prefix cache, and plans as if it were alone. This module
joins their plans into one step, which all ranks launch alike. The rules: if one rank prefills, no
rank verifies drafts; the drafter catches up on all ranks or on none; a request stays on its DP
rank, which is the one that has its prompt cached, unless that rank is crowded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import overload

from slotzero.engine.router import RouteLoad, Router
from slotzero.engine.scheduler import Scheduler
from slotzero.request import Request
from slotzero.step import Step


class DpSchedulers(Sequence[Scheduler]):
    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = tuple(schedulers)
        self._router = Router(len(schedulers), times=1, crowd=8)

    @overload
    def __getitem__(self, index: int) -> Scheduler: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Scheduler]: ...
    def __getitem__(self, index: int | slice) -> Scheduler | Sequence[Scheduler]:
        return self._schedulers[index]

    def __len__(self) -> int:
        return len(self._schedulers)

    def __iter__(self) -> Iterator[Scheduler]:
        return iter(self._schedulers)

    @property
    def has_work(self) -> bool:
        return any(scheduler.has_work for scheduler in self)

    @property
    def num_running(self) -> int:
        return sum(scheduler.num_running for scheduler in self)

    @property
    def most_running(self) -> int:
        """Number of running requests on the busiest rank."""
        return max(scheduler.num_running for scheduler in self)

    @property
    def num_waiting(self) -> int:
        return sum(scheduler.num_waiting for scheduler in self)

    @property
    def num_preemptions(self) -> int:
        return sum(scheduler.num_preemptions for scheduler in self)

    def of(self, request: Request) -> Scheduler:
        return self[request.dp_rank]

    def add(self, request: Request) -> None:
        if len(self) > 1:
            prompt = request.prompt_token_ids
            loads = {i: _load(scheduler, len(prompt)) for i, scheduler in enumerate(self)}
            request.dp_rank = self._router.choose(prompt, loads)
        self.of(request).add(request)

    def plan(self, width: int = 1) -> Step | None:
        """Plan the next step of all ranks, and advance its requests. Return None if no request can
        run before the next commit or add.

        `width` applies to a step in which every row decodes: above 1, the step verifies drafts.
        """
        choices = [scheduler.choose(width) for scheduler in self]
        if any(choice.prefilling for choice in choices):
            width = 1
        chosen = zip(self, choices, strict=True)
        step = Step(tuple(scheduler.advance(choice, width) for scheduler, choice in chosen), width)
        if not step.rows:
            return None
        most_behind = self[0].config.most_behind
        if most_behind is not None:
            step = _with_drafter(step, most_behind)
        for scheduler, rows in zip(self, step.rows_by_dp_rank, strict=True):
            scheduler.remember(rows)
        return step

    def allow_admission(self, admits: bool) -> None:
        """Set whether waiting requests may begin."""
        for scheduler in self:
            scheduler.admits = admits

    def abandon(self) -> None:
        for scheduler in self:
            scheduler.abandon()

    def check(self) -> None:
        for scheduler in self:
            scheduler.check()


def _load(scheduler: Scheduler, prompt_len: int) -> RouteLoad:
    """Return the load of a scheduler. Without pages for the prompt, it counts as without slots."""
    needed = scheduler.ledger.pages_for(prompt_len)
    has_pages = all(num >= needed for num in scheduler.ledger.num_available)
    slots = scheduler.slots.num_slots if has_pages else 0
    return RouteLoad(0, scheduler.num_running, scheduler.num_waiting, slots)


def _with_drafter(step: Step, most_behind: int) -> Step:
    """Decide whether the drafter runs. It skips plain decode steps; before any other step, and when
    it is `most_behind` tokens behind, it catches up."""
    behind = max(row.request.num_behind for row in step.rows)
    catches_up = behind > 0 if not step.is_decode else behind == most_behind
    for row in step.rows:
        if catches_up:
            row.request.num_behind = 0
        row.request.num_behind += step.is_decode
    return replace(step, catches_up=catches_up)
