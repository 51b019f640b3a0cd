"""The contract of a backend, and the eager backend, which does not record.

A step function is called as `function(pieces)`; it reads and writes registered tensors only. Where
a piece of it repeats (a layer), it calls `pieces(fn, *tensors)` rather than `fn(*tensors)`, so that
a compiling backend can compile `fn` once and reuse it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Pieces(ABC):
    """Calls a pure function of tensors, compiled or not, as the backend chooses."""

    @abstractmethod
    def __call__(self, function: Callable[..., Any], *tensors: Tensor | None) -> Any: ...


StepFunction = Callable[[Pieces], None]


class TraceLine(NamedTuple):
    """One operation of a recording as text, equal in every recording of the same function."""

    text: str
    addresses: tuple[int, ...] = ()  # device memory that it uses
    reads_host: bool = False


class Recording(ABC):
    num_bytes: int  # memory that this recording holds beyond the registered tensors

    @abstractmethod
    def replay(self) -> None: ...


class Backend(ABC):
    name: str

    @abstractmethod
    def record(self, function: StepFunction) -> Recording:
        """Record one size. It may run the function, so published tensors must hold padding."""

    def transcript(self, function: StepFunction) -> list[TraceLine]:
        """Return what `record` would record, for backends that bake in values."""
        return []

    def memory(self) -> list[tuple[int, int]]:
        """Return the memory of recordings besides registered tensors, as [start, end) addresses."""
        return []


class PlainPieces(Pieces):
    def __call__(self, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        return function(*tensors)


class OncePieces(Pieces):
    """Runs only the first of equal pieces and reuses its results, for callers that need to see
    what runs, but not correct results."""

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], Any] = {}

    def __call__(self, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        piece = (function, *(None if t is None else (t.shape, t.dtype) for t in tensors))
        if piece not in self._results:
            self._results[piece] = function(*tensors)
        return self._results[piece]


class EagerRecording(Recording):
    num_bytes = 0

    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def replay(self) -> None:
        self._function(PlainPieces())


class EagerBackend(Backend):
    """Runs the same padded function kernel by kernel; every other backend must agree with it."""

    name = "eager"

    def record(self, function: StepFunction) -> Recording:
        return EagerRecording(function)


def backend_for(name: str, device: torch.device) -> Backend:
    if name == "cuda":
        from slotzero.graph.cuda import CudaBackend

        return CudaBackend(device)
    if name == "cpu":
        from slotzero.graph.cpu import CpuBackend

        return CpuBackend()
    return EagerBackend()
