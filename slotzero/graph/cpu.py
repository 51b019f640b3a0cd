"""Compiled graphs on the CPU: Inductor compiles each piece of a step, once per size.

Pieces are traced directly into an FX graph and compiled by Inductor, the back end of
`torch.compile`. Its front end (bytecode tracing and guards) is not needed, because the registry's
fingerprints are the guards, and it would cost 0.1 ms per call. Compiled code is cached on disk.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slotzero.errors import ContractError, RecordingError
from slotzero.graph.backend import Backend, Pieces, Recording, StepFunction, TraceLine
from slotzero.system.cache_dir import cache_dir, writable

Compiled = Callable[..., Any]

# The registry's fingerprints already cover what these would check at every call.
_PATCHES = {
    "config_patches": {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
}


class RecordingPieces(Pieces):
    """Compiles each new piece and records the order; thirty equal layers are compiled once."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], Compiled]] = []
        self._compiled: dict[tuple[Any, ...], Compiled] = {}  # by function and looks of its tensors

    def __call__(self, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        key = _looks_of(function, tensors)
        if key not in self._compiled:
            self._compiled[key] = compile_piece(function, tensors)
        self.calls.append((function, self._compiled[key]))
        return self._compiled[key](*tensors)


class TracingPieces(Pieces):
    """Writes down what would be compiled, once for equal layers."""

    def __init__(self) -> None:
        self.lines: list[TraceLine] = []
        self._seen: set[tuple[Any, ...]] = set()

    def __call__(self, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        key = _looks_of(function, tensors)
        if key not in self._seen:
            self._seen.add(key)
            module = trace_piece(function, tensors)
            self.lines += [TraceLine(line) for line in module.code.strip().splitlines()]
            for name, constant in module.named_buffers():  # baked in: undeclared memory
                self.lines.append(
                    TraceLine(f"{name} {tuple(constant.shape)}", (constant.data_ptr(),))
                )
        return function(*tensors)


class ReplayingPieces(Pieces):
    """Calls the compiled pieces in the recorded order."""

    def __init__(self, calls: list[tuple[Callable[..., Any], Compiled]]) -> None:
        self._calls = iter(calls)

    def __call__(self, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        recorded, compiled = next(self._calls, (None, None))
        if recorded != function or compiled is None:
            raise ContractError(f"piece {function} differs from the recorded one: {recorded}")
        return compiled(*tensors)


class CpuRecording(Recording):
    num_bytes = 0  # intermediates are allocated and freed in every replay

    def __init__(
        self, function: StepFunction, calls: list[tuple[Callable[..., Any], Compiled]]
    ) -> None:
        self._function = function
        self._calls = calls

    def replay(self) -> None:
        self._function(ReplayingPieces(self._calls))


class CpuBackend(Backend):
    name = "cpu"

    def __init__(self) -> None:
        if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(writable(cache_dir() / "inductor"))

    def record(self, function: StepFunction) -> Recording:
        pieces = RecordingPieces()
        try:
            function(pieces)
        except Exception as error:  # the compiler raises whatever its passes raise
            raise RecordingError(f"{type(error).__name__}: {error}") from error
        return CpuRecording(function, pieces.calls)

    def transcript(self, function: StepFunction) -> list[TraceLine]:
        """Trace the compiled pieces; the code between them runs in Python at every replay."""
        pieces = TracingPieces()
        function(pieces)
        return pieces.lines


def _looks_of(function: Callable[..., Any], tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    looks = ((t.shape, t.stride(), t.dtype) if t is not None else None for t in tensors)
    return function, *looks


def trace_piece(
    function: Callable[..., Any], tensors: tuple[Tensor | None, ...]
) -> torch.fx.GraphModule:
    """Trace a piece as a function of the tensors that are present; the others are always None."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def of_present(*given: Tensor) -> Any:
        rest = iter(given)
        return function(*(None if t is None else next(rest) for t in tensors))

    with torch.no_grad():
        module: torch.fx.GraphModule = make_fx(of_present, tracing_mode="fake")(
            *(t for t in tensors if t is not None)
        )
    return module


def compile_piece(function: Callable[..., Any], tensors: tuple[Tensor | None, ...]) -> Compiled:
    from torch._inductor import standalone_compile

    present = [t for t in tensors if t is not None]
    graph = trace_piece(function, tensors)
    with torch.no_grad():
        artifact = standalone_compile(
            graph, [*present], dynamic_shapes="from_example_inputs", options=_PATCHES
        )
    if len(present) == len(tensors):
        return artifact

    def call(*given: Tensor | None) -> Any:
        return artifact(*[t for t in given if t is not None])

    return call
