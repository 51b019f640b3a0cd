"""The calls of a step, composed of primitives in plain torch: what every fused kernel means.

A set that inherits from this writes its own primitives: matrix products, norms, gates, softmax, a
page store, paged attention and sampling. The rest is copies, sums and products of single values,
which round alike wherever they are computed, so a compiler may fuse them.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.contract import Kernels
from slotzero.kernels.torch_recurrent import TorchRecurrent
from slotzero.kernels.torch_speculation import TorchSpeculation
from slotzero.kernels.types import (
    NO_BRANCHES,
    Activation,
    Angles,
    Branches,
    Chosen,
    Experts,
    ExpertWeights,
    Heads,
    Normed,
    Plan,
    Rows,
    Tokens,
)

CLAMP, SLOPE = 7.0, 1.702  # of clamped_silu


class TorchKernels(TorchSpeculation, TorchRecurrent, Kernels):
    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x [rows, in_features], a packed weight -> [rows, out_features]"""

    @abstractmethod
    def grouped_product(
        self, x: Tensor, weights: Tensor, biases: Tensor | None, starts: Tensor, out_features: int
    ) -> Tensor:
        """Rows [starts[e], starts[e + 1]) of x times weights[e], each packed; those behind the last
        are anything."""

    def per_head_product(self, x: Tensor, weights: Tensor, transposed: bool) -> Tensor:
        """x [T, heads, K], weights [heads, K, N] or, transposed, [heads, N, K] -> [T, heads, N]"""
        by = weights.transpose(1, 2) if transposed else weights
        return torch.bmm(x.transpose(0, 1), by).transpose(0, 1)

    def rms_norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
        """Norm the last axis of x. In float32, rounded before the weight is applied, as the
        checkpoints were trained."""
        wide = x.float()
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

    def softmax(self, x: Tensor) -> Tensor:
        """Over the last axis of x [rows, size]."""
        return x.softmax(-1)

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return cap * (x / cap).tanh()

    @abstractmethod
    def store_kv(
        self,
        k: Tensor,  # [T, kv_heads, head_dim]
        v: Tensor,  # [T, kv_heads, value_dim]
        kv_pages: Tensor,
        page_table: Tensor,
        slots: Tensor,  # [T]
        positions: Tensor,  # [T]
    ) -> None:
        """Writes k and v of every token at its position; tokens of slot 0 write nothing."""

    @abstractmethod
    def attend(
        self,
        q: Tensor,  # [T, heads, head_dim]
        sinks: Tensor | None,
        kv_pages: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
        heads: Heads,
        branches: Branches | None = None,
    ) -> Tensor:
        """-> [T, heads, value_dim]; each token attends to its own position and those before it, the
        last `window` of them, or those of its branch; slot 0 gets zeros."""

    def prepare(self, rehearse: Callable[[], None]) -> None:
        """Nothing here is compiled at its first use."""

    def refuse(self, heads: Heads) -> None:
        """Any shape will do."""

    def held(self) -> Mapping[str, Tensor]:
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
    ) -> Plan:
        if branches is not None:
            branches.check(tokens, rows)
        return *tokens, *(branches or NO_BRANCHES)

    def rope_angles(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        angle = (tokens.positions[:, None].float() * frequency)[:, None]
        return Angles(angle.cos() * factor, angle.sin() * factor)

    def embed(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: Tensor,
        scale: float,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        residual = self.embedded(table[tokens.slots, tokens.positions], embedding)
        if scale != 1:
            residual = residual * scale
        return residual, self.norm(residual, norm, eps)

    def embed_pair(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: Tensor,
        embed_norm: Tensor | None,
        hidden: Tensor,
        hidden_norm: Tensor | None,
        eps: float,
    ) -> Tensor:
        _, embedded = self.embed(tokens, table, embedding, 1.0, embed_norm, eps)
        return torch.cat((embedded.x, self.norm(hidden, hidden_norm, eps).x), dim=-1)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Normed:
        return Normed(x if weight is None else self.rms_norm(x, weight, eps), None)

    def apply_norm(self, x: Normed, eps: float) -> Tensor:
        return x.x

    def linear(
        self, x: Normed, eps: float, weight: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        return self.product(x.x, weight, bias, out_features)

    def logits(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        slots: Tensor,
        softcap: float | None,
        out: Tensor,
    ) -> None:
        rows = x.x.masked_fill((slots == 0)[:, None], 0)
        scores = self.product(rows, weight, None, out.shape[-1])
        out.copy_(scores if softcap is None else self.softcap(scores, softcap))

    def linear_gated(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        activation: Activation,
    ) -> Tensor:
        gates, values = self.product(x.x, weight, bias, 2 * out_features).chunk(2, -1)
        return self.gate(gates, values, activation)

    def linear_add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        after: Tensor | None,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        change = self.product(x, weight, bias, residual.shape[-1])
        return self.add_norm(change, residual, after, norm, eps)

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        after: Tensor | None,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        residual = residual + (x if after is None else self.rms_norm(x, after, eps))
        return residual, self.norm(residual, norm, eps)

    def choose(
        self,
        x: Normed,
        eps: float,
        slots: Tensor,
        weights: ExpertWeights,
        shape: Experts,
        by: Normed | None = None,
    ) -> Chosen:
        scores = self.product((by or x).x, weights.router, weights.router_bias, shape.num_experts)
        share, which = self.route(scores, weights, shape)  # [T, num_chosen] each
        return Chosen(x.x, share, which.masked_fill((slots == 0)[:, None], shape.num_all))

    def experts(
        self, chosen: Chosen, weights: ExpertWeights, shape: Experts, starts: Tensor
    ) -> Tensor:
        wanted, share, _ = chosen
        which, order = chosen.which.flatten().sort(stable=True)  # nobody's come last
        every = torch.arange(len(starts), device=which.device)
        starts.copy_(torch.searchsorted(which, every))
        rows = wanted[order // shape.num_chosen]
        joined = self.grouped_product(
            rows, weights.gate_up, weights.gate_up_bias, starts, 2 * shape.inner_size
        )
        gates, values = joined.chunk(2, -1)
        results = self.grouped_product(
            self.gate(gates, values, shape.activation),
            weights.down, weights.down_bias, starts, wanted.shape[-1],
        )  # fmt: skip
        by_token = torch.empty_like(results).index_copy_(0, order, results)
        weighted = by_token.view(*share.shape, -1) * share[:, :, None].to(results.dtype)
        is_none = (chosen.which == len(starts) - 1)[:, :, None]
        return ordered_sum(weighted.masked_fill(is_none, 0), 1)  # whatever their shares came to

    def attention(
        self,
        joined: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        sinks: Tensor | None,
        angles: Angles,
        kv_pages: Tensor,
        page_table: Tensor,
        plan: Plan,
        heads: Heads,
    ) -> Tensor:
        slots, positions, branches = _planned(plan)
        q, k, v = torch.split(joined, [*heads.sizes], dim=-1)
        q = self._rotated(q, q_norm, angles, heads)
        if heads.stores:
            k = self._rotated(k, k_norm, angles, heads)
            v = v.contiguous().view(len(joined), -1, heads.value_dim)
            if heads.norms_values:
                v = self.rms_norm(v, None, heads.norm_eps)
            self.store_kv(k, v, kv_pages, page_table, slots, positions)
        return self.attend(
            q, sinks, kv_pages, page_table, slots, positions, heads, branches
        ).flatten(1)

    def _rotated(self, x: Tensor, norm: Tensor | None, angles: Angles, heads: Heads) -> Tensor:
        """Queries or keys, [T, size] -> [T, heads, head_dim], under their norm and rotated"""
        if heads.norms_whole and norm is not None:
            x = self.rms_norm(x, norm, heads.norm_eps)
        x = x.view(len(x), -1, heads.head_dim)
        if not heads.norms_whole and norm is not None:
            x = self.rms_norm(x, norm, heads.norm_eps)
        return rotate(x, *angles)

    def route(
        self, scores: Tensor, weights: ExpertWeights, shape: Experts
    ) -> tuple[Tensor, Tensor]:
        """scores [T, experts] -> weight and index of the experts that each token chooses,
        [T, num_chosen]"""
        share, chosen = self._choose(scores, weights.correction, shape)
        if weights.factors is not None:
            share = share * weights.factors[chosen]
        if not shape.num_shared:
            return share, chosen
        everyone = torch.arange(shape.num_experts, shape.num_all, device=chosen.device)
        chosen = torch.cat((chosen, everyone.expand(len(chosen), -1)), dim=1)
        return torch.cat((share, share.new_ones(len(share), shape.num_shared)), dim=1), chosen

    def _choose(
        self, scores: Tensor, correction: Tensor | None, shape: Experts
    ) -> tuple[Tensor, Tensor]:
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
            judged = ordered_sum(groups.topk(shape.judged_by, dim=-1).values, 2)
            best = judged.topk(shape.top_groups, dim=-1).indices
            outside = torch.ones_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
            wanted = groups.masked_fill(outside[:, :, None], float("-inf")).flatten(1)
        chosen = wanted.topk(shape.top_k, dim=-1).indices
        share = scores.gather(1, chosen)
        if shape.is_normed:
            share = share / (ordered_sum(share, 1)[:, None] + 1e-20)
        return share * shape.factor, chosen

    def attention_latent(
        self,
        q: Tensor,
        k: Tensor,
        k_norm: Tensor,
        up_k: Tensor,
        up_v: Tensor,
        angles: Angles,
        kv_pages: Tensor,
        page_table: Tensor,
        plan: Plan,
        heads: Heads,
    ) -> Tensor:
        assert heads.latent is not None
        slots, positions, branches = _planned(plan)
        plain, turned = heads.latent.nope_dim, heads.latent.rope_dim
        queries = q.view(len(q), -1, plain + turned)
        straight, turning = queries[..., :plain], queries[..., plain:]
        key, latent = k[:, None, :turned], k[:, None, turned:]
        latent = self.rms_norm(latent, k_norm, heads.norm_eps)
        row = torch.cat((rotate(key, *angles), latent), dim=-1)
        self.store_kv(row, row[..., :0], kv_pages, page_table, slots, positions)
        brought = self.per_head_product(straight, up_k, transposed=False)
        q = torch.cat((rotate(turning, *angles), brought), dim=-1)
        seen = self.attend(q, None, kv_pages, page_table, slots, positions, heads, branches)
        return self.per_head_product(seen, up_v, transposed=True).flatten(1)

    def advance(
        self,
        slots: Tensor,
        new_length: Tensor,
        target: Tensor,
        length: Tensor,
        tokens: Tensor,
        sampled: Tensor,
    ) -> None:
        """A row of slot 0 writes what is there: its length stays 0 and its token stays 0."""
        samples = (slots > 0) & (new_length >= target[slots])
        sampled.mul_(samples)
        kept = tokens[slots, new_length]
        tokens.index_put_((slots, new_length), torch.where(samples, sampled, kept))
        length.index_put_((slots,), new_length)


def _planned(plan: Plan) -> tuple[Tensor, Tensor, Branches | None]:
    slots, positions, bases, seen, stands = plan
    assert slots is not None and positions is not None
    if bases is None or seen is None or stands is None:
        return slots, positions, None
    return slots, positions, Branches(bases, seen, stands)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]: pairs are (i, i + head_dim / 2); arithmetic in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def ordered_sum(x: Tensor, axis: int) -> Tensor:
    """Sum a short axis from first to last; torch's own order depends on the shape of x."""
    first, *others = x.unbind(axis)
    return sum(others, start=first)
