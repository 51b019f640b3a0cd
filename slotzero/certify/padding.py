"""Padding between layers: the rows of what a layer returns that no request owns.

These tensors are not registered, so that only a run that calls the pieces itself can overwrite
them. This module knows what layers return, and not what they compute.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from slotzero.graph import GraphKey, Pieces
from slotzero.kernels.types import Normed

PADDED_ROWS = "padded rows"
"""Name of this padding in violations."""


class PaddingPieces(Pieces):
    """Calls `change` with every result of a piece, rows first, and how many rows are real."""

    def __init__(
        self,
        pieces: Pieces,
        key: GraphKey,
        num_rows: int,
        num_tokens: int,
        change: Callable[[Tensor, int], None],
    ) -> None:
        """`num_rows` and `num_tokens`: those of the step that are not padding."""
        self._pieces, self._key, self._change = pieces, key, change
        self._num_rows, self._num_tokens = num_rows, num_tokens

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        results = self._pieces(function, *arguments)
        for rows in _hidden(results):
            num_real = self._num_real(len(rows))
            if num_real is not None:
                self._change(rows, num_real)
        return results

    def _num_real(self, num: int) -> int | None:
        """Return how many of `num` rows are real: of tokens, or of as many for each batch row."""
        if num == self._key.tokens:
            return self._num_tokens
        return None if num % self._key.rows else num // self._key.rows * self._num_rows


def _hidden(results: Any) -> Iterator[Tensor]:
    """Yield hidden states [rows, size], and deferred scales as [rows, parts]."""
    if isinstance(results, Normed):
        yield from _hidden((results.x, None if results.squares is None else results.squares.T))
    elif isinstance(results, tuple | list):
        for result in results:
            yield from _hidden(result)
    elif isinstance(results, Tensor) and results.is_floating_point() and results.dim() >= 2:
        yield results.flatten(0, -2)  # layers of transformers have a batch axis of 1


def fill_with_garbage(rows: Tensor, num_real: int) -> None:
    rows[num_real:] = torch.nan
