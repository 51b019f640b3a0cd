"""Copies between host and device that never race: rings of pinned buffers guarded by events.

A host buffer is written again only when the copy that read it has finished, so no step can see
the values of a later one. On the CPU the same code copies at once.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

DEPTH = 4  # copies in flight before the host waits for the oldest


class HostRing:
    """Uploads a vector, padded to its full length, into one device tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._pinned = target.is_cuda
        self._slots = [_host_like(target) for _ in range(DEPTH)]
        self._views = [slot.numpy() for slot in self._slots]
        self._events: list[torch.cuda.Event | None] = [None] * DEPTH
        self._next = 0

    def upload(self, values: Sequence[int] | np.ndarray, pad: int) -> None:
        i = self._next
        self._next = (i + 1) % DEPTH
        event = self._events[i]
        if event is not None:
            event.synchronize()  # the copy of DEPTH steps ago, finished long since
        view = self._views[i]
        view[: len(values)] = values
        view[len(values) :] = pad
        self._target.copy_(self._slots[i], non_blocking=self._pinned)
        self._events[i] = _recorded_event() if self._pinned else None


class Download:
    """Device results on their way to the host; `wait` returns them once they have arrived."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._copies = [_host_like(source) for source in sources]
        for copy, source in zip(self._copies, sources, strict=True):
            copy.copy_(source, non_blocking=source.is_cuda)
        self._event = _recorded_event() if sources[0].is_cuda else None

    def wait(self) -> list[Tensor]:
        if self._event is not None:
            self._event.synchronize()
        return self._copies


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
