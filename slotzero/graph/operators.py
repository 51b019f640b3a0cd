"""The operators that a function calls, recorded with their arguments.

A recorded call writes its results to the memory where the recording run put them, so it can be made
again over other values. Views are not called again: their memory is that of their base. A result
that depends on a value (`nonzero`, `item`) cannot be recorded.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slotzero.errors import RecordingError

_ALLOCATIONS = {  # results whose memory is written by a later call
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}
_COLLECTIVES = "_c10d_functional"


class Call(NamedTuple):
    operator: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def tensors(self) -> Iterator[Tensor]:
        yield from _tensors_of(self.args)
        yield from _tensors_of(tuple(self.kwargs.values()))

    def over(self, place: Callable[[Tensor], Tensor]) -> "Call":
        """Return the same call with each tensor replaced."""
        kwargs = {name: _replaced(value, place) for name, value in self.kwargs.items()}
        return Call(self.operator, _replaced(self.args, place), kwargs)


class OperatorRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs every operator and records it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Call] = []
        self.made: dict[int, Tensor] = {}
        """A tensor of each storage that the calls have made, by `storage_key`; kept, so that no
        memory is used twice."""

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
        kwargs = kwargs or {}
        _refuse_dynamic(func, args)
        given = {storage_key(tensor) for tensor in Call(func, args, kwargs).tensors()}
        results = func(*args, **kwargs)
        new = [t for t in _tensors_of((results,)) if storage_key(t) not in given]
        is_lifted = func is torch.ops.aten.lift_fresh.default
        if is_lifted or (not new and not func._schema.is_mutable):
            return results  # a view, or a constant
        self.made |= {storage_key(tensor): tensor for tensor in new}
        if func not in _ALLOCATIONS:
            self.calls.append(_call(func, args, kwargs, new))
        return results


def storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _refuse_dynamic(func: Any, args: tuple[Any, ...]) -> None:
    tags = func.tags
    is_dynamic = torch.Tag.data_dependent_output in tags or torch.Tag.dynamic_output_shape in tags
    if func is torch.ops.aten.index.Tensor:
        is_dynamic = any(t.dtype in (torch.bool, torch.uint8) for t in _tensors_of(args[1:]))
    if is_dynamic:
        raise RecordingError(f"{func}: its result depends on values of the recorded step")


def _call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], new: list[Tensor]) -> Call:
    if not new:
        return Call(func, args, kwargs)
    if func.namespace == _COLLECTIVES:
        return Call(_collecting(func), (tuple(new), *args), kwargs)
    writing = None if func._schema.is_mutable else _writing_form(func)
    if writing is None or len(new) != len(func._schema.returns):
        return Call(_calling(func), (tuple(new), *args), kwargs)
    operator, names = writing
    return Call(operator, args, kwargs | dict(zip(names, new, strict=True)))


@functools.cache
def _calling(func: Any) -> Callable[..., None]:
    """Return a function that calls an operator and copies its results to given tensors."""

    def call(results: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> None:
        made = func(*args, **kwargs)
        fresh = [t for t in _tensors_of((made,)) if t.numel()]
        for result, value in zip((r for r in results if r.numel()), fresh, strict=True):
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


def _tensors_of(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, tuple | list):
        for value in values:
            yield from _tensors_of(value)


def _replaced(value: Any, place: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(value, Tensor):
        return place(value)
    if isinstance(value, tuple | list):
        return type(value)([_replaced(part, place) for part in value])
    return value
