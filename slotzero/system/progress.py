"""Progress on standard error: bars on a terminal; in a log file, a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

EVERY = 10.0  # seconds between two log lines


class Recorded(Protocol):
    """A size that has just been captured."""

    @property
    def key(self) -> object: ...


OnProgress = Callable[[str, int, int], None]
"""Callback for the progress of loading: the stage (kernels, weights, recording), the amount done,
and the total, which is 0 if it is not known."""


def ignore_progress(stage: str, done: int, total: int) -> None:
    """Do nothing: the default of OnProgress."""


@contextmanager
def weights_bar(
    shown: bool, name: str, on_progress: OnProgress = ignore_progress
) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; call it with the values loaded and the total."""
    with _bar(shown) as bar:
        task = bar.add_task(f"loading {name}", total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            on_progress("weights", done, total)

        yield update


@contextmanager
def recording_bar(
    shown: bool, backend: str, num_sizes: int, on_progress: OnProgress = ignore_progress
) -> Iterator[Callable[[Recorded], None]]:
    """Show a bar; call it with each size after its capture."""
    with _bar(shown) as bar:
        task = bar.add_task(f"recording on {backend}", total=num_sizes)
        num_recorded = 0
        on_progress("recording", 0, num_sizes)

        def advance(record: Recorded) -> None:
            nonlocal num_recorded
            num_recorded += 1
            bar.update(task, advance=1, description=f"recorded {record.key}")
            on_progress("recording", num_recorded, num_sizes)

        yield advance


@contextmanager
def prompts_bar(shown: bool, num_prompts: int) -> Iterator[Callable[[int, int], None]]:
    """Show a bar; call it with the numbers of answers finished and tokens generated since then."""
    with _bar(shown) as bar:
        task = bar.add_task("generating", total=num_prompts)
        num_tokens = 0

        def update(finished: int, tokens: int) -> None:
            nonlocal num_tokens
            num_tokens += tokens
            bar.update(task, advance=finished, description=f"generating, {num_tokens} tokens")

        yield update


@contextmanager
def training_bar(shown: bool) -> Iterator[Callable[[int, float, str], None]]:
    """Show a bar; call it with the step, the used fraction of the budget, and the last result."""
    with _bar(shown) as bar:
        task = bar.add_task("training", total=1.0)

        def update(step: int, fraction: float, result: str) -> None:
            bar.update(task, completed=fraction, description=f"training, step {step}{result}")

        yield update


@contextmanager
def certify_bar(shown: bool, total: int | None) -> Iterator[Callable[[str], None]]:
    """Show a bar; call it with the name of each case after it was tried.

    Without a total, the bar only shows activity.
    """
    with _bar(shown) as bar:
        task = bar.add_task("recording", total=total)

        def advance(case: str) -> None:
            bar.update(task, advance=1, description=f"tried {case}")

        yield advance


@contextmanager
def load_bar(shown: bool, num_requests: int) -> Iterator[Callable[[int], None]]:
    """Show a bar; call it with the number of requests that have ended since the last call."""
    with _bar(shown) as bar:
        task = bar.add_task("requests served", total=num_requests)
        yield lambda more: bar.update(task, advance=more)


@contextmanager
def scoring_bar(shown: bool, num_windows: int) -> Iterator[Callable[[int], None]]:
    """Show a bar; call it with the number of windows of text scored since the last call."""
    with _bar(shown) as bar:
        task = bar.add_task("windows scored", total=num_windows)
        yield lambda more: bar.update(task, advance=more)


class Lines:
    """Progress as log lines, with the methods of rich's Progress that are used here.

    Work that takes less than `EVERY` seconds prints nothing.
    """

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
            percentage = f" ({self._done / self._total:.0%})" if self._total else ""
            print(f"{self._description}{percentage}", file=sys.stderr, flush=True)


def _bar(shown: bool) -> "Progress | Lines":
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    if shown and not console.is_terminal:
        return Lines()
    return Progress(*columns, console=console, transient=True, disable=not shown)
