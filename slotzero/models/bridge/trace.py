"""Tracing a function of nested tensors into the code of its operators."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from slotzero.graph.structure import Structure, builder, flatten


def trace_piece(
    function: Callable[..., Any], tensors: Sequence[Tensor], structure: Structure
) -> tuple[torch.fx.GraphModule, Structure]:
    """Return a graph from tensors to tensors, and the structure of its results."""
    from torch.fx.experimental.proxy_tensor import make_fx

    results: list[Structure] = []
    build = builder(structure)

    def flat(*given: Tensor) -> list[Tensor]:
        made, structure_of_made = flatten(function(*build(given)))
        results.append(structure_of_made)
        return made

    with torch.no_grad():
        module: torch.fx.GraphModule = make_fx(flat, tracing_mode="fake")(*tensors)
    return module, results[-1]
