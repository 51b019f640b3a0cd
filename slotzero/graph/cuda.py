"""CUDA graphs: the whole step function, captured once per size into one shared memory pool."""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from slotzero.errors import RecordingError
from slotzero.graph.backend import Backend, PlainPieces, Recording, StepFunction, TraceLine
from slotzero.graph.nodes import Node, nodes_of, pointers_of

TORCH_KERNEL = "2at6native"  # in a mangled name: the namespace at::native
WARM_UPS = 1  # lazy initialisation (kernel builds, cuBLAS handles) happens before the capture


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection, which may free device memory and so invalidate a capture."""
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
    """Captures all sizes into one memory pool: they never replay at once and keep nothing in it.

    The pool belongs to an anchor graph that stays alive, as no graph can be captured into a pool
    whose last graph is gone. cuBLAS allocates its workspace for a stream at the first product, and
    another at the first product with a bias: both happen in the anchor, so that they lie in the
    pool.
    """

    name = "cuda"

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._multiply()  # creates the cuBLAS handle, which is not allowed during capture
        self._anchor = self._capture(self._multiply, pool=None)
        self._pools = [self._anchor.pool()]

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
            raise  # an eager step would not fit either
        except Exception as error:  # kernels are compiled here, and may raise anything
            self._recover()
            first, *_ = str(error).splitlines() or [type(error).__name__]
            raise RecordingError(first) from error
        finally:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return CudaRecording(graph, torch.cuda.memory_reserved(self._device) - before)

    def transcript(self, function: StepFunction) -> list[TraceLine]:
        """Capture the function and return its nodes. Only parameters that are whole numbers are
        compared, as the padding between the fields of a struct is undefined."""
        pieces = PlainPieces()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream), _no_collection():
            function(pieces)
            self._stream.synchronize()
            graph = self._capture(lambda: function(pieces), self._anchor.pool(), keep_graph=True)
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return lines_of(graph)

    def memory(self) -> list[tuple[int, int]]:
        return memory_of(self._pools)

    def _recover(self) -> None:
        """Recover from a failed capture with a successful one into a new pool: torch's allocator
        assumes that the failed one still uses its pool, and its random generator stays in capture
        mode until a capture succeeds."""
        self._anchor = self._capture(self._multiply, pool=None)
        self._pools.append(self._anchor.pool())

    def _multiply(self) -> None:
        one = torch.zeros(16, 16, dtype=torch.bfloat16, device=self._device)
        torch.mm(one, one)
        torch.addmm(one[0], one, one)  # cuBLASLt, with a workspace of its own

    def _capture(
        self, function: Callable[[], object], pool: Any, keep_graph: bool = False
    ) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(pool=pool)
            try:
                function()
            finally:
                graph.capture_end()
        return graph


def lines_of(graph: torch.cuda.CUDAGraph) -> list[TraceLine]:
    """Return the nodes of a graph that was captured with keep_graph=True."""
    segments = [_span(segment) for segment in _segments()]
    return [_line(node, segments) for node in nodes_of(graph)]


def memory_of(pools: Iterable[Any]) -> list[tuple[int, int]]:
    """Return the memory of these pools, as [start, end) addresses."""
    wanted = {tuple(pool) for pool in pools}
    return [
        _span(segment) for segment in _segments() if tuple(segment["segment_pool_id"]) in wanted
    ]


def _line(node: Node, segments: list[tuple[int, int]]) -> TraceLine:
    """Return a node as a trace line. A word that lies in torch's memory is an address; any other is
    a number.

    In the structs of torch's own kernels some bytes are undefined, and a struct may be as small as
    a number. The arguments of those kernels are known from their operators, which S5 records.
    """
    is_plain = TORCH_KERNEL not in node.name
    certain = node._replace(params=tuple(p for p in node.params if is_plain or len(p) <= 8))
    found = [w for w in pointers_of(certain) if any(start <= w < end for start, end in segments)]
    numbers = []
    for param in node.params:
        is_whole = is_plain and len(param) in (1, 2, 4, 8)
        is_number = is_whole and int.from_bytes(param, "little") not in found
        numbers.append(param.hex() if is_number else "-")
    text = f"{node.kind} {node.name} {node.dims} {' '.join(numbers)}"
    return TraceLine(text, tuple(found), node.reads_host)


def _segments() -> list[dict[str, Any]]:
    """Return all device memory of torch's allocator."""
    segments: list[dict[str, Any]] = torch.cuda.memory_snapshot()  # type: ignore[no-untyped-call]
    return segments


def _span(segment: dict[str, Any]) -> tuple[int, int]:
    return segment["address"], segment["address"] + segment["total_size"]
