"""Faster Triton interpreter: records what each operation does, and replays it.

An operation of a kernel passes through Python that checks, converts and broadcasts its operands
and then asks a builder for arrays. What it asks for follows from the types of the tensors and the
values of the other arguments. So it is recorded once for each of these, and later calls only make
the arrays. The records depend on no kernel, and on no tensor that a kernel computes. An operation
that cannot be recorded runs as ever.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    patch_once_a_launch()
    remember_types()
    load_at_once()
    convert_by_table()
    compute_no_unread_overflow()
    interpreter._patch_attr = patch_attr


def patch_once_a_launch() -> None:
    """Patch triton.language once per launch, and look up only once what is to be patched.

    The interpreter patches it again whenever one jit function calls another, although nothing is
    restored before the launch ends. That takes half of its time.
    """
    patched: set[Any] = set()
    patches: dict[Any, list[tuple[Any, str, Any]]] = {}
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @functools.cache
    def seen_by(fn: Callable[..., Any]) -> frozenset[Any]:
        return frozenset(lang for lang in (tl, tl.core) if lang in fn.__globals__.values())

    def patch_once(fn: Callable[..., Any]) -> Any:
        seen = seen_by(fn)
        if patched >= seen:
            return None  # only a launch restores, and it patches first
        patched.update(seen)
        if seen not in patches:
            scope = patch(fn)
            changes = [(owner, name) for owner, name, _ in scope._changes]
            patches[seen] = [(owner, name, getattr(owner, name)) for owner, name in changes]
            return scope
        scope = interpreter._LangPatchScope()
        for change in patches[seen]:
            scope.set_attr(*change)
        return scope

    def launch_unpatched(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_unpatched


def remember_types() -> None:
    """Cache types: the parts of a type follow from its element and shape, and those of a tensor
    from its type, except for its value. A type equals itself."""
    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    blocks: dict[Any, dict[str, Any]] = {}
    tensors: dict[Any, dict[str, Any]] = {}
    arrays: dict[str, Any] = {}

    def block_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *(getattr(size, "value", size) for size in shape)
        if key not in blocks:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        vars(self).update(blocks[key])

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in tensors:
            make_tensor(self, handle, type)
            tensors[type.name] = dict(vars(self))
        vars(self).update(tensors[type.name])
        self.handle = handle

    array_of = interpreter._get_np_dtype

    def array_type(dtype: Any) -> Any:
        if dtype.name not in arrays:
            arrays[dtype.name] = array_of(dtype)
        return arrays[dtype.name]

    tl.block_type.__init__, tl.tensor.__init__ = block_init, tensor_init
    interpreter._get_np_dtype = array_type
    for kind in (tl.dtype, tl.block_type, tl.pointer_type):
        kind.__eq__ = same_or(kind.__eq__)


def same_or(equals: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    return lambda this, other: this is other or equals(this, other)


def load_at_once() -> None:
    """Let NumPy load large tensors: the interpreter takes long for each element."""
    load = interpreter._interpreter.load

    def gather(pointers: Any, mask: Any, other: Any, dtype: Any) -> Any:
        size = dtype.itemsize
        if pointers.size < 256 or other.dtype != dtype or not mask.any():
            return load(pointers, mask, other, dtype)
        is_whole = mask.all()
        if not is_whole:
            pointers = np.where(mask, pointers, pointers[mask].min())
        first = pointers.min()
        offsets = (pointers - first).view(np.int64)
        if (offsets & size - 1).any():
            return load(pointers, mask, other, dtype)
        indices = offsets >> size.bit_length() - 1
        numbers = array_at(int(first), int(indices.max()) + 1, dtype)[indices]
        return numbers if is_whole else np.where(mask, numbers, other)

    interpreter._interpreter.load = gather


def array_at(address: int, size: int, dtype: Any) -> Any:
    described = {"data": (address, True), "shape": (size,), "typestr": dtype.str, "version": 3}
    return np.asarray(SimpleNamespace(__array_interface__=described))


def convert_by_table() -> None:
    """Convert floats of 8 and 16 bits by looking them up; they are few."""
    convert = interpreter._convert_float

    @functools.cache
    def table(input_dtype: Any, *more: Any) -> Any:
        bits = input_dtype.primitive_bitwidth
        return convert(np.arange(1 << bits).astype(f"uint{bits}"), input_dtype, *more)

    def look_up(values: Any, input_dtype: Any, output_dtype: Any, rounding: Any) -> Any:
        bits = input_dtype.primitive_bitwidth
        if bits > 16:
            return convert(values, input_dtype, output_dtype, rounding)
        return table(input_dtype, output_dtype, rounding)[values.view(f"uint{bits}")]

    interpreter._convert_float = look_up


def compute_no_unread_overflow() -> None:
    """Skip the repetition of sums in 64 bits, which serves an assert that only debug builds
    have."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def patch_attr(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
    scope.set_attr(owner, name, replayed(getattr(member, "__wrapped__", member)))


