"""Both sides of a matrix product, as they are multiplied: 16-bit numbers, or codes in float8."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.linear.elementwise import apply_norm
from slotzero.kernels.triton.linear.round_float8 import round_input
from slotzero.kernels.triton.linear.tiles import float8_step
from slotzero.kernels.types import Normed
from slotzero.kernels.weights import DenseWeight, QuantizedWeight

FLOAT8 = torch.float8_e4m3fn
ALIGNED = 16  # bytes of a row, for matrix units and TMA copies
LEAST_STEP = 32  # float8 products of matrix units
EXACT = tl.constexpr(128)  # float8 products that matrix units may add up in fewer bits than float32


class Operands(NamedTuple):
    """Rows and a weight. If both are codes in float8, they have scales: one per row and per output
    feature, or one for each of these and each `group` of input features."""

    x: Tensor  # [rows, inner]
    weight: Tensor  # [features, inner]
    bias: Tensor | None
    squares: Tensor | None = None  # of a deferred norm, see Normed
    eps: float = 0.0
    x_scales: Tensor | None = None  # [groups, rows]
    scales: Tensor | None = None  # [features, groups]
    group: int | None = None
    rounds_rows: bool = False
    """Each row was rounded by its largest number, as the input of the next layer will be."""

    @property
    def num_parts(self) -> int:
        return 0 if self.squares is None else len(self.squares)

    def with_norm(self) -> "Operands":
        """Apply a deferred norm."""
        x = apply_norm(Normed(self.x, self.squares, self.eps))
        return self._replace(x=x, squares=None)

    def without(self, slots: Tensor | None) -> "Operands":
        """Apply a deferred norm, and replace rows of slot 0 by zeros."""
        made = self.with_norm()
        if slots is None:
            return made
        is_padding = (slots == 0)[:, None]
        if made.x_scales is None:
            return made._replace(x=made.x.masked_fill(is_padding, 0))
        codes = made.x.view(torch.uint8).masked_fill(is_padding, 0).view(FLOAT8)
        return made._replace(x=codes, x_scales=made.x_scales.masked_fill(is_padding.t(), 0))


def multiplies_float8(weight: QuantizedWeight) -> bool:
    """Return whether codes in float8 are multiplied as they are: rows of 16 bytes, and a scale of
    the rows for each scale of the weight."""
    format, groups = weight.format, weight.scales.shape[-1]
    scales_match = groups == 1 or format.activations == "float8_group"
    return (
        format.codes == "float8"
        and format.activations != "plain"
        and not format.is_scattered
        and not format.has_offsets
        and weight.codes.ndim == 2
        and weight.in_features % ALIGNED == 0
        and scales_match
        and float8_step(format.group if groups > 1 else None) >= LEAST_STEP
    )


def operands(x: Normed, weight: DenseWeight | QuantizedWeight) -> Operands:
    """Return what is multiplied. If the weight is codes in float8, the rows are rounded."""
    if isinstance(weight, DenseWeight):
        return Operands(x.x, weight.data, weight.bias, x.squares, x.eps)
    format = weight.format
    group = format.group if weight.scales.shape[-1] > 1 else None
    rounds_rows = format.activations == "float8_row" and group is None
    if rounds_rows and x.float8 is not None:
        codes, x_scales = x.float8
    else:
        codes, x_scales = round_input(x, weight)
    return Operands(
        codes.view(FLOAT8), weight.codes.view(FLOAT8), weight.bias, x_scales=x_scales,
        scales=weight.scales, group=group, rounds_rows=rounds_rows,
    )  # fmt: skip


@triton.jit
def dot(a, b, acc):
    """Add a product to acc, in float32; with float8, from sums of at most EXACT products."""
    if a.dtype.is_fp8():
        depth: tl.constexpr = min(a.shape[-1], EXACT)
        return tl.dot(a, b, acc, max_num_imprecise_acc=depth)
    else:  # noqa: RET505  the compiler does not see that the rest is unreachable
        return tl.dot(a, b, acc, input_precision="ieee")
