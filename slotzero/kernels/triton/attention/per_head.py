"""Per-head matrix products over few rows: up_k absorbed into MLA queries, and up_v applied to the
attended latents.

A program takes some columns of one head's weight, loaded before the wait for the rows, and all rows
or a block of them.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.attention.verify import padded_rows
from slotzero.kernels.triton.launch import (
    launch,
    may_follow,
    overlap,
    shared_memory,
    wait_for_writer,
)

MAX_ROWS = 256  # more rows use cuBLAS
MAX_BLOCK = 64  # rows of a program
HELD = 8192  # weight values that a program holds, per block of rows


class HeadCut(NamedTuple):
    """The part of a product that one program computes."""

    depth: int  # padded inner dimension of the weight
    columns: int
    rows: int

    def blocks(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the number of blocks of columns, and of rows."""
        return triton.cdiv(columns, self.columns), triton.cdiv(rows, self.rows)


@triton.jit
def multiply_head(
    x, weight, out, rows, head, column, first,
    x_row, x_head, weight_head, weight_inner, weight_column, out_row, out_head,
    INNER: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Multiply ROWS rows, from `first` on, by BLOCK columns; wait for the writer of the rows."""
    head = head.to(tl.int64)
    k, n = tl.arange(0, DEPTH), column + tl.arange(0, BLOCK)
    at = weight + head * weight_head + k[:, None] * weight_inner + n[None, :] * weight_column
    w = tl.load(at, mask=(k < INNER)[:, None] & (n < COLUMNS)[None, :], other=0.0)
    row = (first + tl.arange(0, ROWS)).to(tl.int64)
    known = (row < rows)[:, None]
    x_at = x + row[:, None] * x_row + head * x_head + k[None, :]
    wait_for_writer(PDL)
    result = tl.dot(tl.load(x_at, mask=known & (k < INNER)[None, :], other=0.0), w)
    out_at = out + row[:, None] * out_row + head * out_head + n[None, :]
    tl.store(out_at, result.to(out.dtype.element_ty), mask=known & (n < COLUMNS)[None, :])


@triton.jit(do_not_specialize=["rows"])
def _per_head_kernel(
    x, weight, out, rows,
    x_row, x_head, weight_head, weight_inner, weight_column, out_row, out_head,
    INNER: tl.constexpr, COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    multiply_head(
        x, weight, out, rows, tl.program_id(0), tl.program_id(1) * BLOCK, tl.program_id(2) * ROWS,
        x_row, x_head, weight_head, weight_inner, weight_column, out_row, out_head,
        INNER, COLUMNS, DEPTH, BLOCK, ROWS, PDL,
    )  # fmt: skip


def cut_for(rows: int, inner: int, columns: int, dtype: torch.dtype) -> HeadCut | None:
    """Return how to cut a product; None: use cuBLAS.

    With n blocks of rows a program takes n times the columns, so that rows are not read more often.
    """
    if rows > MAX_ROWS or dtype.itemsize > 2:
        return None
    depth, block = padded_rows(inner, 16), min(padded_rows(rows, 16), MAX_BLOCK)
    held = HELD * triton.next_power_of_2(triton.cdiv(rows, block))
    while held > HELD and dtype.itemsize * (held + block * depth) > shared_memory():
        held //= 2
    return HeadCut(depth, min(padded_rows(columns, 16), max(16, held // depth)), block)


def per_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """Multiply x [rows, heads, inner] by weight [heads, inner, columns] -> [rows, heads, columns].

    The last dimension of x and out is contiguous; of the weight, one of the last two is.
    """
    rows, heads, inner = x.shape
    columns = weight.shape[2]
    cut = cut_for(rows, inner, columns, x.dtype)
    if cut is None:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return
    launch(
        _per_head_kernel, (heads, *cut.blocks(rows, columns)), x, weight, out, rows,
        x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
        INNER=inner, COLUMNS=columns, DEPTH=cut.depth, BLOCK=cut.columns, ROWS=cut.rows,
        num_warps=4, **overlap(),
    )  # fmt: skip
