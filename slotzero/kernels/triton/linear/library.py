"""Products by cuBLAS: as they are, in shares of the inner dimension, and of float8 codes."""

import functools

import torch
from torch import Tensor

from slotzero.kernels.triton.launch import INTERPRETED
from slotzero.kernels.triton.linear.operands import Operands

ALIGNED = 16  # rows and features of float8 products are multiples of it


def product(given: Operands, out: Tensor) -> Tensor:
    """Multiply rows without a deferred norm -> out."""
    x, weight, bias = given.x, given.weight.t(), given.bias
    if given.scales is not None:
        assert given.x_scales is not None
        torch.ops.aten._scaled_mm.out(
            x, weight, given.x_scales.t(), given.scales.float().t(), bias,
            out_dtype=out.dtype, out=out,
        )  # fmt: skip
        return out
    if out.dtype is not x.dtype:  # logits, which have no bias
        return torch.mm(x, weight, out_dtype=out.dtype, out=out)
    if bias is None:
        return torch.mm(x, weight, out=out)
    return torch.addmm(bias, x, weight, out=out)


def in_shares(given: Operands, shares: int) -> Tensor:
    """Return [shares, rows, features] in float32, to be added up."""
    x, weight = given.x, given.weight
    share = weight.shape[1] // shares
    parts = x.view(len(x), shares, share).transpose(0, 1)
    weights = weight.view(len(weight), shares, share).permute(1, 2, 0)
    made = torch.bmm(parts, weights, out_dtype=torch.float32)
    if given.bias is not None:
        made[0].add_(given.bias)
    return made


def takes_float8(given: Operands, out: Tensor) -> bool:
    """Return whether `product` accepts these codes and this result: there, scales of whole rows
    need a bfloat16 result and aligned sizes."""
    return (
        _has_float8()
        and given.group is None
        and out.dtype is torch.bfloat16
        and out.is_contiguous()
        and not any(size % ALIGNED for size in given.weight.shape)
    )


@functools.cache
def _has_float8() -> bool:
    return not INTERPRETED and torch.cuda.get_device_capability() >= (9, 0)
