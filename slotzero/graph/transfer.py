"""Copies between host and device that never race: rings of pinned buffers guarded by events.

A host buffer is reused only when the copy that read it has finished, so no step can see the values
of a later one. The device never waits between two steps: a vector that did not change is not
uploaded again, and results are downloaded on a separate stream. On the CPU the same code copies
immediately. Rings use a device through `Copies`, so that a check can simulate a slow one.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from slotzero.errors import ContractError, RankLostError

DEPTH = 4  # copies in flight before the host waits for the oldest
NAP = 20e-6  # seconds between two polls of an event with a deadline


class PendingTensors(Protocol):
    """Results that are being copied to the host; `wait` returns them once they have arrived."""

    def wait(self) -> list[Tensor]: ...


class Event(Protocol):
    """A point in the stream of a device, like `torch.cuda.Event`."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...


class Copies(ABC):
    """Asynchronous copies to and from a device."""

    @abstractmethod
    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        """Copy in stream order."""

    @abstractmethod
    def record_event(self) -> Event:
        """Record an event after all work so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Make later work of the stream wait for an event."""

    @abstractmethod
    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        """Copy after all work so far, concurrently with later work; return the copy's event."""


class CudaCopies(Copies):
    def __init__(self, device: torch.device) -> None:
        self._device = device

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        _copy(sources, targets)

    def record_event(self) -> Event:
        event: Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()  # type: ignore[attr-defined]
        return event

    def wait(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _copy(sources, targets)
            return self.record_event()


def copies_of(tensor: Tensor) -> Copies | None:
    """Return the copies of the tensor's device; None: its copies are synchronous."""
    return CudaCopies(tensor.device) if tensor.is_cuda else None


class UploadRing:
    """Uploads a vector, padded to its full length, into one device tensor."""

    def __init__(self, target: Tensor, copies: Copies | None = None) -> None:
        """`copies`: by default those of the target's device."""
        self._target = target
        self._copies = copies or copies_of(target)
        self._buffers = [_host_like(target) for _ in range(DEPTH)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._events: list[Event | None] = [None] * DEPTH
        self._next = 0
        self.uploaded: list[int] = []
        self._is_current = False

    def forget(self) -> None:
        """Upload next time even if nothing changed, because other code wrote to the target."""
        self._is_current = False

    def upload(self, values: Sequence[int], pad: int) -> None:
        values = list(values)
        if self._is_current and values == self.uploaded:
            return
        self.uploaded, self._is_current = values, True
        i = self._next
        self._next = (i + 1) % DEPTH
        event = self._events[i]
        if event is not None:
            event.synchronize()  # the copy of DEPTH steps ago, which has long finished
        view = self._views[i]
        view[: len(values)] = values
        view[len(values) :] = pad
        if self._copies is None:
            self._target.copy_(self._buffers[i])
        else:
            self._copies.copy([self._buffers[i]], [self._target])
            self._events[i] = self._copies.record_event()


class DownloadRing:
    """Copies the first rows of some device tensors to the host, with several copies in flight.

    On a GPU they are first copied to a second device buffer, so that the next step may overwrite
    the tensors.
    """

    def __init__(
        self,
        sources: Sequence[Tensor],
        deadline: float | None = None,
        copies: Copies | None = None,
    ) -> None:
        """`deadline`: seconds within which results must arrive, if another rank may delay them.
        `copies`: by default those of the sources' device."""
        self._sources = sources
        self.deadline = deadline
        self._buffers = [[_host_like(source) for source in sources] for _ in range(DEPTH)]
        self._count = 0
        self._copies = copies or copies_of(sources[0])
        if self._copies is not None:
            self._aside = [[torch.empty_like(s) for s in sources] for _ in range(DEPTH)]
            self._events: list[Event | None] = [None] * DEPTH

    def download(self, lengths: Sequence[int]) -> "Download":
        """Download the first lengths[i] entries of source i."""
        self._count += 1
        i = self._count % DEPTH
        views = _first(lengths, self._buffers[i])
        sources = _first(lengths, self._sources)
        event = None
        if self._copies is None:
            _copy(sources, views)
        else:
            last, aside = self._events[i], _first(lengths, self._aside[i])
            if last is not None:
                self._copies.wait(last)  # of DEPTH steps ago, which has long finished
            self._copies.copy(sources, aside)
            event = self._events[i] = self._copies.send(aside, views)
        return Download(views, event, self, self._count)

    @property
    def oldest(self) -> int:
        """Number of the oldest download whose buffers were not reused."""
        return self._count - DEPTH + 1


class Download:
    """One download of a ring; `wait` returns the host tensors once they have arrived."""

    def __init__(
        self,
        views: list[Tensor],
        event: Event | None,
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


def _await(event: Event, deadline: float | None) -> None:
    if deadline is None:
        event.synchronize()
        return
    until = time.monotonic() + deadline
    while not event.query():
        if time.monotonic() > until:
            raise RankLostError(f"timed out: no results of a step after {deadline:g} s")
        time.sleep(NAP)


def _first(lengths: Sequence[int], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor[:n] for n, tensor in zip(lengths, tensors, strict=False)]


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source, non_blocking=source.is_cuda or target.is_cuda)


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
