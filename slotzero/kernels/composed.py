"""The calls of a layer, composed of primitives in plain torch: what every fused kernel means.

A set that inherits from this writes a matrix product, a page store, paged attention and sampling,
and leaves it to a compiler to fuse the rest.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.kernels.contract import Heads, Kernels, Normed, Opened, Plan, Rows, Tokens


class ComposedKernels(Kernels):
    @abstractmethod
    def product(self, x: Tensor, weight: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """x [rows, in_features], a packed weight -> [rows, out_features]"""

    @abstractmethod
    def embed(self, tokens: Tensor, weight: Tensor) -> Tensor:
        """Rows of a packed weight [vocab, hidden]: tokens [T] -> [T, hidden]"""

    @abstractmethod
    def store_kv(
        self,
        k: Tensor,  # [T, kv_heads, head_dim]
        v: Tensor,
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
        kv_pages: Tensor,
        page_table: Tensor,
        slots: Tensor,
        positions: Tensor,
        scale: float,
    ) -> Tensor:
        """Each token attends to positions [0, its own] of its slot; slot 0 gets zeros."""

    def prepare(self, rehearse: Callable[[], None]) -> None:
        """Nothing here is compiled at its first use."""

    def refuse(self, heads: Heads) -> None:
        """Any shape will do."""

    def locate(
        self, slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
    ) -> None:
        token_slots.copy_(slots)
        torch.index_select(length, 0, slots, out=positions)
        torch.add(positions, slots > 0, out=after)

    def plan(self, tokens: Tokens, rows: Rows | None, heads: Heads) -> Plan:
        return tokens

    def open(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: Tensor,
        norm: Tensor,
        eps: float,
        frequency: Tensor,
        factor: float,
    ) -> Opened:
        residual = self.embed(table[tokens.slots, tokens.positions], embedding)
        angle = (tokens.positions[:, None].float() * frequency)[:, None]
        normed = Normed(rms_norm(residual, norm, eps), None)
        return Opened(residual, normed, angle.cos() * factor, angle.sin() * factor)

    def linear(
        self, x: Normed, eps: float, weight: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        return self.product(x.x, weight, bias, out_features)

    def logits(self, x: Normed, eps: float, weight: Tensor, slots: Tensor, out: Tensor) -> None:
        rows = x.x.masked_fill((slots == 0)[:, None], 0)
        out.copy_(self.product(rows, weight, None, out.shape[-1]))

    def linear_gated(
        self, x: Normed, eps: float, weight: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        gate, value = self.product(x.x, weight, bias, 2 * out_features).chunk(2, -1)
        return F.silu(gate) * value

    def linear_add_norm(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        residual: Tensor,
        norm: Tensor,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        residual = residual + self.product(x, weight, bias, residual.shape[-1])
        return residual, Normed(rms_norm(residual, norm, eps), None)

    def attention(
        self,
        joined: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        kv_pages: Tensor,
        page_table: Tensor,
        plan: Plan,
        heads: Heads,
    ) -> Tensor:
        slots, positions = plan
        q, k, v = (
            part.view(len(joined), -1, heads.head_dim)
            for part in torch.split(joined, [heads.q_size, heads.kv_size, heads.kv_size], dim=-1)
        )
        if q_norm is not None and k_norm is not None:
            q, k = rms_norm(q, q_norm, heads.norm_eps), rms_norm(k, k_norm, heads.norm_eps)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.store_kv(k, v.contiguous(), kv_pages, page_table, slots, positions)
        out = self.attend(q, kv_pages, page_table, slots, positions, heads.scale)
        return out.view(len(joined), -1)

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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float32, rounded before the weight is applied, as the checkpoints were trained."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, head_dim]: pairs are (i, i + head_dim / 2); arithmetic in float32."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
