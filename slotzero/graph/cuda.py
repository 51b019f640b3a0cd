"""CUDA graphs: the whole step function, captured once per size into one shared memory pool."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slotzero.errors import RecordingError
from slotzero.graph.backend import Backend, PlainPieces, Recording, StepFunction

WARM_UPS = 1  # lazy initialisation (kernel builds, cuBLAS handles) happens before the capture


@contextmanager
def _no_collection() -> Iterator[None]:
    """A collection inside a capture may free device memory, which would end it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class CudaRecording(Recording):
    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        self._graph = graph
        self.num_bytes = num_bytes

    def replay(self) -> None:
        self._graph.replay()


class CudaBackend(Backend):
    """Sizes never replay at once and keep nothing in the pool, so all of them share it.

    The pool is that of a graph which stays: none can be captured into a pool whose last is gone.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._anchor = self._capture(self._nothing, pool=None)

    def record(self, function: StepFunction) -> Recording:
        pieces = PlainPieces()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream), _no_collection():
                for _ in range(WARM_UPS):
                    function(pieces)
                self._stream.synchronize()
                before = torch.cuda.memory_reserved(self._device)
                graph = self._capture(lambda: function(pieces), self._anchor.pool())
        except torch.OutOfMemoryError:
            raise  # eagerly it would not fit either
        except Exception as error:  # kernels are compiled here, and raise whatever they raise
            self._recover()
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise RecordingError(first) from error
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CudaRecording(graph, torch.cuda.memory_reserved(self._device) - before)

    def _recover(self) -> None:
        """After a capture that failed, torch's allocator takes it to go on for ever, in that pool,
        and its random generator until a good one ends: a new pool, and a good one, mend both."""
        self._anchor = self._capture(self._nothing, pool=None)

    def _nothing(self) -> None:
        torch.zeros(1, device=self._device)

    def _capture(self, function: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool)
            try:
                function()
            finally:
                graph.capture_end()
        return graph
