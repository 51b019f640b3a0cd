"""Progress on standard error: bars on a terminal, and in a log one line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY = 10.0  # seconds between two lines of a log


class Recorded(Protocol):
    """A size that was just captured."""

    @property
    def key(self) -> object: ...


Told = Callable[[str, int, int], None]
"""Called with a stage of loading (kernels, weights, recording), how much of it is done, and how
much there is; 0 where that is not known."""


def not_told(stage: str, done: int, total: int) -> None:
    pass


@contextmanager
def weights_bar(
    shown: bool, name: str, told: Told = not_told
) -> Iterator[Callable[[int, int], None]]:
    with _bar(shown) as bar:
        task = bar.add_task(f"loading {name}", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            told("weights", done, total)

        yield update


@contextmanager
def recording_bar(
    shown: bool, backend: str, num_sizes: int, told: Told = not_told
) -> Iterator[Callable[[Recorded], None]]:
    with _bar(shown) as bar:
        task = bar.add_task(f"recording on {backend}", total=num_sizes)
        num_recorded = 0
        told("recording", 0, num_sizes)

        def seen(record: Recorded) -> None:
            nonlocal num_recorded
            num_recorded += 1
            bar.update(task, advance=1, description=f"recorded {record.key}")
            told("recording", num_recorded, num_sizes)

        yield seen


@contextmanager
def prompts_bar(shown: bool, num_prompts: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; call it with (finished answers, tokens generated) as they grow."""
    with _bar(shown) as bar:
        task = bar.add_task("generating", total=num_prompts)
        made = 0

        def update(finished: int, tokens: int) -> None:
            nonlocal made
            made += tokens
            bar.update(task, advance=finished, description=f"generating, {made} tokens")

        yield update


@contextmanager
def training_bar(shown: bool) -> Iterator[Callable[[int, float, str], None]]:
    """Show a bar; call it with the steps done, the share of the budget, and the last result."""
    with _bar(shown) as bar:
        task = bar.add_task("training", total=1.0)

        def update(step: int, share: float, seen: str) -> None:
            bar.update(task, completed=share, description=f"training, step {step}{seen}")

        yield update


@contextmanager
def certify_bar(shown: bool, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a bar; call it with what was just tried. Without a total, it only shows activity."""
    with _bar(shown) as bar:
        task = bar.add_task("recording", total=total)

        def tried(what: str) -> None:
            bar.update(task, advance=1, description=f"tried {what}")

        yield tried


@contextmanager
def load_bar(shown: bool, num_requests: int) -> Iterator[Callable[[int], None]]:
    """Show a bar; call it with the number of requests that have ended since the last call."""
    with _bar(shown) as bar:
        task = bar.add_task("requests served", total=num_requests)
        yield lambda more: bar.update(task, advance=more)


class Lines:
    """The part of rich's Progress that is used here, as log lines. Short work prints nothing."""

    def __init__(self) -> None:
        self._due = time.monotonic() + EVERY
        self._description, self._done, self._total = "", 0.0, 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def add_task(self, description: str, total: float | None = None) -> "TaskID":
        from rich.progress import TaskID

        self._description, self._total = description, total or 0.0
        return TaskID(0)

    def update(
        self,
        task: "TaskID",
        *,
        completed: float | None = None,
        advance: float = 0.0,
        total: float | None = None,
        description: str | None = None,
    ) -> None:
        self._done = self._done + advance if completed is None else completed
        self._total, self._description = total or self._total, description or self._description
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + EVERY
            share = f" ({self._done / self._total:.0%})" if self._total else ""
            print(f"{self._description}{share}", file=sys.stderr, flush=True)


def _bar(shown: bool) -> "Progress | Lines":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if shown and not console.is_terminal:
        return Lines()
    return Progress(*columns, console=console, transient=True, disable=not shown)
