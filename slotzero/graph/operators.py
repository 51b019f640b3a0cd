"""The operators that a function calls, recorded with their arguments.

A recorded call writes its results to the memory where the recording run put them, so it can be made
again over other values. Views are not called again: their memory is that of their base. A call that
cannot be repeated is refused by name (refusals.py).
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slotzero.errors import RecordingError
from slotzero.graph.refusals import (
    CONSTANT,
    VARYING_SHAPE,
    CallWatch,
    HostReads,
    refused_before,
    storage_key,
    tensors_of,
)

_ALLOCATIONS = {  # results whose memory is written by a later call
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_COLLECTIVES = "_c10d_functional"


class OperatorCall(NamedTuple):
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> Iterator[Tensor]:
        yield from tensors_of(self.args)
        yield from tensors_of(tuple(self.kwargs.values()))

    def over(self, place: Callable[[Tensor], Tensor]) -> "OperatorCall":
        """Return the same call with each tensor replaced."""
        kwargs = {name: _replaced(value, place) for name, value in self.kwargs.items()}
        return OperatorCall(self.operator, _replaced(self.args, place), kwargs)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator and records it; raises RecordingError if it cannot be repeated."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[OperatorCall] = []
        self.made: dict[int, Tensor] = {}
        """A tensor of each storage that the calls have made, by `storage_key`; kept, so that no
        memory is used twice."""
        self._constants: dict[int, Tensor] = {}
        """The same for tensors that the step makes from numbers of the host."""

    def record(self, function: Callable[[], None]) -> None:
        with HostReads(lambda name, _, reason: _refuse(name, reason)), self:
            function()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # skipping would import torch._dynamo, which takes seconds

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        with torch._C.DisableTorchFunction():  # an operator may read what it likes
            return self._record(func, args, kwargs or {})

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.detach_.default:  # torch.tensor calls it
            return func(*args, **kwargs)
        if reason := refused_before(func, args, kwargs):
            _refuse(func, reason)
        watch = CallWatch(func, args, kwargs)
        if any(storage_key(tensor) in self._constants for tensor in watch.written):
            _refuse(func, CONSTANT)
        results = func(*args, **kwargs)
        if func is torch.ops.aten.lift_fresh.default:
            self._constants[storage_key(results)] = results
            return results
        if reason := watch.refused_after(results):
            _refuse(func, reason)
        new = [t for t in tensors_of(results) if storage_key(t) not in watch.given]
        if not new and not func._schema.is_mutable:
            return results  # a view
        self.made |= {storage_key(tensor): tensor for tensor in new}
        if func not in _ALLOCATIONS:
            self.calls.append(_call(func, args, kwargs, new))
        return results


def _refuse(what: object, reason: str) -> NoReturn:
    raise RecordingError(f"{what} cannot be recorded: {reason}")


def _call(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], new: list[Tensor]
) -> OperatorCall:
    if not new:
        return OperatorCall(func, args, kwargs)
    if func.namespace == _COLLECTIVES:
        return OperatorCall(_collecting(func), (tuple(new), *args), kwargs)
    writing = None if func._schema.is_mutable else _writing_form(func)
    if writing is None or len(new) != len(func._schema.returns):
        return OperatorCall(_calling(func), (tuple(new), *args), kwargs)
    operator, names = writing
    return OperatorCall(operator, args, kwargs | dict(zip(names, new, strict=True)))


@functools.cache
def _calling(func: Any) -> Callable[..., None]:
    """Return a function that calls an operator and copies its results to given tensors."""

    def call(results: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> None:
        made = [*tensors_of(func(*args, **kwargs))]
        if [value.shape for value in made] != [result.shape for result in results]:
            _refuse(func, VARYING_SHAPE)
        for result, value in zip(results, made, strict=True):
            result.copy_(value)

    return call


@functools.cache
def _collecting(func: Any) -> Callable[..., None]:
    """Do the same with a collective, whose result must be waited for."""

    def call(results: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> None:
        made = torch.ops._c10d_functional.wait_tensor(func(*args, **kwargs))
        results[0].copy_(made)

    return call


@functools.cache
def _writing_form(func: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the overload that writes its results to given tensors, and their names."""
    wanted = [(a.name, str(a.type), a.kwarg_only) for a in func._schema.arguments]
    for name in func.overloadpacket.overloads():
        overload = getattr(func.overloadpacket, name)
        given = overload._schema.arguments
        out = [a.name for a in given if a.is_out]
        plain = [(a.name, str(a.type), a.kwarg_only) for a in given if not a.is_out]
        if len(out) == len(func._schema.returns) and plain == wanted:
            return overload, tuple(out)
    return None


def _replaced(value: Any, place: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return place(value)
    if isinstance(value, tuple | list):
        return type(value)([_replaced(part, place) for part in value])
    return value
