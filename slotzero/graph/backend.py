"""The contract of a backend, and the eager backend, which does not record.

A step function is called as `function(pieces)`; it reads and writes registered tensors only. It
calls functions that repeat (layers) as `pieces(fn, *arguments)` rather than `fn(*arguments)`, so
that a rehearsal can run equal calls once.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from slotzero.graph.structure import flatten


class Pieces(ABC):
    """Calls a pure function of tensors, or reuses the results of an equal call.

    Arguments and results are tensors, static values, or nested tuples of both (graph/structure.py).
    """

    @abstractmethod
    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any: ...


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

    def addresses(self) -> set[int]:
        """Return the memory that a replay uses, where the backend knows it."""
        return set()


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

    def blocks(self) -> list[torch.Tensor]:
        """Return the same memory as tensors, where the host can overwrite it between replays."""
        return []


class PlainPieces(Pieces):
    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


class OncePieces(Pieces):
    """Runs equal pieces once and returns the same results for the others, for callers that need
    the launches but not the numbers."""

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], Any] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        tensors, structure = flatten(arguments)
        piece = (function, structure, tuple((t.shape, t.dtype) for t in tensors))
        if piece not in self._results:
            self._results[piece] = function(*arguments)
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
