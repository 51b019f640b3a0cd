"""CUDA graphs: the whole step function, captured once per size into one shared memory pool."""

import gc
from typing import Any

import torch

from slotzero.errors import RecordingError
from slotzero.graph.backend import Backend, PlainPieces, Recording, StepFunction

WARM_UPS = 2  # lazy initialisation (kernel builds, cuBLAS handles) happens before the capture


class CudaRecording(Recording):
    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        self._graph = graph
        self.num_bytes = num_bytes

    def replay(self) -> None:
        self._graph.replay()


class CudaBackend(Backend):
    """Sizes never replay at once and keep nothing in the pool, so all of them share it."""

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None  # the handle of the first graph's memory

    def record(self, function: StepFunction) -> Recording:
        pieces = PlainPieces()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(WARM_UPS):
                    function(pieces)
            self._stream.synchronize()
            before = torch.cuda.memory_reserved(self._device)
            graph = torch.cuda.CUDAGraph()
            gc.disable()  # a collection inside a capture may free device memory, which ends it
            try:
                with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                    function(pieces)
            finally:
                gc.enable()
        except (RuntimeError, torch.OutOfMemoryError) as error:
            raise RecordingError(str(error).splitlines()[0]) from error
        self._pool = self._pool or graph.pool()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CudaRecording(graph, torch.cuda.memory_reserved(self._device) - before)
