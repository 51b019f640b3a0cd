"""Nested arguments of a compiled piece, taken apart into tensors and put together again.

A compiler takes a flat list of tensors. Pieces are called with nested tuples (NamedTuples mostly);
everything in them that is not a tensor or a tuple is static: it is part of what is compiled.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

Structure = Any
"""Hashable: nested tuples of (type, *children), TENSOR where a tensor stands, and static values."""


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


TENSOR = _Tensor()


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Return the tensors of a nested value in order, and the structure that `unflatten` takes."""
    tensors: list[Tensor] = []
    return tensors, _take_apart(value, tensors)


def unflatten(structure: Structure, tensors: Iterator[Tensor]) -> Any:
    """Put a nested value together again."""
    if structure is TENSOR:
        return next(tensors)
    if not isinstance(structure, tuple):
        return structure
    kind, *children = structure
    values = [unflatten(child, tensors) for child in children]
    return tuple(values) if kind is tuple else kind(*values)


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors of a nested value in order: the cheap half of `flatten`, for replays."""
    tensors: list[Tensor] = []
    _collect(value, tensors)
    return tensors


def _take_apart(value: Any, tensors: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if isinstance(value, tuple):
        return type(value), *(_take_apart(child, tensors) for child in value)
    return value


def _collect(value: Any, tensors: list[Tensor]) -> None:
    for child in value:
        if isinstance(child, Tensor):
            tensors.append(child)
        elif isinstance(child, tuple):
            _collect(child, tensors)
