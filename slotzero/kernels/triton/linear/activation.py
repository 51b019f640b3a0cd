"""Elementwise functions shared by several kernels, in float32."""
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

import triton
import triton.language as tl

from slotzero.kernels import torch_ops

LOG2E = tl.constexpr(1.4426950408889634)
CLAMP, SLOPE = tl.constexpr(torch_ops.CLAMP), tl.constexpr(torch_ops.SLOPE)
GELU_SLOPE = tl.constexpr(2 * (2 / 3.141592653589793) ** 0.5)


@triton.jit
def tanh(x):
    """Return tanh(x), exactly 0 for 0 and never beyond 1 in magnitude."""
    power = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    size = (1.0 - power) / (1.0 + power)
    return tl.where(x < 0, -size, size)


@triton.jit
def activate(gate, value, ACTIVATION: tl.constexpr):
    """Return the two factors of `gate` in torch_ops.py; NaN stays NaN."""
    if ACTIVATION == "silu":
        gate = gate * tl.sigmoid(gate)
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(x)) / 2 is the sigmoid of 2 x
        gate = gate * tl.sigmoid((gate + 0.044715 * gate * gate * gate) * GELU_SLOPE)
    elif ACTIVATION == "sigmoid":
        gate = tl.sigmoid(gate)
    elif ACTIVATION == "relu":
        gate = tl.where(gate < 0, 0.0, gate)
    else:
        tl.static_assert(ACTIVATION == "clamped_silu")
        gate = tl.where(gate > CLAMP, CLAMP, gate)
        gate = gate * tl.sigmoid(gate * SLOPE)
        value = tl.where(value > CLAMP, CLAMP, tl.where(value < -CLAMP, -CLAMP, value)) + 1.0
    return gate, value
