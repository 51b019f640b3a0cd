"""The workers of one engine: one per grammar, in the order of their last use.

This module counts and orders workers. It does not know why a worker is removed; supervisor.py does.
The rule: a worker in the queue has no process yet; any other has one until it is removed.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from typing import final

from slotzero.grammars.limits import GrammarLimits
from slotzero.grammars.messages import COMPILE, GrammarSource
from slotzero.grammars.process import GrammarWorker

_MAX_COMPILING = 4
_MAX_IDLE = 32
_MAX_RUNNING = 64  # workers with answers; reusing an idle worker is always allowed
_PROCESS_BYTES = 1 << 20  # memory of an idle process, even if its grammar is tiny


@final
class GrammarWorkers(Mapping[GrammarSource, GrammarWorker]):
    def __init__(self) -> None:
        self.queue: deque[GrammarWorker] = deque()
        """Workers that have no process yet."""
        self._workers: OrderedDict[GrammarSource, GrammarWorker] = OrderedDict()
        """Ordered by the time at which a worker was added or became idle; the first is removed
        first."""
        self._started_at = 0.0
        """When the last worker was started."""

    def __getitem__(self, source: GrammarSource) -> GrammarWorker:
        return self._workers[source]

    def __iter__(self) -> Iterator[GrammarSource]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def is_busy(self) -> bool:
        """Whether a grammar is queued or being compiled, or a mask is being computed."""
        return any(worker.unanswered for worker in self.values()) or bool(self.queue)

    @property
    def idle(self) -> list[GrammarWorker]:
        """Workers without answers, the least recently used first."""
        return [worker for worker in self.values() if not worker.answers]

    @property
    def in_use(self) -> list[GrammarWorker]:
        """Workers with answers, the queue included."""
        return [worker for worker in self.values() if worker.answers]

    @property
    def idle_bytes(self) -> int:
        return sum(max(worker.memory, _PROCESS_BYTES) for worker in self.idle)

    def add(self, worker: GrammarWorker) -> None:
        """Queue a worker; one that replaces another is queued first."""
        self._workers[worker.source] = worker
        if worker.is_restart:
            self.queue.appendleft(worker)
        else:
            self.queue.append(worker)

    def became_idle(self, worker: GrammarWorker) -> None:
        self._workers.move_to_end(worker.source)

    def remove(self, worker: GrammarWorker) -> bool:
        """Remove a worker, and return whether it has a process to kill."""
        del self._workers[worker.source]
        if worker in self.queue:
            self.queue.remove(worker)
            return False
        return True

    def numbered(self, number: int) -> GrammarWorker | None:
        """Return the worker with this number, unless it was removed."""
        return next((worker for worker in self.values() if worker.number == number), None)

    def next_to_start(self, limits: GrammarLimits) -> GrammarWorker | None:
        """Return the head of the queue if it may be started now, else None."""
        if not self.queue:
            return None
        worker = self.queue[0]
        if sum(COMPILE in other.unanswered for other in self.values()) >= _MAX_COMPILING:
            return None
        return None if self._is_full(limits) and not worker.is_restart else worker

    def started(self, now: float) -> None:
        """Remove the head of the queue, which has been started."""
        self.queue.popleft()
        self._started_at = now

    def stuck(self, seconds: float) -> list[GrammarWorker]:
        """Return the workers queued for at least `seconds`, if none was started in this time."""
        latest = time.monotonic() - seconds
        if self._started_at > latest:
            return []
        return [worker for worker in self.queue if worker.queued_at <= latest]

    def late(self, seconds: float) -> list[GrammarWorker]:
        """Return the workers that have been working on one reply for at least `seconds`."""
        latest = time.monotonic() - seconds
        return [worker for worker in self.values() if worker.unanswered and worker.since <= latest]

    def seconds_left(self, seconds: float) -> float:
        """Return the time until some worker has been working on one reply for `seconds`."""
        since = min(
            (worker.since for worker in self.values() if worker.unanswered), default=math.inf
        )
        return max(0.0, since + seconds - time.monotonic())

    def surplus(self, limits: GrammarLimits) -> GrammarWorker | None:
        """Return the idle worker to remove next, if they are too many or too large, else None."""
        idle = self.idle
        if len(idle) > _MAX_IDLE or self.idle_bytes > limits.memory:
            return idle[0]
        return None

    def largest_if_too_large(self, limits: GrammarLimits) -> GrammarWorker | None:
        """Return the largest worker in use, if all in use exceed their limit, else None."""
        in_use = self.in_use
        if sum(worker.memory for worker in in_use) <= limits.max_in_use:
            return None
        return max(in_use, key=lambda worker: worker.memory)

    def _is_full(self, limits: GrammarLimits) -> bool:
        """Return whether the workers in use leave no room for another."""
        in_use = self.in_use
        compiled = [worker.memory for worker in in_use if worker.is_compiled]
        if compiled and sum(compiled) >= limits.max_in_use:
            return True
        return len(in_use) - len(self.queue) >= _MAX_RUNNING
