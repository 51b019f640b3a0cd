"""Products of rows with linear weights, and the operations fused into them.

What a way of multiplying shares with every other: weights of several formats are several products,
and gates and values whose product cannot be fused are multiplied together and gated afterwards. Two
classes decide which kernel multiplies: `TunedProducts` takes the fastest, `FixedProducts` keeps one
order of summation.
"""

from abc import ABC, abstractmethod
from typing import TypeGuard

import torch
from torch import Tensor

from slotzero.kernels.triton.launch import is_compiling
from slotzero.kernels.triton.linear import elementwise
from slotzero.kernels.triton.linear.operands import multiplies_float8
from slotzero.kernels.triton.linear.tune import Choices, Run
from slotzero.kernels.types import Activation, Normed, ResidualNorms
from slotzero.kernels.weights import DenseWeight, JoinedWeight, LinearWeight, QuantizedWeight


class Products(ABC):
    def __init__(self) -> None:
        self.choices = Choices()

    @abstractmethod
    def is_late(self, rows: int, dtype: torch.dtype) -> bool:
        """Return whether a norm defers its scale to the product that follows."""

    @abstractmethod
    def adds(self, weight: LinearWeight, x: Tensor) -> TypeGuard[DenseWeight | QuantizedWeight]:
        """Return whether `add` takes this weight with these rows."""

    @abstractmethod
    def add(
        self, x: Normed, weight: DenseWeight | QuantizedWeight, residual: Tensor,
        norms: ResidualNorms,
    ) -> Normed:  # fmt: skip
        """Add x times weight to the residual, in place, and norm the sum."""

    def product(
        self, x: Normed, weight: LinearWeight, out: Tensor, slots: Tensor | None = None
    ) -> None:
        """Write x times weight into out; with slots, these are logits: zeros for rows of slot 0."""
        if not isinstance(weight, JoinedWeight):
            self._product(x, weight, out, slots)
            return
        first = 0
        for part in weight.parts:
            self.product(x, part, out[:, first : first + part.out_features], slots)
            first += part.out_features

    def gated(self, x: Normed, weight: LinearWeight, activation: Activation) -> Normed:
        """Multiply by gates and values, and gate -> [rows, features / 2]."""
        if self._fuses_gate(weight):
            return self._gated(x, weight, activation)
        joined = x.x.new_empty(len(x.x), weight.out_features)
        self.product(x, weight, joined)
        gates, values = joined.chunk(2, -1)
        return Normed(elementwise.gate(gates, values, activation))

    @abstractmethod
    def _product(
        self,
        x: Normed,
        weight: DenseWeight | QuantizedWeight,
        out: Tensor,
        slots: Tensor | None,
    ) -> None:
        """Do the same as `product` with a weight of one format."""

    @abstractmethod
    def _fuses_gate(self, weight: LinearWeight) -> TypeGuard[DenseWeight | QuantizedWeight]:
        """Return whether `_gated` takes this weight."""

    @abstractmethod
    def _gated(
        self, x: Normed, weight: DenseWeight | QuantizedWeight, activation: Activation
    ) -> Normed: ...

    def fastest(
        self,
        key: str,
        names: tuple[str, ...],
        weight: Tensor,
        run: Run,
        changes: Tensor | None = None,
    ) -> str:
        """Return the fastest of several candidates for a weight. Those that are not known are timed
        or, while kernels are compiled ahead, requested.

        `changes` is a tensor that a run reads and writes; it is restored after timing.
        """
        name = self.choices.known(key, names)
        likely = self.choices.likely(key, names) if name is None else [name]
        if is_compiling():
            for each in likely:
                run(each, weight)
            return likely[-1]
        if len(likely) == 1:
            return likely[0]
        before = None if changes is None else changes.clone()
        name = self.choices.find(key, likely, weight, run)
        if changes is not None and before is not None:
            changes.copy_(before)
        return name


def is_decoded(weight: DenseWeight | QuantizedWeight) -> TypeGuard[QuantizedWeight]:
    """Return whether kernels decode the weight's codes, instead of multiplying these."""
    return isinstance(weight, QuantizedWeight) and not multiplies_float8(weight)
