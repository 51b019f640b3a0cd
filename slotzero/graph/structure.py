"""Nested arguments of a piece, taken apart into tensors and put together again.

Pieces are called with nested tuples (NamedTuples mostly). Everything in them that is neither a
tensor nor a tuple is static.
"""

from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from torch import Tensor

Structure = Any
"""Hashable: nested tuples of (type, *children), TENSOR where a tensor stands, and static values."""


class _Tensor:
    def __repr__(self) -> str:
        return "tensor"


TENSOR = _Tensor()


def flatten(value: Any) -> tuple[list[Tensor], Structure]:
    """Return the tensors of a nested value in order, and its structure."""
    tensors: list[Tensor] = []
    return tensors, _take_apart(value, tensors)


def builder(structure: Structure) -> Callable[[Sequence[Tensor]], Any]:
    """Return a function that puts a value with this structure together from its tensors."""
    names: dict[str, Any] = {}
    numbers = count()

    def expression(part: Structure) -> str:
        if part is TENSOR:
            return f"tensors[{next(numbers)}]"
        name = f"name{len(names)}"
        if not isinstance(part, tuple):
            names[name] = part
            return name
        kind, *children = part
        values = "".join(f"{expression(child)}, " for child in children)
        if kind is tuple:
            return f"({values})"
        name = f"name{len(names)}"
        names[name] = kind
        return f"{name}({values})"

    source = f"lambda tensors: {expression(structure)}"
    made: Callable[[Sequence[Tensor]], Any] = eval(source, names)
    return made


def _take_apart(value: Any, tensors: list[Tensor]) -> Structure:
    if isinstance(value, Tensor):
        tensors.append(value)
        return TENSOR
    if isinstance(value, tuple):
        return type(value), *(_take_apart(child, tensors) for child in value)
    return value
