"""The start of a step: decode positions, RoPE angles, token ids, embeddings and the first norm.

`rope_angles`, `embed` and `embed_pair` let the next kernel start early but do not start early
themselves. So all later kernels may read without a wait what was derived before the last of them,
such as the attention plan.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, num_warps, overlap, wait_for_writer
from slotzero.kernels.triton.linear.elementwise import norm_part
from slotzero.kernels.types import Angles, Normed, PairNorms, Tokens
from slotzero.kernels.weights import DenseWeight


@triton.jit(do_not_specialize=["table_stride"])
def _embed_kernel(
    slots, positions, table, embedding, norm, residual, out, squares,
    size, table_stride, scale, eps,
    SCALED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = residual.dtype.element_ty
    by = 1.0
    if norm is not None:
        by = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_writer(PDL)
    slot = tl.load(slots + token).to(tl.int64)
    position = tl.load(positions + token)
    number = tl.load(table + slot * table_stride + position).to(tl.int64)
    value = tl.load(embedding + number * size + column, mask=inside, other=0.0)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(dtype)
    at = token * size + column
    tl.store(residual + at, value, mask=inside)
    if norm is not None:
        wide = value.to(tl.float32)
        total = tl.sum(wide * wide, axis=0)
        if squares is not None:
            tl.store(squares + token, total)
        else:  # rounded before the weight is applied, as the checkpoints were trained
            wide = (wide / tl.sqrt_rn(total / size + eps)).to(dtype).to(tl.float32)
        tl.store(out + at, (wide * by).to(dtype), mask=inside)


@triton.jit(do_not_specialize=["table_stride"])
def _embed_pair_kernel(
    slots, positions, table, embedding, embed_norm, hidden, hidden_norm, out,
    table_stride, hidden_stride, eps,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the normed embedding of a token, or the normed hidden state next to it."""
    may_follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    target = out + token * (2 * SIZE)
    wait_for_writer(PDL)
    if tl.program_id(1) == 0:
        slot = tl.load(slots + token).to(tl.int64)
        number = tl.load(table + slot * table_stride + tl.load(positions + token)).to(tl.int64)
        norm_part(embedding + number * SIZE, embed_norm, target, eps, SIZE, BLOCK)
    else:
        norm_part(hidden + token * hidden_stride, hidden_norm, target + SIZE, eps, SIZE, BLOCK)


@triton.jit
def _rope_kernel(
    positions, frequency, cos, sin, half, frequency_stride, factor,
    HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, HALF)
    inside = pair < half
    wait_for_writer(PDL)
    position = tl.load(positions + token)
    speed = tl.load(frequency + token * frequency_stride + pair, mask=inside, other=0.0)
    angle = position.to(tl.float32) * speed
    turned = tl.where(speed == 0.0, 1.0, tl.cos(angle) * factor)
    tl.store(cos + token * half + pair, turned, mask=inside)
    tl.store(sin + token * half + pair, tl.sin(angle) * factor, mask=inside)


@triton.jit(do_not_specialize=["rows"])
def _positions_kernel(slots, length, token_slots, positions, after, rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row, mask=row < rows, other=0)
    position = tl.load(length + slot, mask=row < rows, other=0)
    tl.store(token_slots + row, slot, mask=row < rows)
    tl.store(positions + row, position, mask=row < rows)
    tl.store(after + row, position + (slot > 0).to(tl.int32), mask=row < rows)


def decode_positions(
    slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
) -> None:
    rows, block = len(slots), 128
    launch(
        _positions_kernel, (triton.cdiv(rows, block),),
        slots, length, token_slots, positions, after, rows, BLOCK=block, num_warps=1,
    )  # fmt: skip


def rope_angles(tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
    num, half = len(tokens.positions), frequency.shape[-1]
    cos, sin = torch.empty(2, num, 1, half, device=frequency.device)
    launch(
        _rope_kernel, (num,), tokens.positions, frequency, cos, sin,
        half, half if frequency.dim() == 2 else 0, factor,
        HALF=triton.next_power_of_2(half), num_warps=1, PDL=overlap()["PDL"],
    )  # fmt: skip
    return Angles(cos, sin)


def embed(
    tokens: Tokens,
    table: Tensor,
    embedding: Tensor,
    scale: float,
    norm: Tensor | None,
    eps: float,
    late: bool,
) -> tuple[Tensor, Normed]:
    num, size = len(tokens.slots), embedding.shape[1]
    residual = torch.empty(num, size, dtype=embedding.dtype, device=embedding.device)
    normed = Normed(residual)
    if norm is not None:
        squares = torch.empty(1, num, device=embedding.device) if late else None
        normed = Normed(torch.empty_like(residual), squares, eps)
    block = triton.next_power_of_2(size)
    launch(
        _embed_kernel, (num,), *tokens, table, embedding, norm, residual, normed.x, normed.squares,
        size, table.stride(0), scale, eps, SCALED=scale != 1, BLOCK=block,
        num_warps=num_warps(block), PDL=overlap()["PDL"],
    )  # fmt: skip
    return residual, normed


def embed_pair(
    tokens: Tokens,
    table: Tensor,
    embedding: DenseWeight,
    hidden: Tensor,  # [T, hidden]
    norms: PairNorms,
) -> Tensor:
    """Return the normed embeddings and hidden states side by side, [T, 2 * hidden]."""
    num, size = hidden.shape
    out = torch.empty(num, 2 * size, dtype=hidden.dtype, device=hidden.device)
    block = triton.next_power_of_2(size)
    launch(
        _embed_pair_kernel, (num, 2),
        *tokens, table, embedding.data, norms.embed, hidden, norms.hidden, out,
        table.stride(0), hidden.stride(0), norms.eps,
        SIZE=size, BLOCK=block, num_warps=num_warps(block), PDL=overlap()["PDL"],
    )  # fmt: skip
    return out
