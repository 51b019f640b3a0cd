"""What a list of operators cannot repeat, and what a step function should do instead.

A replay makes the same calls with the same numbers over the same places in memory. So an operator
may read tensors however it likes, but nothing that it read may reach the host: a later argument, a
shape or a branch would keep the value of the recorded step. Nor may a call move a tensor. This
module judges single calls; it knows neither recordings nor the registry.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

_NUMBERS = int | float | complex | torch.SymInt | torch.SymFloat | torch.SymBool
_OWN_TAGS = ("aten", "prims", "prim")
"""Namespaces whose operators are tagged reliably, so that their results need no inspection."""
_INDEXING = (torch.ops.aten.index, torch.ops.aten._unsafe_index)
_PUTTING = (torch.ops.aten.index_put, torch.ops.aten.index_put_)
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_UNSTATED_VIEWS = ("_c10d_functional",)
"""Namespaces whose operators return an argument although their schema does not say it."""

HOST_VALUE = (
    "it hands a value that depends on values of the recorded step to the host; keep it in a tensor "
    "and choose with torch.where"
)
HOST_POINTER = (
    "it hands the address of a tensor to the host, and reads and writes there are not recorded; "
    "use operators on the tensor"
)
VARYING_SHAPE = (
    "the shape of its result depends on values of the recorded step; use a fixed shape and a mask, "
    "as torch.where does"
)
RANDOM = (
    "it draws random numbers, so a replay differs from an eager step; look noise up by seed and "
    "position"
)
RESHAPED = (
    "it changes the shape or memory of an existing tensor, which earlier calls use as it was; use "
    "the form that returns a new view or tensor, or give it a result of the right shape"
)
MIXED = (
    "it returns an argument beside a new tensor, and the arena places new tensors only; return the "
    "new one alone"
)
SILENT = (
    "by its schema it writes to no argument and returns no new tensor, so a replay would leave it "
    "out; mark in the schema what it writes or returns, as in Tensor(a!)"
)
CONSTANT = (
    "it writes to a constant that the step made from numbers of the host, which a replay does not "
    "make again; write to a clone of it"
)
UNPLACEABLE = (
    "it uses a tensor that is not plain memory of the CPU (sparse, quantised, lazily conjugated, "
    "of a subclass or of another device), which the arena cannot place; use a plain tensor"
)
OVERLAPS = "elements of its result share memory, so they cannot be written again; clone the result"


class HostReads(TorchFunctionMode):
    """Calls `found` with the name, the tensor and the reason for each access past operators."""

    def __init__(self, found: Callable[[str, Tensor, str], None]) -> None:
        super().__init__()
        self._found = found

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = tensors_of(args)
        if given and (reason := _past_operators(func, len(given))):
            self._found(f"Tensor.{func.__name__}", given[-1], reason)
        return func(*args, **(kwargs or {}))


def _past_operators(func: Any, num_tensors: int) -> str:
    name = getattr(func, "__name__", "")
    if name in ("tolist", "numpy", "__array__", "__dlpack__"):
        return HOST_VALUE
    if name in ("data_ptr", "untyped_storage", "storage"):
        return HOST_POINTER
    if name == "tensor_split" and num_tensors > 1:
        return HOST_VALUE  # the places are read, and become arguments of views
    return RESHAPED if func == _SET_DATA else ""


class _Rules(NamedTuple):
    """What an operator's tags and schema say of every call."""

    reads_value: bool
    varies: bool
    is_view_in_place: bool
    may_draw: bool
    may_give_number: bool
    may_be_view: bool
    is_mutable: bool
    written: tuple[tuple[int, str], ...]
    """Index and name of each argument that is written to."""


