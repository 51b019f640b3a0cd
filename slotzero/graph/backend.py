"""What it means to record: the contract of a backend, and the one that does not record at all.

A step function is called as `function(pieces)`; it reads and writes registered tensors only. Where
a piece of it repeats (a layer), it calls `pieces(fn, *tensors)` rather than `fn(*tensors)`, so that
a compiling backend can compile `fn` once and reuse it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

Piece = Tensor | None | tuple["Piece", ...]


def leaves_of(args: tuple[Piece, ...]) -> list[Tensor | None]:
    """Return the leaves of nested tuples, in order."""
    leaves: list[Tensor | None] = []
    for arg in args:
        if isinstance(arg, tuple):
            leaves += leaves_of(arg)
        else:
            leaves.append(arg)
    return leaves


class Pieces(ABC):
    """Calls a pure function of tensors and nested tuples of them, as the backend sees fit."""

    @abstractmethod
    def __call__(self, function: Callable[..., Any], *args: Piece) -> Any: ...


StepFunction = Callable[[Pieces], None]


class TraceLine(NamedTuple):
    """One thing that a recording does, in words: equal in every recording of one function."""

    text: str
    addresses: tuple[int, ...] = ()  # device memory that it was given
    reads_host: bool = False


class Recording(ABC):
    num_bytes: int  # memory that this recording holds beyond the registered tensors

    @abstractmethod
    def replay(self) -> None: ...


class Backend(ABC):
    name: str

    @abstractmethod
    def record(self, function: StepFunction) -> Recording:
        """Records one size. It may run the function, so published tensors must hold padding."""

    def transcript(self, function: StepFunction) -> list[TraceLine]:
        """What `record` would record, as far as this backend bakes anything in."""
        return []

    def memory(self) -> list[tuple[int, int]]:
        """Where recordings keep what no registered tensor holds: first addresses, and ends."""
        return []


class PlainPieces(Pieces):
    def __call__(self, function: Callable[..., Any], *args: Piece) -> Any:
        return function(*args)


class OncePieces(Pieces):
    """Equal pieces run once, the others get its results: for who only wants to see what would run,
    and not what comes out."""

    def __init__(self) -> None:
        self._results: dict[tuple[object, ...], Any] = {}

    def __call__(self, function: Callable[..., Any], *args: Piece) -> Any:
        leaves = leaves_of(args)
        piece = (function, *(None if t is None else (t.shape, t.dtype) for t in leaves))
        if piece not in self._results:
            self._results[piece] = function(*args)
        return self._results[piece]


class EagerRecording(Recording):
    num_bytes = 0

    def __init__(self, function: StepFunction) -> None:
        self._function = function

    def replay(self) -> None:
        self._function(PlainPieces())


class EagerBackend(Backend):
    """Runs the same padded function, kernel by kernel: the oracle of every other backend."""

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
