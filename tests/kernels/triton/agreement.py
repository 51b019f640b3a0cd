"""Comparison of two kernel sets: the same inputs must give bitwise identical results."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from slotzero.kernels.reference import ReferenceKernels
from slotzero.kernels.triton.kernels import TritonKernels
from slotzero.kernels.types_speculation import DraftTables

NAN = float("nan")


def agree(device: torch.device, call: Callable[..., Any], *given: Any) -> list[Tensor]:
    """Call both kernel sets on copies of the arguments, and return the copies.

    Results and arguments must be the same afterwards.
    """
    sides = []
    for kernels, where in ((ReferenceKernels(), "cpu"), (TritonKernels(), device)):
        copies = tree_map(lambda value, to=where: value.to(to, copy=True), given)
        result = call(kernels, *copies)
        sides.append([t.cpu() for t in tree_leaves((result, copies)) if isinstance(t, Tensor)])
    for want, got in zip(*sides, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        assert torch.equal(bits(got), bits(want))
    return sides[0][-len(tree_leaves(given)) :]


def bits(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).view(torch.uint8)


def ints(low: int, high: int, *shape: int) -> Tensor:
    """Return random integers in [low, high)."""
    return torch.randint(low, high, shape, dtype=torch.int32)


def slots_for(rows: int) -> Tensor:
    """Return slots 1 to `rows` in random order, some of them replaced by padding."""
    slots = torch.randperm(rows).int() + 1
    slots[torch.rand(rows) < 0.2] = 0
    return slots if rows > 1 else torch.ones(1, dtype=torch.int32)


def table_of(values: Tensor, neutral: int = 0) -> Tensor:
    values[0] = neutral
    return values


def draft_tables(like: Tensor, **tables: Tensor) -> DraftTables:
    """Return draft tables; those that are not given hold zeros, one for each entry of `like`."""
    zeros = dict.fromkeys(DraftTables._fields, torch.zeros_like(like))
    return DraftTables(**{name: tables.get(name, zero.clone()) for name, zero in zeros.items()})


def spoilt(*shape: int) -> Tensor:
    return torch.full(shape, -7, dtype=torch.int32)
