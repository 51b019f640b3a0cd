"""Copies between host and device that never race: rings of pinned buffers guarded by events.

A host buffer is written again only when the copy that read it has finished, so no step can see
the values of a later one. On the CPU the same code copies at once.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from slotzero.errors import ContractError

DEPTH = 4  # copies in flight before the host waits for the oldest


class UploadRing:
    """Uploads a vector, padded to its full length, into one device tensor."""

    def __init__(self, target: Tensor) -> None:
        self._target = target
        self._pinned = target.is_cuda
        self._buffers = [_host_like(target) for _ in range(DEPTH)]
        self._views = [buffer.numpy() for buffer in self._buffers]
        self._events: list[torch.cuda.Event | None] = [None] * DEPTH
        self._next = 0

    def upload(self, values: Sequence[int], pad: int) -> None:
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
    """Brings the first rows of some device tensors to the host, a few steps at a time."""

    def __init__(self, sources: Sequence[Tensor]) -> None:
        self._sources = sources
        self._buffers = [[_host_like(source) for source in sources] for _ in range(DEPTH)]
        self._count = 0

    def download(self, num_sources: int, num_rows: int) -> "Download":
        """The first so many sources, the first so many rows of each."""
        self._count += 1
        buffers = self._buffers[self._count % DEPTH][:num_sources]
        views = [buffer[:num_rows] for buffer in buffers]
        for view, source in zip(views, self._sources, strict=False):
            view.copy_(source[:num_rows], non_blocking=source.is_cuda)
        event = _recorded_event() if self._sources[0].is_cuda else None
        return Download(views, event, self, self._count)

    @property
    def oldest(self) -> int:
        """The oldest download whose buffers were not used again."""
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
            raise ContractError(f"results are kept for {DEPTH} steps: these were read too late")
        if self._event is not None:
            self._event.synchronize()
        return self._views


def _host_like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)


def _recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
