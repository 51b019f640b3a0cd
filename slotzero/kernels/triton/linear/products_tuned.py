"""Which kernel multiplies: one of our tiles, or cuBLAS, whatever is fastest for a shape.

Dense weights and codes in float8 share kernels and choices. Other codes have their own kernels
(`linear_quantized.py`).
"""

from collections.abc import Callable, Mapping
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from slotzero.kernels.triton.launch import INTERPRETED, card_name
from slotzero.kernels.triton.linear import elementwise, library, linear_quantized, linear_tma
from slotzero.kernels.triton.linear.linear import linear, linear_add
from slotzero.kernels.triton.linear.operands import Operands, multiplies_float8, operands
from slotzero.kernels.triton.linear.products import Products, is_decoded
from slotzero.kernels.triton.linear.tiles import (
    LIBRARY,
    LONGEST_ROW,
    MAX_ROWS,
    STAGED_ROWS,
    Cublas,
    Tile,
    Way,
    float8_tiles_for,
    padded_rows,
    ways_for,
)
from slotzero.kernels.types import Activation, Normed, ResidualNorms
from slotzero.kernels.weights import DenseWeight, JoinedWeight, LinearWeight, QuantizedWeight

T = TypeVar("T")


class TunedProducts(Products):
    def is_late(self, rows: int, dtype: torch.dtype) -> bool:
        """Return whether a norm defers its scale: up to 64 rows.

        More rows may be multiplied by cuBLAS, which does not apply it. Rows with a deferred scale
        are multiplied before they are scaled: bfloat16 can represent them, float16 may overflow.
        """
        return rows <= STAGED_ROWS and dtype is torch.bfloat16

    def adds(self, weight: LinearWeight, x: Tensor) -> TypeGuard[DenseWeight | QuantizedWeight]:
        """Return whether `add` takes this weight with these rows."""
        if isinstance(weight, JoinedWeight):
            return False
        if isinstance(weight, DenseWeight) or self.is_late(len(x), x.dtype):
            return True
        return multiplies_float8(weight) and x.dtype is torch.bfloat16

    def _product(
        self,
        x: Normed,
        weight: DenseWeight | QuantizedWeight,
        out: Tensor,
        slots: Tensor | None,
    ) -> None:
        if is_decoded(weight):
            linear_quantized.product(x, weight, out, slots)
            return

        def run(way: Way, given: Operands) -> Tensor:
            if isinstance(way, Tile):
                return linear(given, out, way, slots=slots)
            return library.product(given.without(slots), out)

        given = operands(x, weight)
        self._run("linear" if slots is None else "logits", given, out, run)

    def _fuses_gate(self, weight: LinearWeight) -> TypeGuard[DenseWeight | QuantizedWeight]:
        return not isinstance(weight, JoinedWeight)

    def _gated(
        self, x: Normed, weight: DenseWeight | QuantizedWeight, activation: Activation
    ) -> Normed:
        if is_decoded(weight):
            return Normed(linear_quantized.product_gated(x, weight, activation))
        out = x.x.new_empty(len(x.x), weight.out_features // 2)

        def run(way: Way, given: Operands) -> Normed:
            if isinstance(way, Tile):
                return Normed(linear(given, out, way, activation=activation))
            joined = out.new_empty(len(out), weight.out_features)
            gates, values = library.product(given.with_norm(), joined).chunk(2, -1)
            if given.rounds_rows and out.shape[1] <= LONGEST_ROW:
                return elementwise.gate_float8(gates, values, activation)
            return Normed(elementwise.gate(gates, values, activation))

        return self._run("gated", operands(x, weight), out, run)

    def add(
        self, x: Normed, weight: DenseWeight | QuantizedWeight, residual: Tensor,
        norms: ResidualNorms,
    ) -> Normed:  # fmt: skip
        """Add x times weight to the residual, in place, and norm the sum."""
        if is_decoded(weight):
            return linear_quantized.product_add(x, weight, residual, norms)

        def run(way: Way, given: Operands) -> Normed:
            if isinstance(way, Tile):
                return linear_add(given, residual, norms, way)
            rounds = given.rounds_rows and norms.next is not None
            late = self.is_late(len(residual), residual.dtype) and not rounds
            if way.shares > 1:
                delta = library.in_shares(given, way.shares)
            elif given.bias is None and given.scales is None:
                residual.addmm_(given.x, given.weight.t())
                return elementwise.add_norm(residual, None, norms, late)
            else:
                delta = library.product(given, torch.empty_like(residual))
            return elementwise.add_norm(residual, delta, norms, late, rounds)

        return self._run("add", operands(x, weight), residual, run, changes=residual)

    def key(self, kind: str, out_features: int, in_features: int, rows: int) -> str:
        """Return the key of a tuned choice: everything that may change which tile is fastest."""
        return f"{card_name()}/{kind}/{out_features}x{in_features}/{padded_rows(rows)}"

    def _run(
        self,
        kind: str,
        given: Operands,
        out: Tensor,
        run: Callable[[Way, Operands], T],
        changes: Tensor | None = None,
    ) -> T:
        """Run the product in the fastest way: by one of our kernels, or by cuBLAS.

        `changes` is a tensor that a run reads and writes; it is restored after timing.
        """
        ways = ways_of(kind, given, out)
        if INTERPRETED:  # without cuBLAS
            return run(next((w for w in ways.values() if isinstance(w, Tile)), LIBRARY), given)
        if len(ways) == 1 or len(given.x) > MAX_ROWS:
            return run(next(iter(ways.values())), given)
        key = self.key(_kind_of(kind, given), len(given.weight), given.x.shape[1], len(given.x))
        name = self.fastest(
            key, tuple(ways), given.weight,
            lambda name, weight: run(ways[name], given._replace(weight=weight)), changes,
        )  # fmt: skip
        return run(ways[name], given)


def ways_of(kind: str, given: Operands, out: Tensor) -> Mapping[str, Way]:
    """Return the ways to multiply that are worth timing, by name, the likely fastest for many rows
    first."""
    (rows, inner), ways = given.x.shape, tuple[Way, ...]()
    if given.scales is not None:
        library_ways = (LIBRARY,) if library.takes_float8(given, out) else ()
        ways = *library_ways, *float8_tiles_for(rows, kind, given.group)
    elif rows <= MAX_ROWS and given.x.dtype is torch.bfloat16:
        ways = ways_for(rows, inner, kind)
    else:
        ways = (LIBRARY,)
    in_bulk = linear_tma.takes(given.x, given.weight)
    return {str(way): way for way in ways if in_bulk or isinstance(way, Cublas) or not way.rows}


def _kind_of(kind: str, given: Operands) -> str:
    if given.scales is None:
        return kind
    return f"float8 {kind}" if given.group is None else f"float8 of {given.group} {kind}"
