"""Compiled graphs on the CPU: Inductor compiles each piece of a step, once per size.

Pieces are traced directly into an FX graph and compiled by Inductor, the back end of
`torch.compile`. Its front end (bytecode tracing and guards) is not needed, because the registry's
fingerprints are the guards, and it would cost 0.1 ms per call. Compiled code is cached on disk.
"""

import os
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor

from slotzero.errors import ContractError, RecordingError
from slotzero.graph.backend import Backend, Pieces, Recording, StepFunction, TraceLine
from slotzero.graph.structure import Structure, builder, collector, flatten
from slotzero.system.cache_dir import cache_dir, writable

Compiled = Callable[[tuple[Any, ...]], Any]  # of the piece's arguments

# The registry's fingerprints already cover what these would check at every call.
_PATCHES = {
    "config_patches": {"size_asserts": False, "alignment_asserts": False, "scalar_asserts": False}
}


class RecordingPieces(Pieces):
    """Compiles a piece on first sight and records the order: equal layers are compiled once."""

    def __init__(self) -> None:
        self.calls: list[tuple[Callable[..., Any], Compiled]] = []
        self._compiled: dict[Hashable, Compiled] = {}

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        tensors, structure = flatten(arguments)
        key = _key(function, tensors, structure)
        if key not in self._compiled:
            self._compiled[key] = compile_piece(function, tensors, structure)
        self.calls.append((function, self._compiled[key]))
        return self._compiled[key](arguments)


class TracingPieces(Pieces):
    """Records the code that would be compiled, once for equal layers."""

    def __init__(self) -> None:
        self.lines: list[TraceLine] = []
        self._seen: set[Hashable] = set()

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        tensors, structure = flatten(arguments)
        key = _key(function, tensors, structure)
        if key not in self._seen:
            self._seen.add(key)
            module, _ = trace_piece(function, tensors, structure)
            self.lines += [TraceLine(line) for line in module.code.strip().splitlines()]
            for name, constant in module.named_buffers():  # baked in: undeclared memory
                self.lines.append(
                    TraceLine(f"{name} {tuple(constant.shape)}", (constant.data_ptr(),))
                )
        return function(*arguments)


class ReplayingPieces(Pieces):
    """Calls the compiled pieces in the order in which they were recorded."""

    def __init__(self, calls: list[tuple[Callable[..., Any], Compiled]]) -> None:
        self._calls = iter(calls)

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        recorded, compiled = next(self._calls, (None, None))
        if recorded != function or compiled is None:
            raise ContractError(f"piece {function} differs from the recorded one: {recorded}")
        return compiled(arguments)


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


def _key(function: Callable[..., Any], tensors: Sequence[Tensor], structure: Structure) -> Hashable:
    looks = tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors)
    return function, structure, looks


def trace_piece(
    function: Callable[..., Any], tensors: Sequence[Tensor], structure: Structure
) -> tuple[torch.fx.GraphModule, Structure]:
    """Return a graph from tensors to tensors, and the structure of its results."""
    from torch.fx.experimental.proxy_tensor import make_fx

    results: list[Structure] = []
    build = builder(structure)

    def flat(*given: Tensor) -> list[Tensor]:
        made, structure_of_made = flatten(function(*build(given)))
        results.append(structure_of_made)
        return made

    with torch.no_grad():
        module: torch.fx.GraphModule = make_fx(flat, tracing_mode="fake")(*tensors)
    return module, results[-1]


def compile_piece(
    function: Callable[..., Any], tensors: Sequence[Tensor], structure: Structure
) -> Compiled:
    from torch._inductor import standalone_compile

    graph, made = trace_piece(function, tensors, structure)
    with torch.no_grad():
        artifact = standalone_compile(
            graph, [*tensors], dynamic_shapes="from_example_inputs", options=_PATCHES
        )

    collect, build = collector(structure), builder(made)

    def call(arguments: tuple[Any, ...]) -> Any:
        return build(artifact(*collect(arguments)))

    return call
