"""Elementwise kernels around cuBLAS products: residual and RMSNorm, activation, softcap.

Norms over all heads of a token are here too, since an attention program sees only some heads.
"""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import torch
import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, num_warps, overlap, wait_for_writer
from slotzero.kernels.triton.linear.activation import activate, tanh
from slotzero.kernels.triton.linear.float8 import scale_of, to_float8
from slotzero.kernels.types import Activation, Float8Rows, Heads, Normed, QkNorms, ResidualNorms

GATED_BLOCK, CAPPED_BLOCK = 1024, 4096


@triton.jit
def _scaled(wide, size, eps, dtype: tl.constexpr):
    """Apply RMSNorm without its weight, and round before it, as the checkpoints were trained."""
    total = tl.sum(wide * wide, axis=0)
    return (wide / tl.sqrt_rn(total / size + eps)).to(dtype).to(tl.float32)


@triton.jit
def _centred(wide, inside, size):
    """Subtract the mean of a row; values outside stay 0."""
    return tl.where(inside, wide - tl.sum(wide, axis=0) / size, 0.0)


@triton.jit
def store_float8(codes, scale_at, value, inside):
    """Store a row as codes in float8 with one scale."""
    wide = value.to(tl.float32)
    scale = scale_of(tl.max(tl.where(inside, tl.abs(wide), 0.0), axis=0))
    tl.store(codes, to_float8(wide * (1.0 / scale)), mask=inside)
    tl.store(scale_at, scale)


