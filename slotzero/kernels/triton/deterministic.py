"""The CUDA kernel set of deterministic mode: the bits of a row depend on nothing beside it.

It replaces the operations of `TritonKernels` whose order of summation follows from the step: matrix
products, attention, experts, and recurrent layers, whose rows it scans token by token. All others
compute each row by itself, in a launch of one shape. docs/determinism.md lists them.
"""

import torch
from torch import Tensor

from slotzero.kernels.attention_plans import AttentionPlan, FixedPlan
from slotzero.kernels.quantized import QuantizedRows, pack_rows
from slotzero.kernels.triton.attention import fixed, fixed_plan, mla_rows, prefill
from slotzero.kernels.triton.attention.per_head_fixed import per_head_fixed
from slotzero.kernels.triton.kernels import NO_NORMS, TritonKernels
from slotzero.kernels.triton.linear import elementwise
from slotzero.kernels.triton.linear.products_fixed import FixedProducts
from slotzero.kernels.triton.moe import experts
from slotzero.kernels.triton.recurrent import convolution, scan
from slotzero.kernels.types import (
    Angles,
    Branches,
    Experts,
    ExpertWeights,
    Heads,
    IndexInputs,
    MlaWeights,
    PagedKv,
    QkNorms,
    Routed,
    Rows,
    Tokens,
)
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights
from slotzero.kernels.weights import WeightFormat


class DeterministicKernels(TritonKernels):
    is_batch_invariant = True

    def __init__(self) -> None:
        super().__init__(FixedProducts())

    def quantized_shapes(
        self, out_features: int, in_features: int, format: WeightFormat
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return format.shapes(out_features, in_features)

    def pack_quantized(self, rows: QuantizedRows, format: WeightFormat) -> dict[str, Tensor]:
        return pack_rows(rows, format)

    def plan(
        self,
        tokens: Tokens,
        rows: Rows | None,
        heads: Heads,
        branches: Branches | None = None,
    ) -> AttentionPlan:
        if branches is not None:
            branches.check(tokens, rows)
        return fixed_plan.plan(tokens, rows, heads, branches)

    def attention(
        self,
        qkv: Tensor,
        norms: QkNorms,
        sinks: Tensor | None,
        angles: Angles,
        kv: PagedKv,
        plan: AttentionPlan,
        heads: Heads,
    ) -> Tensor:
        assert isinstance(plan, FixedPlan)
        if heads.norms_whole:
            qkv, norms = elementwise.norm_heads(qkv, norms, heads), NO_NORMS
        q = prefill.rope_store(qkv, norms, angles, kv, plan.tokens, heads)
        return fixed.attend(q, sinks, kv, plan, heads).flatten(1)

    def mla_attention(
        self,
        q: Tensor,
        k: Tensor,
        weights: MlaWeights,
        angles: Angles,
        kv: PagedKv,
        plan: AttentionPlan,
        heads: Heads,
        index: IndexInputs | None = None,
    ) -> Tensor:
        """Attend in absorbed form, whatever the step: the other form would round differently."""
        assert isinstance(plan, FixedPlan) and heads.mla is not None and index is None
        query = q.new_empty(len(q), heads.num_heads, heads.head_dim)
        product = per_head_fixed
        mla_rows.store(q, k, weights, angles, kv, plan.tokens, query, None, heads, product)
        seen = fixed.attend(query, None, kv, plan, heads)
        out = q.new_empty(len(q), heads.num_heads, heads.mla.v_head_dim)
        product(seen, weights.up_v.transpose(1, 2), out)
        return out.flatten(1)

    def experts(
        self, routed: Routed, weights: ExpertWeights, shape: Experts, starts: Tensor
    ) -> Tensor:
        rows, by_expert, chosen = (part.contiguous() for part in routed)
        order = experts.sort(chosen, starts, rows.dtype, is_fixed=True)
        inner = experts.gated(rows, weights.gate_up, order, shape.activation)
        results = experts.product(inner, weights.down, order)
        return experts.add_up(results, by_expert, chosen, len(starts) - 1)

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, step: RecurrentStep, shape: Scan
    ) -> Tensor:
        return convolution.convolve(x, weight, bias, step, shape, is_exact=True)

    def scan(
        self,
        mixed: Tensor,
        gates: Tensor,
        beta: Tensor | None,
        weights: ScanWeights,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        return scan.scan(mixed, gates, beta, weights, step, shape, in_turn=True)
