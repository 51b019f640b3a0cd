"""The end of a recurrent mixer: gates, before or after an RMSNorm of each group."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, num_warps, overlap, wait_for_writer

TILE = 1024  # values of small groups per program


@triton.jit
def _gate_norm_kernel(
    x, gates, weight, out, x_stride, gates_stride, size, weight_groups, eps,
    GROUP: tl.constexpr, FIRST: tl.constexpr, SILU: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    group = (tl.program_id(1) * GROUPS + tl.arange(0, GROUPS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = group * GROUP + column
    inside = (at < size) & (column < GROUP)
    by = 1.0
    if weight is not None:
        by = weight + group % weight_groups * GROUP + column
        by = tl.load(by, mask=inside, other=0.0).to(tl.float32)
    wait_for_writer(PDL)

    value = tl.load(x + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gates + row * gates_stride + at, mask=inside, other=0.0).to(tl.float32)
    by_gate = tl.sigmoid(gate)
    if SILU:
        by_gate *= gate
    if FIRST:
        value *= by_gate
    if weight is not None:
        mean = tl.sum(value * value, axis=1) / GROUP
        value = value * tl.rsqrt(mean + eps)[:, None] * by
    if not FIRST:
        value *= by_gate
    tl.store(out + row * size + at, value.to(out.dtype.element_ty), mask=inside)


def gate_norm(
    x: Tensor,
    gates: Tensor,
    weight: Tensor | None,
    eps: float,
    group_size: int,
    gates_first: bool,
    activation: Literal["silu", "sigmoid"] = "silu",
) -> Tensor:
    rows, size = x.shape
    if weight is None:
        group_size = TILE
    block = triton.next_power_of_2(group_size)
    at_once = max(1, TILE // block)
    out = x.new_empty(rows, size)
    launch(
        _gate_norm_kernel, (rows, triton.cdiv(size, group_size * at_once)),
        x, gates, weight, out, x.stride(0), gates.stride(0), size,
        1 if weight is None else len(weight) // group_size, eps,
        GROUP=group_size, FIRST=gates_first, SILU=activation == "silu", GROUPS=at_once, BLOCK=block,
        num_warps=num_warps(at_once * block), **overlap(),
    )  # fmt: skip
    return out
