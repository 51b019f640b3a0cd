"""A product of each head's own, over few rows: what is absorbed into queries of latent heads, and
what becomes of the latents that they see.

A program holds some columns of one head's weight, requested before the wait for the rows, and takes
all rows in turn.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer

MAX_ROWS = 64  # above, cuBLAS
ROWS, HELD = 16, 16384  # rows at a time; weights of a program


@triton.jit(do_not_specialize=["rows"])
def _per_head_kernel(
    x, weight, out, rows,
    x_row, x_head, weight_head, weight_inner, weight_column, out_row, out_head,
    INNER: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BLOCK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    head = tl.program_id(0).to(tl.int64)
    k, n = tl.arange(0, DEPTH), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = weight + head * weight_head + k[:, None] * weight_inner + n[None, :] * weight_column
    w = tl.load(at, mask=(k < INNER)[:, None] & (n < COLUMNS)[None, :], other=0.0)
    wait_for_writer(PDL)
    for first in range(0, rows, ROWS):
        row = (first + tl.arange(0, ROWS)).to(tl.int64)
        known = (row < rows)[:, None]
        x_at = x + row[:, None] * x_row + head * x_head + k[None, :]
        result = tl.dot(tl.load(x_at, mask=known & (k < INNER)[None, :], other=0.0), w)
        out_at = out + row[:, None] * out_row + head * out_head + n[None, :]
        tl.store(out_at, result.to(out.dtype.element_ty), mask=known & (n < COLUMNS)[None, :])


def per_head(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """x [rows, heads, inner] by weight [heads, inner, columns] -> out [rows, heads, columns]; the
    last dimension of x and out is contiguous, of the weight either is"""
    rows, heads, inner = x.shape
    columns = weight.shape[2]
    if rows > MAX_ROWS or x.dtype.itemsize > 2:
        torch.bmm(x.transpose(0, 1), weight, out=out.transpose(0, 1))
        return
    depth = max(16, triton.next_power_of_2(inner))
    block = min(max(16, triton.next_power_of_2(columns)), max(16, HELD // depth))
    launch(
        _per_head_kernel, (heads, triton.cdiv(columns, block)), x, weight, out, rows,
        x.stride(0), x.stride(1), *weight.stride(), out.stride(0), out.stride(1),
        INNER=inner, COLUMNS=columns, DEPTH=depth, BLOCK=block, ROWS=ROWS, num_warps=4,
        **overlap(),
    )  # fmt: skip
