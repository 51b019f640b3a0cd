"""Products of deterministic mode: every weight is multiplied in one order at any number of rows.

All tiles of a weight give the same bits, so the fastest is chosen.
Weights whose codes kernels decode have tiles of their own, which cut no inner dimension.
"""

from typing import TypeGuard

import torch
from torch import Tensor

from slotzero.kernels.triton.launch import INTERPRETED, card_name
from slotzero.kernels.triton.linear import elementwise, linear_fixed, linear_quantized
from slotzero.kernels.triton.linear.operands import Operands, operands
from slotzero.kernels.triton.linear.products import Products, is_decoded
from slotzero.kernels.triton.linear.tiles_fixed import (
    SQUARED,
    FixedTile,
    fixed_tiles_for,
    looked_up,
    shares_of,
)
from slotzero.kernels.types import Activation, Normed, ResidualNorms
from slotzero.kernels.weights import DenseWeight, JoinedWeight, LinearWeight, QuantizedWeight


class FixedProducts(Products):
    def is_late(self, rows: int, dtype: torch.dtype) -> bool:
        """Return whether a norm defers its scale: in one dtype always, in another never."""
        return dtype is torch.bfloat16

    def adds(self, weight: LinearWeight, x: Tensor) -> TypeGuard[DenseWeight | QuantizedWeight]:
        """Return whether `add` takes this weight with these rows."""
        return not isinstance(weight, JoinedWeight) and not is_decoded(weight)

    def _product(
        self,
        x: Normed,
        weight: DenseWeight | QuantizedWeight,
        out: Tensor,
        slots: Tensor | None,
    ) -> None:
        if is_decoded(weight):
            linear_quantized.product_fixed(elementwise.apply_norm(x), weight, out, slots)
            return
        given = operands(x, weight)
        tile = self._tile("linear" if slots is None else "logits", given, out, None, slots)
        linear_fixed.product(given, out, tile, slots=slots)

    def _fuses_gate(self, weight: LinearWeight) -> TypeGuard[DenseWeight]:
        return isinstance(weight, DenseWeight)

    def _gated(
        self, x: Normed, weight: DenseWeight | QuantizedWeight, activation: Activation
    ) -> Normed:
        out = x.x.new_empty(len(x.x), weight.out_features // 2)
        given = operands(x, weight)
        tile = self._tile("gated", given, out, activation, None)
        linear_fixed.product(given, out, tile, activation=activation)
        return Normed(out)

    def add(
        self, x: Normed, weight: DenseWeight | QuantizedWeight, residual: Tensor,
        norms: ResidualNorms,
    ) -> Normed:  # fmt: skip
        """Add x times weight to the residual, in place, and norm the sum."""
        given, rows = operands(x, weight), len(residual)
        scratch = torch.empty_like(residual)
        tile = self._tile("add", given, scratch, None, None)
        if not self.is_late(rows, residual.dtype):
            linear_fixed.product(given, residual, tile, adds=True)
            return elementwise.add_norm(residual, None, norms, late=False)
        parts = -(-residual.shape[1] // SQUARED)
        squares = torch.empty(parts, rows, dtype=torch.float32, device=residual.device)
        made = Normed(scratch, squares, norms.eps)
        linear_fixed.product(given, residual, tile, adds=True, norm=norms.next, made=made)
        return made

    def _tile(
        self,
        kind: str,
        given: Operands,
        out: Tensor,
        activation: Activation | None,
        slots: Tensor | None,
    ) -> FixedTile:
        """Return the fastest tile; those that are timed write to `out`."""
        rows, (features, inner) = len(given.x), given.weight.shape
        shares = 1 if activation is not None else shares_of(features, inner)
        tiles = fixed_tiles_for(rows, given.x.dtype, shares, given.group)
        if INTERPRETED or len(tiles) == 1:
            return tiles[0]
        by_name = {str(tile): tile for tile in tiles}
        kind = f"fixed {kind}" if given.x.dtype.itemsize == 2 else f"fixed float8 {kind}"
        key = f"{card_name()}/{kind}/{features}x{inner}/{looked_up(rows)}"

        def run(name: str, weight: Tensor) -> None:
            timed = given._replace(weight=weight)
            linear_fixed.product(timed, out, by_name[name], activation=activation, slots=slots)

        return by_name[self.fastest(key, tuple(by_name), given.weight, run)]