@functools.cache
def _rules(func: Any) -> _Rules:
    tags, schema = func.tags, func._schema
    is_own, is_mutable = func.namespace in _OWN_TAGS, schema.is_mutable
    states_view = any(one.alias_info is not None for one in schema.returns)
    arguments = enumerate(schema.arguments)
    return _Rules(
        reads_value=torch.Tag.data_dependent_output in tags,
        varies=torch.Tag.dynamic_output_shape in tags,
        is_view_in_place=torch.Tag.inplace_view in tags,
        may_draw=torch.Tag.nondeterministic_seeded in tags or not is_own,
        may_give_number=not is_own and any(schema.arguments),
        may_be_view=is_own or states_view or func.namespace in _UNSTATED_VIEWS,
        is_mutable=is_mutable,
        written=tuple(
            (i, one.name) for i, one in arguments if one.alias_info and one.alias_info.is_write
        ),
    )


def host_value(func: Any, results: Any) -> str:
    """Return why the host knows a value of this step after a call, or an empty string."""
    rules = _rules(func)
    gives = rules.may_give_number and any(isinstance(v, _NUMBERS) for v in leaves(results))
    return HOST_VALUE if rules.reads_value or gives else ""


def varying_shape(func: Any, args: tuple[Any, ...]) -> str:
    """Return why a result has no fixed shape, or an empty string."""
    is_varying = _rules(func).varies
    if func.overloadpacket in _INDEXING:
        is_varying = any(map(_is_mask, tensors_of(args[1])))
    elif func.overloadpacket in _PUTTING:
        is_varying = any(map(_is_mask, tensors_of(args[1]))) and args[2].numel() != 1
    return VARYING_SHAPE if is_varying else ""


def _is_mask(index: Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def unplaceable(values: Any) -> str:
    """Return why a tensor is not plain memory, or an empty string."""
    return "" if all(map(_is_plain, tensors_of(values))) else UNPLACEABLE


def _is_plain(tensor: Tensor) -> bool:
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    is_own = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu"
    return is_strided and is_own and not (tensor.is_conj() or tensor.is_neg())


def refused_before(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Return why a call cannot be repeated, as far as its arguments show, or an empty string."""
    rules = _rules(func)
    if rules.reads_value:
        return HOST_VALUE
    if rules.is_view_in_place:
        return RESHAPED
    if kwargs.get("generator") is not None:
        return RANDOM
    return unplaceable((args, *kwargs.values())) or varying_shape(func, args)


class CallWatch:
    """What a call may not change although its schema allows it; compared afterwards."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._func, self._rules = func, _rules(func)
        self.given = {storage_key(tensor) for tensor in tensors_of((args, *kwargs.values()))}
        self.written = [
            tensor
            for i, name in self._rules.written
            for tensor in tensors_of(args[i] if i < len(args) else kwargs.get(name))
        ]
        self._memory = [_memory_of(tensor) for tensor in self.written]
        draws = self._rules.may_draw
        self._state = torch.default_generator.get_state() if draws else None

    def refused_after(self, results: Any) -> str:
        """Return why the call cannot be repeated, or an empty string."""
        if reason := host_value(self._func, results) or unplaceable(results):
            return reason
        state = self._state
        if state is not None and not torch.equal(state, torch.default_generator.get_state()):
            return RANDOM
        if self._memory != [_memory_of(tensor) for tensor in self.written]:
            return RESHAPED
        returned = tensors_of(results)
        new = [tensor for tensor in returned if storage_key(tensor) not in self.given]
        if any(map(_overlaps, new)):
            return OVERLAPS
        if new:
            return MIXED if len(new) != len(returned) else ""
        return "" if self._rules.is_mutable or self._rules.may_be_view else SILENT


def storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memory_of(tensor: Tensor) -> tuple[object, ...]:
    storage = tensor.untyped_storage()
    return storage._cdata, storage.nbytes(), tensor.shape, tensor.stride(), tensor.storage_offset()


def _overlaps(tensor: Tensor) -> bool:
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    return any(size > 1 and stride == 0 for size, stride in strides) and tensor.numel() > 0


def leaves(values: Any) -> list[Any]:
    if not isinstance(values, tuple | list):
        return [values]
    return [leaf for value in values for leaf in leaves(value)]


def tensors_of(values: Any) -> list[Tensor]:
    return [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
