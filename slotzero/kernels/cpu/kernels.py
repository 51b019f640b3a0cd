"""The CPU kernel set: the C++ library behind the contract, in float32.

Every kernel computes each row by itself and in one order, so a row's result is bitwise identical in
every batch. The operations left to torch (copies, sums and products of two values) round the same
everywhere.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.attention_plans import TorchPlan
from slotzero.kernels.cpu import build
from slotzero.kernels.torch_ops import TorchKernels
from slotzero.kernels.types import (
    NO_BRANCHES,
    Activation,
    Angles,
    Heads,
    LinearWeight,
    Normed,
    PagedKv,
    ResidualNorms,
    Tokens,
)
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights
from slotzero.sampling.tables import Sampled, SamplingTables

ACTIVATIONS: tuple[Activation, ...] = ("silu", "gelu_tanh", "clamped_silu", "sigmoid", "relu")
"""Activations by number, in the same order as in rowwise.cpp."""
NO_ROWS = (None, None, None, None)
FEATURES = 16  # output features side by side in a packed weight; the same as in linear.cpp


class CpuKernels(TorchKernels):
    name = "cpu"
    is_batch_invariant = True

    def __init__(self) -> None:
        build.load()
        _register_shapes()

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (-(-out_features // FEATURES), in_features, FEATURES)

    def pack(self, weight: Tensor) -> Tensor:
        *lead, out_features, in_features = weight.shape
        blocks = -(-out_features // FEATURES)
        padded = F.pad(weight, (0, 0, 0, blocks * FEATURES - out_features))
        return padded.view(*lead, blocks, FEATURES, in_features).transpose(-1, -2).contiguous()

    def product(self, x: Tensor, weight: LinearWeight) -> Tensor:
        out = x.new_empty(x.shape[0], weight.out_features)
        torch.ops.slotzero.linear.default(x, weight.data, weight.bias, out)
        return out

    def grouped_product(self, x: Tensor, weights: LinearWeight, starts: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0], weights.out_features)
        torch.ops.slotzero.grouped.default(x, weights.data, weights.bias, starts, out)
        return out

    def per_head_product(self, x: Tensor, weights: Tensor, transposed: bool) -> Tensor:
        out = x.new_empty(*x.shape[:2], weights.shape[1 if transposed else 2])
        torch.ops.slotzero.per_head.default(x, weights, transposed, out)
        return out

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        out = x.new_empty(x.shape)
        torch.ops.slotzero.rms_norm.default(x, weight, eps, out)
        return out

    def add_norm(self, x: Tensor, residual: Tensor, norms: ResidualNorms) -> tuple[Tensor, Normed]:
        total, normed = torch.empty_like(residual), torch.empty_like(residual)
        torch.ops.slotzero.add_norm.default(x, residual, *norms, total, normed)
        return total, Normed(total if norms.next is None else normed)

    def gate(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        out = values.new_empty(values.shape)
        number = ACTIVATIONS.index(activation)
        torch.ops.slotzero.gate.default(gates, values, number, out)
        return out

    def softmax(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape)
        torch.ops.slotzero.softmax.default(x, out)
        return out

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        out = x.new_empty(x.shape)
        torch.ops.slotzero.softcap.default(x, cap, out)
        return out

    def rope_angles(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        size = len(tokens.positions), 1, frequency.shape[-1]
        angles = Angles(frequency.new_empty(size), frequency.new_empty(size))
        torch.ops.slotzero.rope_angles.default(tokens.positions, frequency, factor, *angles)
        return angles

    def embed_ids(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        return weight.data[ids // FEATURES, :, ids % FEATURES]

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        kv: PagedKv,
        tokens: Tokens,
    ) -> None:
        torch.ops.slotzero.store_kv.default(k, v, *kv, *tokens)

    def attend(
        self,
        q: Tensor,
        sinks: Tensor | None,
        kv: PagedKv,
        plan: TorchPlan,
        heads: Heads,
    ) -> Tensor:
        out = q.new_empty(q.shape[0], heads.num_heads, heads.value_dim)
        torch.ops.slotzero.attend.default(
            q, sinks, *kv, *plan.tokens,
            *(plan.branches or NO_BRANCHES),
            heads.scale, heads.window, heads.softcap, out,
        )  # fmt: skip
        return out

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        out, states, trail = torch.empty_like(x), step.states, step.trail
        torch.ops.slotzero.convolve.default(
            x, weight, bias, *step.tokens, *(step.rows[:4] if step.rows else NO_ROWS),
            states.conv, states.conv_kept, states.rows, None if trail is None else trail.conv,
            shape.interval, out,
        )  # fmt: skip
        return out

    def scan(
        self,
        mixed: Tensor,
        gates: Tensor,
        beta: Tensor | None,
        weights: ScanWeights,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        out, states, trail = mixed.new_empty(len(mixed), shape.inner_size), step.states, step.trail
        torch.ops.slotzero.scan.default(
            mixed, gates, beta, *weights, *step.tokens,
            *(step.rows[:4] if step.rows else NO_ROWS),
            states.scan, states.scan_kept, states.rows, None if trail is None else trail.scan,
            shape.num_groups, *shape.dt_limit, shape.interval, out,
        )  # fmt: skip
        return out

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        torch.ops.slotzero.sample.default(logits, slots, positions, *tables, *out)


@functools.cache
def _register_shapes() -> None:
    """Register fake ops. Every op writes into given tensors, so there is no shape to infer."""
    for name in (
        "linear", "grouped", "per_head", "rms_norm", "add_norm", "gate", "softmax", "softcap",
        "rope_angles", "store_kv", "attend", "convolve", "scan", "sample",
    ):  # fmt: skip
        torch.library.register_fake(f"slotzero::{name}", lambda *_: None)
