"""A layer of transformers as a function of its arguments and weights.

Equal layers share one function, so that a rehearsal runs it once, and the weights of each are
arguments.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from slotzero.errors import UnsupportedModelError

_KINDS = (Tensor, type(None), bool, int, float, str, torch.dtype, torch.device)


class Arguments(NamedTuple):
    """The arguments of a call, taken apart: tensors and static values, and how they were nested."""

    spec: Any
    leaves: tuple[Any, ...]

    @classmethod
    def of(cls, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Arguments":
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
        for leaf in leaves:
            if not isinstance(leaf, _KINDS):
                raise UnsupportedModelError(
                    f"{name}: its argument of type {type(leaf).__name__} is neither a tensor nor a "
                    "plain value, so no recorded graph can take it"
                )
        return cls(spec, tuple(leaves))


class Body(nn.Module):
    """The code of a layer without what the bridge puts around it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self._names = tuple(name for name, _ in _tensors(self))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return type(self.layer).forward(self.layer, *args, **kwargs)

    @property
    def weights(self) -> tuple[Tensor, ...]:
        """Parameters and buffers, in the order that `call` takes."""
        return tuple(tensor for _, tensor in _tensors(self))

    def call(self, arguments: Arguments, weights: tuple[Tensor, ...]) -> Any:
        args, kwargs = pytree.tree_unflatten([*arguments.leaves], arguments.spec)
        by_name = dict(zip(self._names, weights, strict=True))
        return torch.func.functional_call(self, by_name, args, kwargs, tie_weights=False)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]
