"""The operations of a step in plain torch: the definition of every fused kernel.

They are composed of primitives. A kernel set that inherits from this class supplies its own: matrix
products, norms, gates, softmax, a page store, paged attention and sampling. The rest is copies, and
sums and products of two values, which round the same wherever they are computed, so a compiler may
fuse them.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.errors import UnsupportedModelError
from slotzero.kernels import quantized
from slotzero.kernels.attention_plans import AttentionPlan, TorchPlan
from slotzero.kernels.contract import Kernels
from slotzero.kernels.torch_recurrent import TorchRecurrent
from slotzero.kernels.torch_rotation import index_sides, rotate
from slotzero.kernels.torch_speculation import TorchSpeculation
from slotzero.kernels.types import (
    Activation,
    Angles,
    Branches,
    Experts,
    ExpertWeights,
    Heads,
    IndexInputs,
    MlaWeights,
    Normed,
    PagedKv,
    PairNorms,
    QkNorms,
    ResidualNorms,
    Routed,
    Rows,
    Tokens,
)
from slotzero.kernels.weights import (
    DenseWeight,
    JoinedWeight,
    LinearWeight,
    QuantizedWeight,
)

CLAMP, SLOPE = 7.0, 1.702  # constants of clamped_silu


class TorchKernels(TorchSpeculation, TorchRecurrent, Kernels):
    def product(self, x: Tensor, weight: LinearWeight) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        match weight:
            case DenseWeight():
                return self.dense_product(x, weight)
            case QuantizedWeight():
                return self.quantized_product(self.round_input(x, weight), weight)
            case JoinedWeight(parts):
                return torch.cat([self.product(x, part) for part in parts], dim=-1)

    def product_into(self, x: Tensor, weight: LinearWeight, out: Tensor) -> None:
        """Write `product` of x to `out`."""
        out.copy_(self.product(x, weight))

    @abstractmethod
    def dense_product(self, x: Tensor, weight: DenseWeight) -> Tensor:
        """x [rows, in_features] -> [rows, out_features]"""

    @abstractmethod
    def quantized_product(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """Multiply x, already rounded, by the numbers that the codes stand for."""

    def round_input(self, x: Tensor, weight: QuantizedWeight) -> Tensor:
        """Round the input of a linear layer as the format of its weight asks."""
        return quantized.round_input(x, weight).to(x.dtype)

    @abstractmethod
    def grouped_product(self, x: Tensor, weights: LinearWeight, starts: Tensor) -> Tensor:
        """Multiply rows [starts[e], starts[e + 1]) of x by the weight of expert e; rows after the
        last start are unspecified."""

    def per_head_product(self, x: Tensor, weights: Tensor, transposed: bool) -> Tensor:
        """x [T, heads, K], weights [heads, K, N] or, transposed, [heads, N, K] -> [T, heads, N]"""
        by = weights.transpose(1, 2) if transposed else weights
        return torch.bmm(x.transpose(0, 1), by).transpose(0, 1)

    def rms_norm(
        self, x: Tensor, weight: Tensor | None, eps: float, is_centred: bool = False
    ) -> Tensor:
        """Apply RMSNorm to the last axis of x; if centred, subtract its mean first.

        In float32, rounded before the weight is applied, as the checkpoints were trained.
        """
        wide = x.float()
        if is_centred:
            wide = wide - wide.mean(-1, keepdim=True)
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return normed.to(x.dtype) if weight is None else normed.to(x.dtype) * weight

    def gate(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        if activation == "silu":
            return F.silu(gates) * values
        if activation == "gelu_tanh":
            return F.gelu(gates, approximate="tanh") * values
        if activation == "sigmoid":
            return gates.sigmoid() * values
        if activation == "relu":
            return F.relu(gates) * values
        gates, values = gates.clamp(max=CLAMP), values.clamp(-CLAMP, CLAMP)
        return (values + 1) * (gates * torch.sigmoid(SLOPE * gates))

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Apply RoPE to x [T, heads, head_dim]."""
        return rotate(x, *angles)

    def softmax(self, x: Tensor) -> Tensor:
        """Return the softmax over the last axis of x [rows, size]."""
        return x.softmax(-1)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return cap * (x / cap).tanh()

    @abstractmethod
    def store_kv(
        self,
        k: Tensor,  # [T, kv_heads, head_dim]
        v: Tensor,  # [T, kv_heads, value_dim]
        kv: PagedKv,
        tokens: Tokens,
    ) -> None:
        """Write k and v of every token at its position; tokens of slot 0 write nothing."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, head_dim]
        sinks: Tensor | None,
        kv: PagedKv,
        plan: TorchPlan,
        heads: Heads,
    ) -> Tensor:
        """Attend to the KV cache -> [T, heads, value_dim].

        Each token attends to its own position and those before it, the last `window` of them, those
        of its chunk, those of its branch, or those that the plan's `taken` selects; slot 0 gets
        zeros.
        """

    @abstractmethod
    def select_keys(
        self,
        q: Tensor,  # [T, heads, dim]
        weights: Tensor,  # [T, heads]
        kv: PagedKv,  # rows begin with an index key [dim]
        plan: TorchPlan,
        top_k: int,
    ) -> Tensor:
        """Select the keys with the largest sums over heads of weight * relu(q k) among those that a
        token sees -> [T, positions] uint8: 1 if selected."""

    def prepare(self, rehearse: Callable[[], None]) -> None:
        """Do nothing: no operation of this set is compiled at its first use."""

    @property
    def has_float8_kv(self) -> bool:
        return True

    def refuse(self, heads: Heads, float8_kv: bool = False) -> None:
        """Refuse an FP8 KV cache with an indexer; every other shape is supported."""
        if float8_kv and heads.mla is not None and heads.mla.index is not None:
            raise UnsupportedModelError(
                "--kv-cache-dtype fp8 is not implemented for a model with an indexer (index_topk): "
                "drop it"
            )

    def workspace(self) -> Mapping[str, Tensor]:
        return {}

    def decode_positions(
        self, slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
    ) -> None:
        token_slots.copy_(slots)
        torch.index_select(length, 0, slots, out=positions)
        torch.add(positions, slots > 0, out=after)

    def plan(
        self,
        tokens: Tokens,
        rows: Rows | None,
        heads: Heads,
        branches: Branches | None = None,
    ) -> AttentionPlan:
        if branches is not None:
            branches.check(tokens, rows)
        return TorchPlan(tokens, branches)

    def rope_angles(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        angle = (tokens.positions[:, None].float() * frequency)[:, None]
        still = (frequency == 0).unsqueeze(-2)
        return Angles((angle.cos() * factor).masked_fill(still, 1.0), angle.sin() * factor)

    def embed(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: LinearWeight,
        scale: float,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        residual = self.embed_ids(table[tokens.slots, tokens.positions], embedding)
        if scale != 1:
            residual = residual * scale
        return residual, self.norm(residual, norm, eps)

    def embed_pair(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: LinearWeight,
        hidden: Tensor,
        norms: PairNorms,
    ) -> Tensor:
        _, embedded = self.embed(tokens, table, embedding, 1.0, norms.embed, norms.eps)
        return torch.cat((embedded.x, self.norm(hidden, norms.hidden, norms.eps).x), dim=-1)

    def norm(
        self, x: Tensor, weight: Tensor | None, eps: float, is_centred: bool = False
    ) -> Normed:
        return Normed(x if weight is None else self.rms_norm(x, weight, eps, is_centred))

    def apply_norm(self, x: Normed) -> Tensor:
        return x.x

    def linear(self, x: Normed, weight: LinearWeight) -> Tensor:
        return self.product(x.x, weight)

    def logits(
        self, x: Normed, weight: LinearWeight, slots: Tensor, softcap: float | None, out: Tensor
    ) -> None:
        masked = x.x.masked_fill((slots == 0)[:, None], 0)
        self.product_into(masked, weight, out)
        if softcap is not None:
            out.copy_(self.softcap(out, softcap))

    def linear_gated(self, x: Normed, weight: LinearWeight, activation: Activation) -> Normed:
        gates, values = self.product(x.x, weight).chunk(2, -1)
        return Normed(self.gate(gates, values, activation))

    def linear_add_norm(
        self, x: Normed, weight: LinearWeight, residual: Tensor, norms: ResidualNorms
    ) -> tuple[Tensor, Normed]:
        return self.add_norm(self.product(x.x, weight), residual, norms)

    def add_norm(self, x: Tensor, residual: Tensor, norms: ResidualNorms) -> tuple[Tensor, Normed]:
        post, rule = norms.post, (norms.eps, norms.is_centred)
        residual = residual + (x if post is None else self.rms_norm(x, post, *rule))
        return residual, self.norm(residual, norms.next, *rule)

    def route(
        self,
        x: Normed,
        slots: Tensor,
        weights: ExpertWeights,
        shape: Experts,
        by: Normed | None = None,
    ) -> Routed:
        scores = self.product((by or x).x, weights.router)
        by_expert, experts = self._top_experts(scores, weights, shape)  # [T, num_chosen] each
        return Routed(x.x, by_expert, experts.masked_fill((slots == 0)[:, None], shape.num_all))

    def experts(
        self, routed: Routed, weights: ExpertWeights, shape: Experts, starts: Tensor
    ) -> Tensor:
        ordered, order = routed.experts.flatten().sort(stable=True)  # `no expert` comes last
        every = torch.arange(len(starts), device=ordered.device)
        starts.copy_(torch.searchsorted(ordered, every))
        rows = routed.rows[order // shape.num_chosen]
        gates, values = self.grouped_product(rows, weights.gate_up, starts).chunk(2, -1)
        inner = self.gate(gates, values, shape.activation)
        results = self.grouped_product(inner, weights.down, starts)
        by_token = torch.empty_like(results).index_copy_(0, order, results)
        by_token = by_token.view(*routed.weights.shape, -1)
        weighted = by_token * routed.weights[:, :, None].to(results.dtype)
        is_none = (routed.experts == len(starts) - 1)[:, :, None]
        return ordered_sum(weighted.masked_fill(is_none, 0), 1)  # even where the weight is NaN

    def rotate_heads(
        self, qkv: Tensor, norms: QkNorms, q_angles: Angles, k_angles: Angles, heads: Heads
    ) -> Tensor:
        q, k, v = torch.split(qkv, [*heads.sizes], dim=-1)
        q, k = (
            self.rotate(x.view(len(x), -1, heads.head_dim), angles)
            for x, angles in ((q, q_angles), (k, k_angles))
        )
        q = q if norms.q is None else self.rms_norm(q, norms.q, heads.norm_eps)
        k = k if norms.k is None else self.rms_norm(k, norms.k, heads.norm_eps)
        return torch.cat((q.flatten(1), k.flatten(1), v), dim=-1)

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
        assert isinstance(plan, TorchPlan)
        q, k, v = torch.split(qkv, [*heads.sizes], dim=-1)
        q = self._rotated(q, norms.q, angles, heads)
        if heads.stores:
            k = self._rotated(k, norms.k, angles, heads)
            v = v.view(len(qkv), -1, heads.value_dim)
            if heads.norms_values:
                v = self.rms_norm(v, None, heads.norm_eps)
            self.store_kv(k, v, kv, plan.tokens)
        return self.attend(q, sinks, kv, plan, heads).flatten(1)

    def _rotated(self, x: Tensor, norm: Tensor | None, angles: Angles, heads: Heads) -> Tensor:
        """Norm and rotate queries or keys, [T, size] -> [T, heads, head_dim]."""
        if heads.norms_whole and norm is not None:
            x = self.rms_norm(x, norm, heads.norm_eps)
        x = x.view(len(x), -1, heads.head_dim)
        if not heads.norms_whole and norm is not None:
            x = self.rms_norm(x, norm, heads.norm_eps)
        return self.rotate(x, angles)

    def _top_experts(
        self, scores: Tensor, weights: ExpertWeights, shape: Experts
    ) -> tuple[Tensor, Tensor]:
        """Return weight and index of each token's experts, [T, num_chosen]; scores are
        [T, experts]."""
        by_expert, chosen = self._top_routed(scores, weights.correction, shape)
        if weights.factors is not None:
            by_expert = by_expert * weights.factors[chosen]
        if not shape.num_shared:
            return by_expert, chosen
        shared = torch.arange(shape.num_experts, shape.num_all, device=chosen.device)
        chosen = torch.cat((chosen, shared.expand(len(chosen), -1)), dim=1)
        ones = by_expert.new_ones(len(by_expert), shape.num_shared)
        return torch.cat((by_expert, ones), dim=1), chosen

    def _top_routed(
        self, scores: Tensor, correction: Tensor | None, shape: Experts
    ) -> tuple[Tensor, Tensor]:
        """Do the same without factors and shared experts."""
        if shape.scores == "softmax_of_chosen":
            best, chosen = scores.topk(shape.top_k, dim=-1)
            return self.softmax(best), chosen
        scores = scores.float()
        if shape.scores == "sigmoid":
            scores = self.gate(scores, torch.ones_like(scores), "sigmoid")
        else:
            scores = self.softmax(scores)
        wanted = scores if correction is None else scores + correction
        if shape.num_groups > 1:
            groups = wanted.view(len(wanted), shape.num_groups, -1)
            judged = ordered_sum(groups.topk(shape.scores_per_group, dim=-1).values, 2)
            best = judged.topk(shape.top_groups, dim=-1).indices
            outside = torch.ones_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
            wanted = groups.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
        chosen = wanted.topk(shape.top_k, dim=-1).indices
        by_expert = scores.gather(1, chosen)
        if shape.is_normed:
            by_expert = by_expert / (ordered_sum(by_expert, 1)[:, None] + shape.norm_eps)
        return by_expert * shape.factor, chosen

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
        assert heads.mla is not None and isinstance(plan, TorchPlan)
        nope_dim, rope_dim = heads.mla.nope_dim, heads.mla.rope_dim
        q = q.view(len(q), -1, nope_dim + rope_dim)
        q_nope, q_rope = q[..., :nope_dim], q[..., nope_dim:]
        k_rope, latent = k[:, None, :rope_dim], k[:, None, rope_dim:]
        latent = self.rms_norm(latent, weights.k_norm, heads.norm_eps)
        row = torch.cat((self.rotate(k_rope, angles), latent), dim=-1)
        absorbed = self.per_head_product(q_nope, weights.up_k, transposed=False)
        q = torch.cat((self.rotate(q_rope, angles), absorbed), dim=-1)
        shape = heads.mla.index
        if shape is None or index is None:
            self.store_kv(row, row[..., :0], kv, plan.tokens)
        else:
            index_q, index_k = index_sides(index, shape, angles, rope_dim)
            row = torch.cat((index_k, row), dim=-1)
            self.store_kv(row, row[..., :0], kv, plan.tokens)
            taken = self.select_keys(index_q, index.weights.contiguous(), kv, plan, shape.top_k)
            plan = plan._replace(taken=taken)
            q = torch.cat((torch.zeros_like(q[..., : shape.head_dim]), q), dim=-1)
        latents = self.attend(q, None, kv, plan, heads)
        return self.per_head_product(latents, weights.up_v, transposed=True).flatten(1)

    def advance(
        self,
        slots: Tensor,
        new_length: Tensor,
        target: Tensor,
        length: Tensor,
        tokens: Tensor,
        sampled: Tensor,
    ) -> None:
        """See SamplingKernels. A row of slot 0 rewrites the old values: length and token stay 0."""
        samples = (slots > 0) & (new_length >= target[slots])
        sampled.mul_(samples)
        kept = tokens[slots, new_length]
        tokens.index_put_((slots, new_length), torch.where(samples, sampled, kept))
        length.index_put_((slots,), new_length)


def ordered_sum(x: Tensor, axis: int) -> Tensor:
    """Sum a short axis from first to last; torch's own order depends on the shape of x."""
    first, *others = x.unbind(axis)
    return sum(others, start=first)
