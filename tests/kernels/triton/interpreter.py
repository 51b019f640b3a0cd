"""Faster Triton interpreter: caches work that it would repeat for every operation.

The cache depends on no kernel, and on no value that a kernel computes.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_quick() -> None:
    patch_once_a_launch()
    call_directly()
    remember_types()
    remember_conversions()
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


def compute_no_unread_overflow() -> None:
    """Skip the repetition of sums in 64 bits, which serves an assert that only debug builds
    have."""
    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