@triton.jit(do_not_specialize=["rows"])
def _add_norm_kernel(
    residual, delta, after, weight, out, squares, codes, scales, rows, size, residual_stride, eps,
    CENTRED: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < size
    dtype: tl.constexpr = residual.dtype.element_ty
    by, by_after = 1.0, 1.0
    if weight is not None:
        by = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if after is not None:
        by_after = tl.load(after + column, mask=inside, other=0.0).to(tl.float32)
    wait_for_writer(PDL)
    at = row * size + column
    residual_at = residual + row * residual_stride + column
    value = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
    change = tl.zeros([BLOCK], tl.float32)
    for part in tl.static_range(PARTS):
        part_at = delta + part * rows.to(tl.int64) * size + at
        change += tl.load(part_at, mask=inside, other=0.0).to(tl.float32)
    if after is not None:
        change = change.to(dtype).to(tl.float32)
        if CENTRED:
            change = _centred(change, inside, size)
        change = _scaled(change, size, eps, dtype)
        change = (change * by_after).to(dtype).to(tl.float32)
    value += change
    if delta is not None:
        tl.store(residual_at, value.to(dtype), mask=inside)
    if weight is not None:
        value = value.to(dtype).to(tl.float32)
        if CENTRED:
            value = _centred(value, inside, size)
        if squares is not None:
            tl.store(squares + row, tl.sum(value * value, axis=0))
        else:
            value = _scaled(value, size, eps, dtype)
        value = (value * by).to(dtype)
        tl.store(out + at, value, mask=inside)
        if codes is not None:
            store_float8(codes + at, scales + row, value, inside)


@triton.jit(do_not_specialize=["rows", "num_parts"])
def _apply_kernel(
    x, squares, out, rows, size, num_parts, eps,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column, part = tl.arange(0, BLOCK), tl.arange(0, PARTS)
    wait_for_writer(PDL)
    total = tl.load(squares + part * rows + row, mask=part < num_parts, other=0.0)
    value = tl.load(x + row * size + column, mask=column < size, other=0.0)
    scale = 1.0 / tl.sqrt_rn(tl.sum(total, axis=0) / size + eps)
    scaled = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out + row * size + column, scaled, mask=column < size)


@triton.jit
def _gated_kernel(
    gates, values, out, size, gates_stride, gates_step, values_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_writer(PDL)
    gate = tl.load(gates + row * gates_stride + column * gates_step, mask=inside, other=0.0)
    value = tl.load(values + row * values_stride + column, mask=inside, other=0.0)
    active, wide = activate(gate.to(tl.float32), value.to(tl.float32), ACTIVATION)
    active = active.to(gate.dtype).to(tl.float32)
    tl.store(out + row * size + column, (active * wide).to(gate.dtype), mask=inside)


@triton.jit
def _gated_float8_kernel(
    gates, values, out, codes, scales, size, gates_stride, values_stride,
    ACTIVATION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gate a whole row, and round it to float8."""
    may_follow(PDL)
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < size
    wait_for_writer(PDL)
    gate = tl.load(gates + row * gates_stride + column, mask=inside, other=0.0)
    value = tl.load(values + row * values_stride + column, mask=inside, other=0.0)
    active, wide = activate(gate.to(tl.float32), value.to(tl.float32), ACTIVATION)
    result = (active.to(gate.dtype).to(tl.float32) * wide).to(gate.dtype)
    at = row * size + column
    tl.store(out + at, result, mask=inside)
    store_float8(codes + at, scales + row, result, inside)


@triton.jit
def _cap_kernel(x, size, stride, cap, BLOCK: tl.constexpr, PDL: tl.constexpr):
    may_follow(PDL)
    at = x + tl.program_id(0).to(tl.int64) * stride
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < size
    wait_for_writer(PDL)
    value = tl.load(at + column, mask=inside, other=0.0)
    capped = cap * tanh(value.to(tl.float32) / cap)
    tl.store(at + column, capped.to(value.dtype), mask=inside)


@triton.jit
def _norm_heads_kernel(
    qkv, q_norm, k_norm, out, qkv_stride, eps,
    Q_SIZE: tl.constexpr, K_SIZE: tl.constexpr, V_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, V_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Norm the queries or the keys of a token, or copy its values."""
    may_follow(PDL)
    row = tl.program_id(0).to(tl.int64)
    source, target = qkv + row * qkv_stride, out + row * (Q_SIZE + K_SIZE + V_SIZE)
    wait_for_writer(PDL)
    if tl.program_id(1) == 0:
        norm_part(source, q_norm, target, eps, Q_SIZE, Q_BLOCK)
    elif tl.program_id(1) == 1:
        norm_part(source + Q_SIZE, k_norm, target + Q_SIZE, eps, K_SIZE, K_BLOCK)
    else:
        begin: tl.constexpr = Q_SIZE + K_SIZE
        norm_part(source + begin, None, target + begin, eps, V_SIZE, V_BLOCK)


@triton.jit
def norm_part(source, norm, target, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Copy a row under its RMSNorm; without one, unchanged."""
    column = tl.arange(0, BLOCK)
    tl.store(target + column, load_part(source, norm, eps, SIZE, BLOCK), mask=column < SIZE)


@triton.jit
def load_part(source, norm, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Load a row under its RMSNorm; without one, unchanged."""
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    value = tl.load(source + column, mask=inside, other=0.0)
    if norm is not None:
        by = tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
        value = (_scaled(value.to(tl.float32), SIZE, eps, value.dtype) * by).to(value.dtype)
    return value


def norm(x: Tensor, weight: Tensor, eps: float, late: bool, is_centred: bool = False) -> Normed:
    """Apply RMSNorm to x [rows, size]; if late, defer its scale, see Normed."""
    return add_norm(x, None, ResidualNorms(None, weight, eps, is_centred), late)


def add_norm(
    residual: Tensor,
    delta: Tensor | None,
    norms: ResidualNorms,
    late: bool,
    rounds: bool = False,
) -> Normed:
    """Add delta to the residual, in place, and norm the sum.

    delta is [rows, size], or several of those to be added up, or None. If late, the scale of the
    norm is deferred, see Normed. If the kernel `rounds`, there are also codes in float8.
    """
    rows, size = residual.shape
    block = triton.next_power_of_2(size)
    made = Normed(residual)
    if norms.next is not None:
        squares = torch.empty(1, rows, device=residual.device) if late else None
        float8 = _new_float8(residual) if rounds else None
        made = Normed(torch.empty_like(residual), squares, norms.eps, float8=float8)
    launch(
        _add_norm_kernel, (rows,), residual, delta, norms.post, norms.next, made.x, made.squares,
        *(made.float8 or (None, None)), rows, size, residual.stride(0), norms.eps,
        CENTRED=norms.is_centred,
        BLOCK=block, PARTS=0 if delta is None else delta.numel() // residual.numel(),
        num_warps=num_warps(block), **overlap(),
    )  # fmt: skip
    return made


def apply_norm(x: Normed) -> Tensor:
    """Return the normed rows, with the deferred scale applied."""
    values, squares, eps = x[:3]
    if squares is None:
        return values
    rows, size = values.shape
    block = triton.next_power_of_2(size)
    out = torch.empty_like(values)
    launch(
        _apply_kernel, (rows,), values, squares, out, rows, size, len(squares), eps,
        BLOCK=block, PARTS=triton.next_power_of_2(len(squares)),
        num_warps=num_warps(block), **overlap(),
    )  # fmt: skip
    return out


def gate(gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
    """Return activation(gates) * values, [rows, size] each, which may be slices of wider rows; a
    row may have one gate, expanded."""
    rows, size = values.shape
    out = values.new_empty(rows, size)
    launch(
        _gated_kernel, (rows, triton.cdiv(size, GATED_BLOCK)),
        gates, values, out, size, *gates.stride(), values.stride(0),
        ACTIVATION=activation, BLOCK=GATED_BLOCK, **overlap(),
    )  # fmt: skip
    return out


def gate_float8(gates: Tensor, values: Tensor, activation: Activation) -> Normed:
    """Return activation(gates) * values, also as codes in float8; both may be slices of rows."""
    rows, size = values.shape
    block = triton.next_power_of_2(size)
    made = Normed(values.new_empty(rows, size))
    float8 = _new_float8(made.x)
    launch(
        _gated_float8_kernel, (rows,),
        gates, values, made.x, *float8, size, gates.stride(0), values.stride(0),
        ACTIVATION=activation, BLOCK=block, num_warps=num_warps(block, 32), **overlap(),
    )  # fmt: skip
    return made._replace(float8=float8)


def _new_float8(x: Tensor) -> Float8Rows:
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    return Float8Rows(codes, torch.empty(1, len(x), device=x.device))


def cap(x: Tensor, softcap: float) -> None:
    """Replace x by softcap * tanh(x / softcap), in place."""
    rows, size = x.shape
    grid = (rows, triton.cdiv(size, CAPPED_BLOCK))
    launch(_cap_kernel, grid, x, size, x.stride(0), softcap, BLOCK=CAPPED_BLOCK, **overlap())


def norm_heads(qkv: Tensor, norms: QkNorms, heads: Heads) -> Tensor:
    """Apply one RMSNorm to each token's queries and another to its keys; copy its values."""
    sizes = heads.sizes
    out = qkv.new_empty(len(qkv), sum(sizes))
    q_block, k_block, v_block = (triton.next_power_of_2(size) for size in sizes)
    launch(
        _norm_heads_kernel, (len(qkv), 3),
        qkv, *norms, out, qkv.stride(0), heads.norm_eps,
        Q_SIZE=sizes[0], K_SIZE=sizes[1], V_SIZE=sizes[2],
        Q_BLOCK=q_block, K_BLOCK=k_block, V_BLOCK=v_block,
        num_warps=num_warps(q_block), **overlap(),
    )  # fmt: skip
    return out
