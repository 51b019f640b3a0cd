"""The opening of a step: where its tokens are, and then every token's id, embedding, first norm and
rotary angles, in one kernel.

That one lets the next kernel start early, and does not start early itself: whatever was derived
before it, such as the plan of attention, may be read by all that follow without a wait.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.contract import Normed, Opened, Tokens
from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer


@triton.jit(do_not_specialize=["table_stride"])
def _open_kernel(
    slots, positions, table, embedding, norm, frequency, residual, out, squares, cos, sin,
    size, half, table_stride, frequency_stride, eps, factor,
    BLOCK: tl.constexpr, HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    column, pair = tl.arange(0, BLOCK), tl.arange(0, HALF)
    inside = column < size
    by = tl.load(norm + column, mask=inside, other=0.0)
    wait_for_writer(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    speed = tl.load(frequency + token * frequency_stride + pair, mask=pair < half, other=0.0)
    angle = position.to(tl.float32) * speed
    tl.store(cos + token * half + pair, tl.cos(angle) * factor, mask=pair < half)
    tl.store(sin + token * half + pair, tl.sin(angle) * factor, mask=pair < half)

    number = tl.load(table + slot * table_stride + position).to(tl.int64)
    value = tl.load(embedding + number * size + column, mask=inside, other=0.0)
    at = token * size + column
    tl.store(residual + at, value, mask=inside)
    wide = value.to(tl.float32)
    total = tl.sum(wide * wide, axis=0)
    if squares is not None:
        tl.store(squares + token, total)
    else:  # rounded before the weight is applied, as the checkpoints were trained
        wide = (wide / tl.sqrt_rn(total / size + eps)).to(by.dtype).to(tl.float32)
    tl.store(out + at, (wide * by.to(tl.float32)).to(by.dtype), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _locate_kernel(slots, length, token_slots, positions, after, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=0)
    position = tl.load(length + slot, mask=row < rows, other=0)
    tl.store(token_slots + row, slot, mask=row < rows)
    tl.store(positions + row, position, mask=row < rows)
    tl.store(after + row, position + (slot > 0).to(tl.int32), mask=row < rows)


def locate(
    slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
) -> None:
    rows, block = len(slots), 128
    launch(
        _locate_kernel, (triton.cdiv(rows, block),),
        slots, length, token_slots, positions, after, rows, BLOCK=block, num_warps=1,
    )  # fmt: skip


def open_step(
    tokens: Tokens,
    table: Tensor,
    embedding: Tensor,
    norm: Tensor,
    eps: float,
    frequency: Tensor,
    factor: float,
    late: bool,
) -> Opened:
    num, size = len(tokens.slots), embedding.shape[1]
    half = frequency.shape[-1]
    residual, out = torch.empty(2, num, size, dtype=embedding.dtype, device=embedding.device)
    cos, sin = torch.empty(2, num, 1, half, device=embedding.device)
    squares = torch.empty(1, num, device=embedding.device) if late else None
    block = triton.next_power_of_2(size)
    launch(
        _open_kernel, (num,),
        *tokens, table, embedding, norm, frequency, residual, out, squares, cos, sin,
        size, half, table.stride(0), half if frequency.dim() == 2 else 0, eps, factor,
        BLOCK=block, HALF=triton.next_power_of_2(half),
        num_warps=min(8, max(1, block // 512)), PDL=overlap()["PDL"],
    )  # fmt: skip
    return Opened(residual, Normed(out, squares), cos, sin)
