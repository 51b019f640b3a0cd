"""Per-head matrix products of MLA in one order of summation: see linear_fixed.py.

The columns of a weight come first and the rows second, so that any number of rows takes the same
matrix instructions, in one chain over the inner dimension.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer

COLUMNS, DEPTH = 64, 64
FEW_ROWS, MANY_ROWS = 16, 64


@triton.jit(do_not_specialize=["rows"])
def _fixed_per_head_kernel(
    x, weight, out, rows,
    x_row, x_head, weight_head, weight_inner, weight_column, out_row, out_head,
    INNER: tl.constexpr, NUM_COLUMNS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply some rows by some columns of one head."""
    may_follow(PDL)
    head = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    row = m.to(tl.int64)
    wait_for_writer(PDL)
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for first in tl.range(0, INNER, DEPTH, num_stages=STAGES):
        k = first + tl.arange(0, DEPTH)
        at = weight + head * weight_head + n[:, None] * weight_column + k[None, :] * weight_inner
        inside = (n < NUM_COLUMNS)[:, None] & (k < INNER)[None, :]
        w = tl.load(at, mask=inside, other=0.0)
        x_at = x + row[None, :] * x_row + head * x_head + k[:, None]
        value = tl.load(x_at, mask=(k < INNER)[:, None] & (m < rows)[None, :], other=0.0)
        acc = tl.dot(w, value, acc, input_precision="ieee")
    out_at = out + row[:, None] * out_row + head * out_head + n[None, :]
    inside = (m < rows)[:, None] & (n < NUM_COLUMNS)[None, :]
    tl.store(out_at, tl.trans(acc).to(out.dtype.element_ty), mask=inside)


def per_head_fixed(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply x [rows, heads, inner] by weight [heads, inner, columns] -> [rows, heads, columns].

    The last dimension of x and out is contiguous; of the weight, one of the last two is.
    """
    (rows, heads, inner), columns = x.shape, weight.shape[2]
    is_wide = x.dtype is torch.float32
    block = FEW_ROWS if rows <= FEW_ROWS or is_wide else MANY_ROWS
    launch(
        _fixed_per_head_kernel, (heads, triton.cdiv(columns, COLUMNS), triton.cdiv(rows, block)),
        x, weight, out, rows,
        x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
        INNER=inner, NUM_COLUMNS=columns, COLUMNS=COLUMNS, DEPTH=16 if is_wide else DEPTH,
        ROWS=block, STAGES=3, num_warps=4, enable_fp_fusion=False, **overlap(),
    )  # fmt: skip
