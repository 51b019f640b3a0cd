"""Rotation of queries and keys ahead of attention, for heads that are normed after it."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl
from torch import Tensor

from slotzero.kernels.triton.launch import launch, may_follow, overlap, wait_for_writer
from slotzero.kernels.types import Angles, Heads, QkNorms


@triton.jit
def _rotate_heads_kernel(
    qkv, q_norm, k_norm, q_cos, q_sin, k_cos, k_sin, out, qkv_stride, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, VALUES: tl.constexpr,
    HALF_BLOCK: tl.constexpr, VALUES_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Rotate and norm one head of a token, or copy its values."""
    may_follow(PDL)
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    source = qkv + token * qkv_stride + head * (2 * HALF)
    target = out + token * ((HEADS + KV_HEADS) * 2 * HALF + VALUES) + head * (2 * HALF)
    wait_for_writer(PDL)
    if head == HEADS + KV_HEADS:
        value = tl.arange(0, VALUES_BLOCK)
        copied = tl.load(source + value, mask=value < VALUES, other=0.0)
        tl.store(target + value, copied, mask=value < VALUES)
        return
    if head < HEADS:
        _rotate_head(source, q_norm, q_cos, q_sin, target, token, eps, HALF, HALF_BLOCK)
    else:
        _rotate_head(source, k_norm, k_cos, k_sin, target, token, eps, HALF, HALF_BLOCK)


@triton.jit
def _rotate_head(
    source, norm, cos, sin, target, token, eps, HALF: tl.constexpr, HALF_BLOCK: tl.constexpr
):  # fmt: skip
    pair = tl.arange(0, HALF_BLOCK)
    inside = pair < HALF
    dtype: tl.constexpr = target.dtype.element_ty
    a = tl.load(source + pair, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(source + HALF + pair, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(cos + token * HALF + pair, mask=inside, other=0.0)
    s = tl.load(sin + token * HALF + pair, mask=inside, other=0.0)
    first, second = (a * c - b * s).to(dtype), (b * c + a * s).to(dtype)
    if norm is not None:
        wide_a, wide_b = first.to(tl.float32), second.to(tl.float32)
        square = tl.sum(wide_a * wide_a, axis=0) + tl.sum(wide_b * wide_b, axis=0)
        scale = 1.0 / tl.sqrt_rn(square / (2 * HALF) + eps)
        by_a = tl.load(norm + pair, mask=inside, other=0.0).to(tl.float32)
        by_b = tl.load(norm + HALF + pair, mask=inside, other=0.0).to(tl.float32)
        first = ((wide_a * scale).to(dtype).to(tl.float32) * by_a).to(dtype)
        second = ((wide_b * scale).to(dtype).to(tl.float32) * by_b).to(dtype)
    tl.store(target + pair, first, mask=inside)
    tl.store(target + HALF + pair, second, mask=inside)


def rotate_heads(
    qkv: Tensor, norms: QkNorms, q_angles: Angles, k_angles: Angles, heads: Heads
) -> Tensor:
    """See AttentionKernels.rotate_heads."""
    q_size, k_size, v_size = heads.sizes
    num_q, num_k = q_size // heads.head_dim, k_size // heads.head_dim
    out = qkv.new_empty(len(qkv), q_size + k_size + v_size)
    half = heads.head_dim // 2
    launch(
        _rotate_heads_kernel, (len(qkv), num_q + num_k + (v_size > 0)),
        qkv, *norms, *q_angles, *k_angles, out, qkv.stride(0), heads.norm_eps,
        HEADS=num_q, KV_HEADS=num_k, HALF=half, VALUES=v_size,
        HALF_BLOCK=triton.next_power_of_2(half),
        VALUES_BLOCK=triton.next_power_of_2(max(v_size, 1)), num_warps=1, **overlap(),
    )  # fmt: skip
    return out
