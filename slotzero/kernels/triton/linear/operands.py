"""Both sides of a matrix product, as they are multiplied: 16-bit numbers, or codes in float8."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.linear.elementwise import apply_norm
from slotzero.kernels.triton.linear.round_float8 import round_input
from slotzero.kernels.triton.linear.tiles import SLICED_ROWS, STAGED_ROWS, float8_step
from slotzero.kernels.types import Normed
from slotzero.kernels.weights import DenseWeight, QuantizedWeight

FLOAT8 = torch.float8_e4m3fn
ALIGNED = 16  # bytes of a row, for matrix units and TMA copies
LEAST_STEP = 32  # float8 products of matrix units
EXACT = tl.constexpr(128)  # float8 products that matrix units may add up in fewer bits than float32


class Operands(NamedTuple):
    """Rows and a weight. Codes in float8 have scales: one per output feature, or one for each of
    these and each `group` of input features. The rows are then codes too, with x_scales; or they
    are 16-bit numbers that the kernel rounds while it multiplies."""

    x: Tensor  # [rows, inner]
    weight: Tensor  # [features, inner]
    bias: Tensor | None
    squares: Tensor | None = None  # of a deferred norm, see Normed
    eps: float = 0.0
    scales: Tensor | None = None  # [features, groups]
    group: int | None = None
    x_scales: Tensor | None = None  # [groups, rows]
    peaks: Tensor | None = None  # of rows that are rounded while they are multiplied, see Normed
    input_scale: Tensor | None = None  # [1], of all rows, instead of one for each

    @property
    def has_row_scales(self) -> bool:
        """Return whether each row is rounded by its largest number."""
        return self.scales is not None and self.group is None and self.input_scale is None

    @property
    def rounds_while_multiplying(self) -> bool:
        """Return whether the kernel that multiplies is to round the rows to float8."""
        return self.scales is not None and self.x_scales is None

    def rounded(self) -> "Operands":
        """Round the rows to float8, unless they are not to be or are codes already."""
        if not self.rounds_while_multiplying:
            return self
        x = Normed(self.x, self.squares, self.eps)
        codes, x_scales = round_input(x, self.group or self.x.shape[1], self.input_scale)
        return self._replace(x=codes.view(FLOAT8), x_scales=x_scales, squares=None)

    def with_norm(self) -> "Operands":
        """Apply a deferred norm; round the rows if they are to be."""
        if self.scales is not None:
            return self.rounded()
        x = apply_norm(Normed(self.x, self.squares, self.eps))
        return self._replace(x=x, squares=None)

    def new_peaks(self, parts: int) -> Tensor | None:
        """Return memory for the peaks of the result, if the next product may use them."""
        if not self.has_row_scales or not takes_peaks(len(self.x)):
            return None
        return torch.empty(parts, len(self.x), dtype=torch.float32, device=self.x.device)


def num_parts(parts: Tensor | None) -> int:
    return 0 if parts is None else len(parts)


def takes_peaks(rows: int) -> bool:
    """Return whether kernels may round so many rows while they multiply, by peaks found before."""
    return 1 < rows <= SLICED_ROWS


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
    """Return what is multiplied. If the weight is codes in float8, rows are rounded; few rows with
    one scale each are not yet, because some kernels round them while they multiply."""
    if isinstance(weight, DenseWeight):
        return Operands(x.x, weight.data, weight.bias, x.squares, x.eps)
    format = weight.format
    made = Operands(
        x.x, weight.codes.view(FLOAT8), weight.bias, x.squares, x.eps, weight.scales,
        group=format.group if weight.scales.shape[-1] > 1 else None, peaks=x.peaks,
        input_scale=weight.input_scale if format.activations == "float8_static" else None,
    )  # fmt: skip
    if made.has_row_scales and x.float8 is not None:
        codes, x_scales = x.float8
        return made._replace(x=codes, x_scales=x_scales, squares=None)
    return made if made.has_row_scales and len(x.x) <= STAGED_ROWS else made.rounded()


@triton.jit
def dot(a, b, acc):
    """Add a product to acc, in float32; with float8, from sums of at most EXACT products."""
    if a.dtype.is_fp8():
        depth: tl.constexpr = min(a.shape[-1], EXACT)
        return tl.dot(a, b, acc, max_num_imprecise_acc=depth)
    else:  # noqa: RET505  the compiler does not see that the rest is unreachable
        return tl.dot(a, b, acc)
