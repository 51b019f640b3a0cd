"""Faster Triton interpreter: caches work that it would repeat for every operation.

The cache depends on no kernel, and on no tensor that a kernel computes.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
COMPARISONS = {
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater,
    "greater_equal": np.greater_equal, "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip
BITWISE = {"and_": np.bitwise_and, "or_": np.bitwise_or, "xor_": np.bitwise_xor}
NUMBERS = "int32", "int64", "fp32"
BITS = "int32", "int64", "int1"


def make_quick() -> None:
    patch_once_a_launch()
    call_directly()
    remember_types()
    remember_conversions()
    unwrap_quickly()
    for ops, kinds in ((ARITHMETIC, NUMBERS), (COMPARISONS, NUMBERS), (BITWISE, BITS)):
        for name, compute in ops.items():
            compute_directly(name, compute, kinds)
    compute_no_unread_overflow()


def patch_once_a_launch() -> None:
    """Patch triton.language once per launch.

    The interpreter patches it again whenever one jit function calls another, although nothing is
    restored before the launch ends. That takes half of its time.
    """
    patched: set[ModuleType] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @functools.cache
    def seen_by(fn: Callable[..., Any]) -> frozenset[ModuleType]:
        return frozenset(lang for lang in (tl, tl.core) if lang in fn.__globals__.values())

    def patch_once(fn: Callable[..., Any]) -> Any:
        if patched >= seen_by(fn):
            return None  # only a launch restores, and it patches first
        patched.update(seen_by(fn))
        return patch(fn)

    def launch_unpatched(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_unpatched


def call_directly() -> None:
    """Call a builtin without the two functions that look up and pass the semantic."""

    def patch_attr(owner: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        builtin = getattr(member, "__wrapped__", member)
        semantic = interpreter.interpreter_semantic

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return builtin(*args, **kwargs)

        scope.set_attr(owner, name, call)

    interpreter._patch_attr = patch_attr


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


def remember_conversions() -> None:
    """Cache the common type of two types. A tensor that has the requested type is not cast."""
    semantic = type(interpreter.interpreter_semantic)
    broadcast, common, cast = (
        semantic.broadcast_impl_value,
        semantic.computation_type_impl,
        semantic.cast,
    )
    shaped: dict[Any, tuple[Any, Any]] = {}
    commons: dict[Any, Any] = {}

    def broadcast_again(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        key = lhs.type.name, rhs.type.name
        if key not in shaped:
            made = broadcast(self, lhs, rhs)
            shaped[key] = made[0].type, made[1].type
            return made
        return shape(self, lhs, shaped[key][0]), shape(self, rhs, shaped[key][1])

    def shape(self: Any, tensor: Any, to: Any) -> Any:
        if tensor.type.name == to.name:
            return tensor
        if tensor.type.is_block():
            return self.make_tensor(self.builder.create_broadcast(tensor.handle, to.shape), to)
        return self.make_tensor(self.builder.create_splat(to, tensor.handle), to)

    def common_again(self: Any, a: Any, a_is_scalar: bool, b: Any, *more: bool) -> Any:
        key = a.name, a_is_scalar, b.name, *more
        if key not in commons:
            commons[key] = common(self, a, a_is_scalar, b, *more)
        return commons[key]

    def cast_others(self: Any, input: Any, dst_ty: Any, *rounding: Any) -> Any:
        return input if input.dtype is dst_ty.scalar else cast(self, input, dst_ty, *rounding)

    semantic.broadcast_impl_value = broadcast_again
    semantic.computation_type_impl = common_again
    semantic.cast = cast_others


def unwrap_quickly() -> None:
    """Return at once what holds no constexpr."""
    unwrap = tl.core._unwrap_if_constexpr
    plain = frozenset((tl.tensor, int, float, bool, type(None)))
    tl.core._unwrap_if_constexpr = lambda o: o if type(o) in plain else unwrap(o)


def compute_directly(name: str, compute: np.ufunc, kinds: tuple[str, ...]) -> None:
    """Compute an operation on two tensors of the same element type, or a tensor and a number, or a
    pointer and an offset, without the steps that convert and broadcast them: NumPy does so too.

    The first operation on two types takes these steps, and its result gives the type of the others.
    """
    semantic = type(interpreter.interpreter_semantic)
    steps = getattr(semantic, name)
    results: dict[Any, tuple[Any, Any]] = {}

    def operate(self: Any, lhs: Any, rhs: Any, *more: Any, **named: Any) -> Any:
        key, operands = operands_of(lhs, rhs)
        if key not in results:
            made = steps(self, lhs, rhs, *more, **named)
            if operands is not None:
                results[key] = made.type, made.handle.dtype
            return made
        type, dtype = results[key]
        return tl.tensor(handle_of(compute(*operands), dtype), type)

    def operands_of(lhs: Any, rhs: Any) -> tuple[Any, Any]:
        if isinstance(lhs, tl.tensor):
            kind = lhs.dtype.name
            if isinstance(rhs, tl.tensor):
                key = lhs.type.name, rhs.type.name
                if kind in kinds and rhs.dtype.name == kind:
                    return key, (lhs.handle.data, rhs.handle.data)
                if name == "add" and lhs.dtype.is_ptr() and rhs.dtype.name in ("int32", "int64"):
                    width = max(1, lhs.dtype.element_ty.primitive_bitwidth // 8)
                    offsets = rhs.handle.data.astype(np.uint64)
                    return key, (lhs.handle.data, width * offsets)
            elif kind in kinds and type(rhs) is (int if kind != "fp32" else float):
                return (lhs.type.name, rhs), (lhs.handle.data, constant(rhs, kind))
        return None, None

    setattr(semantic, name, operate)


@functools.cache
def constant(value: float, kind: str) -> Any:
    return np.array([value], {"int32": np.int32, "int64": np.int64, "fp32": np.float32}[kind])


def handle_of(data: Any, dtype: Any) -> Any:
    """Return a handle without checking that the data has the width of the type."""
    handle = object.__new__(interpreter.TensorHandle)
    handle.data, handle.dtype, handle.attr = data, dtype, {}
    return handle


def compute_no_unread_overflow() -> None:
    """Skip the repetition of sums in 64 bits, which serves an assert that only debug builds
    have."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
