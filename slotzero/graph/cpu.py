"""Compiled graphs on the CPU: each piece of a step is compiled by Inductor, once per size.

Pieces are traced straight into an FX graph and handed to `torch.compile`'s own back half; the front
half (bytecode tracing and guards) is not needed, because the registry's fingerprints are the
guards, and it would cost 0.1 ms a call. Compiled code is cached on disk between processes.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from slotzero.cache import cache_dir
from slotzero.errors import RecordingError
from slotzero.graph.backend import Backend, Pieces, Recording, StepFunction

# What a compiled piece was compiled for: it serves any tensors that look the same.
Signature = tuple[Any, ...]
Compiled = Callable[..., Any]


class CompiledPieces(Pieces):
    """Compiles on first sight; a layer that comes thirty times is compiled once."""

    def __init__(self) -> None:
        self._compiled: dict[Signature, Compiled] = {}

    def __call__(self, function: Callable[..., Any], *tensors: Tensor | None) -> Any:
        key = (function, *((t.shape, t.stride(), t.dtype) if t is not None else t for t in tensors))
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = compile_piece(function, tensors)
        return compiled(*tensors)

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)


class CpuRecording(Recording):
    num_bytes = 0  # intermediates come from the allocator and go back to it

    def __init__(self, function: StepFunction, pieces: CompiledPieces) -> None:
        self._function = function
        self._pieces = pieces

    def replay(self) -> None:
        self._function(self._pieces)


class CpuBackend(Backend):
    name = "cpu"

    def __init__(self) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_dir() / "inductor"))

    def record(self, function: StepFunction) -> Recording:
        pieces = CompiledPieces()
        try:
            function(pieces)
        except Exception as error:  # the compiler raises whatever its passes raise
            raise RecordingError(f"{type(error).__name__}: {error}") from error
        return CpuRecording(function, pieces)


def compile_piece(function: Callable[..., Any], tensors: tuple[Tensor | None, ...]) -> Compiled:
    from torch._inductor import standalone_compile
    from torch.fx.experimental.proxy_tensor import make_fx

    present = [t for t in tensors if t is not None]

    def of_present(*given: Tensor) -> Any:
        rest = iter(given)
        return function(*(None if t is None else next(rest) for t in tensors))

    with torch.no_grad():
        graph = make_fx(of_present, tracing_mode="fake")(*present)
        artifact = standalone_compile(graph, [*present], dynamic_shapes="from_example_inputs")

    def call(*given: Tensor | None) -> Any:
        return artifact(*(t for t in given if t is not None))

    return call
