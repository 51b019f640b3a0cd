"""Recordings on the CPU: the list of operators of a step, replayed over fixed memory.

As in a CUDA graph, a step function runs once, and a replay repeats the operators that it called,
without the Python code around them. Nothing is compiled, so recording takes as long as one step.
"""

from collections.abc import Callable, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor

from slotzero.graph.arena import Arena
from slotzero.graph.backend import Backend, PlainPieces, Recording, StepFunction, TraceLine
from slotzero.graph.operators import OperatorCall, OperatorRecorder
from slotzero.graph.refusals import storage_key


class CpuRecording(Recording):
    def __init__(self, calls: Sequence[OperatorCall], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._calls = [(_bound(call), call.args) for call in calls]
        self._tensors = [tensor for call in calls for tensor in call.tensors()]

    def replay(self) -> None:
        for operator, args in self._calls:
            operator(*args)

    def addresses(self) -> set[int]:
        return {tensor.data_ptr() for tensor in self._tensors if tensor.numel()}


class CpuBackend(Backend):
    name = "cpu"

    def __init__(self) -> None:
        self._arena = Arena()

    def record(self, function: StepFunction) -> Recording:
        recorder, before = _recorded(function), self._arena.num_bytes
        calls = self._arena.place(recorder.calls, recorder.made.keys())
        return CpuRecording(calls, self._arena.num_bytes - before)

    def transcript(self, function: StepFunction) -> list[TraceLine]:
        recorder = _recorded(function)
        return [_line(call, recorder.made.keys()) for call in recorder.calls]

    def memory(self) -> list[tuple[int, int]]:
        return [(b.data_ptr(), b.data_ptr() + b.nbytes) for b in self._arena.blocks]

    def blocks(self) -> list[Tensor]:
        return self._arena.blocks


def _recorded(function: StepFunction) -> OperatorRecorder:
    recorder = OperatorRecorder()
    recorder.record(lambda: function(PlainPieces()))
    return recorder


def _bound(call: OperatorCall) -> Callable[..., Any]:
    """Return the operator with its keyword arguments; `_op` skips Python code of torch."""
    operator = getattr(call.operator, "_op", call.operator)
    return operator if not call.kwargs else partial(operator, **call.kwargs)


def _line(call: OperatorCall, made: Set[int]) -> TraceLine:
    addresses = []

    def word(value: Any) -> str:
        if isinstance(value, tuple | list):
            return f"({' '.join(word(part) for part in value)})"
        if not isinstance(value, Tensor):
            return repr(value)
        if storage_key(value) not in made and value.numel():
            addresses.append(value.data_ptr())
        return f"[{tuple(value.shape)}, {value.stride()}, {value.dtype}]"

    words = [word(call.args), *(f"{name}={word(value)}" for name, value in call.kwargs.items())]
    return TraceLine(f"{call.operator} {' '.join(words)}", tuple(addresses))
