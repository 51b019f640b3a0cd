"""Products by cuBLAS: as they are, in shares of the inner dimension, and of float8 codes."""

import functools

import torch
from torch import Tensor

from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.weights import DenseWeight

ALIGNED = 16  # rows and features of float8 products are multiples of it


def product(x: Tensor, weight: DenseWeight, out: Tensor) -> Tensor:
    if out.dtype is not x.dtype:  # logits, which have no bias
        return torch.mm(x, weight.data.t(), out_dtype=out.dtype, out=out)
    if weight.bias is None:
        return torch.mm(x, weight.data.t(), out=out)
    return torch.addmm(weight.bias, x, weight.data.t(), out=out)


def in_shares(x: Tensor, weight: DenseWeight, shares: int) -> Tensor:
    """Return [shares, rows, features] in float32, to be added up."""
    share = weight.data.shape[1] // shares
    parts = x.view(len(x), shares, share).transpose(0, 1)
    weights = weight.data.view(len(weight.data), shares, share).permute(1, 2, 0)
    made = torch.bmm(parts, weights, out_dtype=torch.float32)
    if weight.bias is not None:
        made[0].add_(weight.bias)
    return made


def takes_float8(codes: Tensor, out: Tensor) -> bool:
    """Return whether `float8_product` accepts a weight's codes [features, inner] and this result:
    there, scales of whole rows need a bfloat16 result and aligned sizes."""
    return (
        _has_float8()
        and out.dtype is torch.bfloat16
        and out.is_contiguous()
        and not any(size % ALIGNED for size in codes.shape)
    )


@functools.cache
def _has_float8() -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)


def float8_product(
    x: Tensor,  # [rows, inner] codes
    x_scales: Tensor,  # [1, rows]
    codes: Tensor,  # [features, inner]
    scales: Tensor,  # [features, 1]
    bias: Tensor | None,
    out: Tensor,
) -> Tensor:
    float8 = torch.float8_e4m3fn
    torch.ops.aten._scaled_mm.out(
        x.view(float8), codes.view(float8).t(), x_scales.t(), scales.float().t(), bias,
        out_dtype=out.dtype, out=out,
    )  # fmt: skip
    return out