recording: list[Any] = []
"""The semantic of the builtin that is being recorded, if one is."""

Replay = Callable[[list[Any]], Any]
"""A function of the handles of a builtin's tensors that returns its result."""


@functools.cache
def replayed(builtin: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that records a builtin for each key of its arguments, and replays it."""
    replays: dict[Any, Replay] = {}
    refused: set[Any] = {None}

    def call(*args: Any, **kwargs: Any) -> Any:
        if recording or "_semantic" in kwargs:  # another builtin calls this one
            kwargs["_semantic"] = recording[-1] if recording else interpreter.interpreter_semantic
            return builtin(*args, **kwargs)
        handles: list[Any] = []
        key = key_of(args, kwargs, handles)
        replay = replays.get(key)
        if replay is not None:
            return replay(handles)
        if key in refused:
            return builtin(*args, **kwargs, _semantic=interpreter.interpreter_semantic)
        replay, result = record(builtin, args, kwargs)
        if replay is None:
            refused.add(key)
        else:
            replays[key] = replay
        return result

    return call


def key_of(args: Any, kwargs: dict[str, Any], handles: list[Any]) -> Any:
    """Return what the steps of a builtin may depend on, or None if that is not known. Append the
    handles of tensors, on which they do not depend."""
    parts: list[Any] = [*kwargs]
    try:
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is tl.tensor:
                handles.append(value.handle)
                parts.append(value.type.name)
            elif kind in PLAIN:
                parts += kind, value
            else:
                parts += kind, KEYS[kind](value, handles)
    except KeyError:
        return None
    return tuple(parts)


def key_of_values(values: Any, handles: list[Any]) -> Any:
    key = key_of(values, {}, handles)
    if key is None:
        raise KeyError(values)
    return key


PLAIN = frozenset((bool, int, str, type(None)))
KEYS: dict[type, Callable[[Any, list[Any]], Any]] = {
    tl.constexpr: lambda constant, handles: key_of_values((constant.value,), handles),
    **dict.fromkeys((tuple, list), key_of_values),
    **dict.fromkeys((float, slice), lambda value, _: repr(value)),  # tells zeros apart
    **dict.fromkeys((tl.dtype, tl.block_type, tl.pointer_type), lambda dtype, _: dtype.name),
}


def record(builtin: Any, args: Any, kwargs: Any) -> tuple[Replay | None, Any]:
    """Call a builtin. Return what replays it, or None if nothing can, and its result."""
    args = [distinct(value) for value in args]
    kwargs = {name: distinct(value) for name, value in kwargs.items()}
    handles: list[Any] = []
    key_of(args, kwargs, handles)
    recorder = Recorder(handles)
    recording.append(type(interpreter.interpreter_semantic)(recorder))
    try:
        result = builtin(*args, **kwargs, _semantic=recording[-1])
    finally:
        recording.pop()
    tensors = [result] if type(result) is tl.tensor else result
    if not isinstance(tensors, tuple | list) or {type(one) for one in tensors} != {tl.tensor}:
        return None, result
    return recorder.replay_of(tensors, type(result)), result


def distinct(value: Any) -> Any:
    """Return a tensor with a handle of its own, by which a record can tell it from others."""
    return tl.tensor(copy.copy(value.handle), value.type) if type(value) is tl.tensor else value


class Step(NamedTuple):
    """A call of a method of the builder, or a function of arrays that makes the same."""

    name: str
    compute: Callable[..., Any] | None
    operands: tuple[Any, ...]
    """Handles; a call has other arguments too."""
    made: tuple[Any, ...]
    """Handles, or None if the call stores."""

    def maker(self, slots: dict[int, int]) -> Callable[[list[Any]], Any]:
        """Return a function of the handles in their slots that returns what it makes."""
        operands = [
            (slots[id(one)], None) if is_handle(one) else (-1, one) for one in self.operands
        ]
        if self.compute is not None:
            return handle_maker(self.compute, [slot for slot, _ in operands], self.made[0].dtype)
        builder, name = interpreter.interpreter_builder, self.name

        def call(handles: list[Any]) -> Any:
            method = getattr(builder, name)  # which a test may replace
            return method(*[one if slot < 0 else handles[slot] for slot, one in operands])

        return call


def handle_maker(
    compute: Callable[..., Any], slots: list[int], dtype: Any
) -> Callable[[list[Any]], Any]:
    """Return a function of handles that makes one. A record has checked its parts."""
    new, kind = object.__new__, interpreter.TensorHandle

    def make(handles: list[Any]) -> Any:
        handle = new(kind)
        handle.data = compute(*[handles[slot].data for slot in slots])
        handle.dtype, handle.attr = dtype, {}
        return handle

    return make


def tensor_maker(tensor: Any) -> Callable[[Any], Any]:
    """Return a function of a handle that makes a tensor like this."""
    new, kind, attributes = object.__new__, tl.tensor, vars(tensor)

    def make(handle: Any) -> Any:
        tensor = new(kind)
        tensor.__dict__ = {**attributes, "handle": handle}
        return tensor

    return make


class Recorder:
    """Stands in for the builder while a builtin runs, and notes what it asks for."""

    def __init__(self, handles: list[Any]) -> None:
        self.arguments = handles
        self.known = {id(handle): handle for handle in handles}
        self.is_complete = len(self.known) == len(handles)
        """False if the record cannot tell where a handle comes from."""
        self.constants: list[Any] = []
        self.steps: list[Step] = []
        self.sources: dict[int, Any] = {}
        """What a handle only repeats, by its id."""

    def __getattr__(self, name: str) -> Any:
        member = getattr(interpreter.interpreter_builder, name)
        if name.startswith("create_"):
            return functools.partial(self.create, name, member)
        return functools.partial(self.get, member) if name.startswith("get_") else member

    def get(self, member: Callable[..., Any], *args: Any) -> Any:
        value = member(*args)
        if is_handle(value):
            self.add_constant(value)
        return value

    def add_constant(self, handle: Any) -> None:
        self.known[id(handle)] = handle
        self.constants.append(handle)

    def create(self, name: str, member: Callable[..., Any], *args: Any, **named: Any) -> Any:
        result = member(*args, **named)
        if named or not all(map(self.is_known, args)):
            self.is_complete = False
            return result
        compute, operands = self.on_arrays(name, args, result)
        if compute and all(any(one is of for of in self.constants) for one in operands):
            self.add_constant(result)
            return result
        made = result if type(result) is tuple else (result,)
        self.known |= {id(handle): handle for handle in made}
        self.steps.append(Step(name, compute, tuple(operands), made))
        return result

    def is_known(self, value: Any) -> bool:
        if isinstance(value, list | tuple):
            return not any(map(is_handle, value))
        return not is_handle(value) or id(value) in self.known

    def on_arrays(self, name: str, args: Any, result: Any) -> tuple[Any, Any]:
        """Return a function of arrays that does the same as a call of the builder, and its
        operands, or None and the arguments of the call."""
        operands = [one for one in args if is_handle(one)]
        sources = [self.sources.get(id(one), one) for one in operands]
        if name in ("create_splat", "create_broadcast"):
            (self.sources[id(result)],) = sources
        for compute, broadcasts in functions_for(name, operands, result):
            for handles in (sources, operands)[not broadcasts :]:
                if is_same(compute(*[one.data for one in handles]), result.data):
                    return compute, handles
        return None, args

    def replay_of(self, tensors: Any, returns: type) -> Replay | None:
        """Return a function that repeats the steps and returns tensors like these."""
        used = {id(tensor.handle) for tensor in tensors}
        steps: list[Step] = []
        for step in reversed(self.steps):
            if step.compute is None or used & {id(handle) for handle in step.made}:
                steps.insert(0, step)
                used |= {id(operand) for operand in step.operands}
        constants = [handle for handle in self.constants if id(handle) in used]
        made = [handle for step in steps for handle in step.made]
        slots = {id(one): i for i, one in enumerate([*self.arguments, *constants, *made])}
        if not self.is_complete or any(id(tensor.handle) not in slots for tensor in tensors):
            return None
        makers = [step.maker(slots) for step in steps]
        results = [(slots[id(tensor.handle)], tensor_maker(tensor)) for tensor in tensors]

        def replay(handles: list[Any]) -> Any:
            handles += constants
            for make in makers:
                made = make(handles)
                handles += made if type(made) is tuple else (made,)
            tensors = [tensor_of(handles[slot]) for slot, tensor_of in results]
            return tensors[0] if returns is tl.tensor else returns(tensors)

        def replay_one(handles: list[Any]) -> Any:
            handles += constants
            return tensor_of(make(handles))

        if returns is tl.tensor and len(steps) == 1 and tensors[0].handle is steps[0].made[0]:
            (make,), ((_, tensor_of),) = makers, results
            return replay_one
        return replay


def is_handle(value: Any) -> bool:
    return isinstance(value, interpreter.TensorHandle)


def is_same(array: Any, other: Any) -> bool:
    kinds = (array.shape, array.dtype), (other.shape, other.dtype)
    return kinds[0] == kinds[1] and array.tobytes() == other.tobytes()


BITWISE = np.bitwise_and, np.bitwise_or, np.bitwise_xor


def functions_for(
    name: str, operands: list[Any], result: Any
) -> Iterator[tuple[Callable[..., Any], bool]]:
    """Generate functions of the operands' data that may do what a method of the builder does, and
    whether they broadcast it."""
    data = getattr(result, "data", None)
    method = getattr(type(interpreter.interpreter_builder), name)
    code = getattr(method, "__code__", None)
    match name, getattr(code, "co_names", ()):
        case _, ("binary_op" | "unary_op" | "ternary_op", "np", function):
            compute, broadcasts = getattr(np, function), len(operands) > 1
            if compute in BITWISE or any(one.data.dtype != bool for one in operands):
                yield compute, broadcasts
                yield lambda *arrays: compute(*arrays).astype(data.dtype), broadcasts
        case _, ("cast_impl",):
            if tl.bfloat16 not in (operands[0].dtype.scalar, result.dtype.scalar):
                yield lambda array: array.astype(data.dtype), False
        case "create_make_range", _:
            yield lambda: data, False
        case "create_splat", _:
            yield lambda array: np.full(data.shape, array, data.dtype), False
        case "create_broadcast", _:
            yield lambda array: np.broadcast_to(array, data.shape), False
        case "create_expand_dims" | "create_reshape", _:
            yield lambda array: array.reshape(data.shape), False
        case "create_addptr", _:
            width = max(1, result.get_element_ty().primitive_bitwidth // 8)
            yield lambda pointers, offsets: pointers + width * offsets.astype(np.uint64), True
        case "create_load" | "create_masked_load", _:
            rest = (np.ones_like(data, bool), np.zeros_like(data))[len(operands) - 1 :]
            load = interpreter._interpreter.load
            yield lambda *arrays: load(*arrays, *rest, data.dtype), False
