"""Detection of steps that hang: what a rank does, for how long, and how long that may take.

It knows keys and seconds, not what a step computes, and cannot end one: it reports a step that
takes too long, with the stacks of all threads, and the server replaces the process.

The rules: a limit is a large multiple of the slowest run of the same sizes, so that neither a long
context nor a busy machine exceeds it; a first run, which may record and compile, has a long one;
and time in which this process did not run does not count.
"""

import logging
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from slotzero.graph import GraphKey
from slotzero.system.stacks import stacks

INTERVAL = 1.0  # seconds between two looks at what runs
FACTOR = 20.0
SHORTEST_LIMIT = 60.0  # seconds
FIRST_LIMIT = 600.0  # seconds for what was not measured yet
ACTION_LIMIT = 3600.0  # seconds for an action of an administrator, which may read a checkpoint
SHARE_OF_RANK_TIMEOUT = 0.75
_log = logging.getLogger("slotzero.engine")


class Work(NamedTuple):
    """The launches of a step."""

    keys: tuple[GraphKey, ...]
    num_rows: int

    def __str__(self) -> str:
        rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
        return f"{', '.join(map(str, self.keys))} with {rows}"


class _Span:
    """A block that is watched; a block inside it is watched in its place."""

    __slots__ = ("_outer", "_start", "_watch", "_work", "limit", "passed", "trouble", "what")

    def __init__(self, watch: "StepWatch", what: str, work: Work | None, limit: float) -> None:
        self._watch, self.what, self._work, self.limit = watch, what, work, limit
        self.passed = 0.0
        self.trouble = ""

    def __str__(self) -> str:
        return self.what if self._work is None else f"{self.what} {self._work}"

    def __enter__(self) -> None:
        self._outer = self._watch.enter(self)
        self._start = time.monotonic()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._watch.leave(self, self._outer)
        if kind is None and self._work is not None:
            seconds = min(time.monotonic() - self._start, self.passed + 2 * INTERVAL)
            self._watch.learn(self.what, self._work, seconds)


class StepWatch:
    def __init__(
        self,
        timeout: float | None = None,
        rank: int = 0,
        rank_timeout: float | None = None,
        ask_others: Callable[[], None] = lambda: None,
    ) -> None:
        """`timeout`: seconds that a step may take; 0 means no limit, None derives it from measured
        steps. `rank_timeout`: seconds after which other ranks give up, if there are any; a step is
        reported before. `ask_others` makes them write their stacks."""
        self._timeout, self._rank, self._ask_others = timeout, rank, ask_others
        self._shortest = SHORTEST_LIMIT
        if rank_timeout is not None:
            self._shortest = min(SHORTEST_LIMIT, SHARE_OF_RANK_TIMEOUT * rank_timeout)
        self._slowest: dict[tuple[str, tuple[GraphKey, ...]], float] = {}
        """Seconds by what was done and sizes; 0.0 after the first run, which is not measured."""
        self._span: _Span | None = None
        self._last: _Span | None = None
        self.latest: Work | None = None
        """The step that was launched last."""
        with _changing:
            _watched.add(self)
        _start_thread()

    def __str__(self) -> str:
        """Return what this rank does, or did last."""
        return str(self._last or "")

    @property
    def overdue(self) -> str:
        """What has taken too long and still does; empty if nothing has."""
        span = self._span
        return "" if span is None else span.trouble

    def doing(
        self, what: str, work: Work | None = None, at_least: float = 0.0
    ) -> AbstractContextManager[None]:
        """Watch a block. A block inside another is watched in its place. `at_least`: seconds that
        it may take even if the limit of a step is lower."""
        limit = self.limit(what, work)
        return _Span(self, what, work, max(limit, at_least) if limit else 0.0)

    def enter(self, span: _Span) -> _Span | None:
        """Watch a span, and return the one that was watched before."""
        outer, self._span, self._last = self._span, span, span
        return outer

    def leave(self, span: _Span, outer: _Span | None) -> None:
        self._span = outer
        if span.trouble:
            _log.warning("rank %d: %s has ended", self._rank, span)

    def limit(self, what: str, work: Work | None) -> float:
        """Return how many seconds this may take; 0 means no limit."""
        if self._timeout is not None:
            return self._timeout
        slowest = None if work is None else self._slowest.get((what, work.keys))
        return max(self._shortest, FACTOR * slowest) if slowest else FIRST_LIMIT

    def learn(self, what: str, work: Work, seconds: float) -> None:
        slowest = self._slowest.get((what, work.keys))
        if slowest is None or seconds > slowest:
            self._slowest[what, work.keys] = 0.0 if slowest is None else seconds

    def pass_time(self, seconds: float) -> None:
        """Add elapsed time, at most two intervals: in a longer gap this process did not run."""
        span = self._span
        if span is None:
            return
        span.passed += min(seconds, 2 * INTERVAL)
        if 0 < span.limit <= span.passed and not span.trouble:
            trouble = f"{span} on rank {self._rank} has taken more than {span.limit:g} s"
            span.trouble = f"{trouble} (see --step-timeout)"
            _log.error("%s; stacks of all threads:\n%s", trouble, stacks())
            self._ask_others()


_watched: weakref.WeakSet[StepWatch] = weakref.WeakSet()
_changing = threading.Lock()
"""Held while `_watched` or `_threads` changes, or is read."""
_threads: list[threading.Thread] = []


def _start_thread() -> None:
    """Start the one thread that watches all engines of this process."""
    with _changing:
        if not _threads or not _threads[0].is_alive():
            _threads[:] = [threading.Thread(target=_look, name="step watch", daemon=True)]
            _threads[0].start()


def _look() -> None:
    before = time.monotonic()
    while True:
        time.sleep(INTERVAL)
        now = time.monotonic()
        _pass_time(now - before)
        before = now


def _pass_time(seconds: float) -> None:
    with _changing:
        watches = list(_watched)
    for watch in watches:
        watch.pass_time(seconds)
