"""Copies between host and device that never race: rings of pinned buffers guarded by events.

A host buffer is reused only when the copy that read it has finished, so no step can see the values
of a later one. The device never waits between two steps: a vector that did not change is not
uploaded again, and results leave on a separate stream. On the CPU the same code copies immediately.
"""

import time
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from slotzero.errors import ContractError, RankLostError

DEPTH = 4  # copies in flight before the host waits for the oldest
NAP = 20e-6  # seconds between two polls of an event with a deadline


class Arriving(Protocol):
    """Results on their way to the host; `wait` returns them once they have arrived."""

    def wait(self) -> list[Tensor]: ...


class UploadRing:
    """Uploads a vector, padded to its full length, into one device tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._pinned = target.is_cuda
        self._buffers = [_host_like(target) for _ in range(DEPTH)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._events: list[torch.cuda.Event | None] = [None] * DEPTH
        self._next = 0
        self.uploaded: list[int] = []
        self._is_there = False

    def forget(self) -> None:
        """Make the next upload unconditionally, as the device may hold something else."""
        self._is_there = False

    def upload(self, values: Sequence[int], pad: int) -> None:
        values = list(values)
        if self._is_there and values == self.uploaded:
            return
        self.uploaded, self._is_there = values, True
        i = self._next
        self._next = (i + 1) % DEPTH
        event = self._events[i]
        if event is not None:
            event.synchronize()  # the copy of DEPTH steps ago, finished long since
        view = self._views[i]
        view[: len(values)] = values
        view[len(values) :] = pad
        self._target.copy_(self._buffers[i], non_blocking=self._pinned)
        self._events[i] = _recorded_event() if self._pinned else None


class DownloadRing:
    """Copies the first rows of some device tensors to the host, with several copies in flight.

    On a GPU they are copied aside on the device first, so that the next step may overwrite them.
    """

    def __init__(self, sources: Sequence[Tensor], deadline: float | None = None) -> None:
        """`deadline`: seconds within which results must arrive, if another rank may delay them."""
        self._sources = sources
        self.deadline = deadline
        self._buffers = [[_host_like(source) for source in sources] for _ in range(DEPTH)]
        self._count = 0
        self._is_cuda = sources[0].is_cuda
        if self._is_cuda:
            self._stream = torch.cuda.Stream(sources[0].device)  # type: ignore[no-untyped-call]
            self._aside = [[torch.empty_like(s) for s in sources] for _ in range(DEPTH)]
            self._events: list[torch.cuda.Event | None] = [None] * DEPTH

    def download(self, lengths: Sequence[int]) -> "Download":
        """Download the first lengths[i] entries of source i."""
        self._count += 1
        i = self._count % DEPTH
        views = _first(lengths, self._buffers[i])
        sources = _first(lengths, self._sources)
        event = None
        if self._is_cuda:
            aside = _first(lengths, self._aside[i])
            event = self._events[i] = self._send(sources, aside, views, self._events[i])
        else:
            _copy(sources, views)
        return Download(views, event, self, self._count)

    def _send(
        self,
        sources: list[Tensor],
        aside: list[Tensor],
        views: list[Tensor],
        last: torch.cuda.Event | None,
    ) -> torch.cuda.Event:
        stream = torch.cuda.current_stream(sources[0].device)
        if last is not None:
            stream.wait_event(last)  # DEPTH steps ago, finished long since
        _copy(sources, aside)
        self._stream.wait_stream(stream)
        with torch.cuda.stream(self._stream):
            _copy(aside, views)
            return _recorded_event()

    @property
    def oldest(self) -> int:
        """The oldest download whose buffers were not reused."""
        return self._count - DEPTH + 1


class Download:
    """Device results on their way to the host; `wait` returns them once they have arrived."""

    def __init__(
        self,
        views: list[Tensor],
        event: torch.cuda.Event | None,
        ring: DownloadRing,
        number: int,
    ) -> None:
        self._views, self._event, self._ring, self._number = views, event, ring, number

    def wait(self) -> list[Tensor]:
        if self._number < self._ring.oldest:
            raise ContractError(f"results were read too late: they are kept for {DEPTH} steps")
        if self._event is not None:
            _await(self._event, self._ring.deadline)
        return self._views


def _await(event: torch.cuda.Event, deadline: float | None) -> None:
    if deadline is None:
        event.synchronize()
        return
    until = time.monotonic() + deadline
    while not event.query():  # type: ignore[no-untyped-call]
        if time.monotonic() > until:
            raise RankLostError(f"timed out: no results of a step after {deadline:g} s")
        time.sleep(NAP)


def _first(lengths: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor[:n] for n, tensor in zip(lengths, tensors, strict=False)]


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=source.is_cuda)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
