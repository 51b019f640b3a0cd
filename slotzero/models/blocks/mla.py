"""Multi-head latent attention (MLA), as in DeepSeek.

The keys and values of all heads are computed from one short row per token (a latent and a rotated
part). The KV cache holds only this row.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Heads, IndexInputs, MlaShape, MlaWeights, Normed, ResidualNorms
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.attention import AttentionInputs, KvGroup, by_head
from slotzero.models.blocks.block import Block, BlockContext
from slotzero.models.param import Param, Params, Source, linear, norm
from slotzero.models.rope import halves


class MlaAttentionWeights(NamedTuple):
    qkv: LinearWeight  # [queries or q_rank + cached row, hidden]
    out: LinearWeight  # [hidden, heads * v_head_dim]
    k_norm: Tensor  # [latent]
    up_k: Tensor  # [heads * nope_dim, latent]
    up_v: Tensor  # [heads * v_head_dim, latent]
    q_norm: Tensor | None = None  # [q_rank]; q_norm and q_up exist with low-rank queries only
    q_up: LinearWeight | None = None  # [heads * (nope_dim + rope_dim), q_rank]
    index_q: LinearWeight | None = None  # [index heads * index dim, q_rank]; None: no indexer
    index_k: LinearWeight | None = None  # [index dim + index heads, hidden]: key, and weights
    index_norm: Tensor | None = None  # [index dim]
    index_bias: Tensor | None = None


@dataclass(frozen=True)
class MlaAttention(Block):
    group: KvGroup
    hidden_size: int
    q_rank: int | None
    """Rank of low-rank queries; None: queries are projected from the hidden state directly."""
    prefix: str = "self_attn"

    name = "mla"
    weights_type = MlaAttentionWeights
    reads = False

    @property
    def heads(self) -> Heads:
        return self.group.heads

    @property
    def shape(self) -> MlaShape:
        assert self.heads.mla is not None
        return self.heads.mla

    def shard(self, ranks: Ranks) -> Self:
        return replace(self, group=self.group.shard(ranks.attention.size))

    def params(self) -> Params:
        heads, shape, prefix = self.heads, self.shape, self.prefix
        nope, rank, (q_size, row_size, _) = shape.nope_dim, heads.value_dim, heads.sizes
        order = halves(self.group.rope) or range(shape.rope_dim)
        q_order = by_head([*range(nope), *(nope + row for row in order)], heads.num_heads)
        row_order = [*(rank + row for row in order), *range(rank)]  # the latent comes last
        row = Source(f"{prefix}.kv_a_proj_with_mqa", row_size, row_order)
        if self.q_rank is None:
            q = Source(f"{prefix}.q_proj", q_size, q_order)
            q_norm = q_up = None
        else:
            q = Source(f"{prefix}.q_a_proj", self.q_rank)
            q_norm = norm(f"{prefix}.q_a_layernorm", self.q_rank)
            q_up = linear(self.q_rank, Source(f"{prefix}.q_b_proj", q_size, q_order))
        return {
            "qkv": linear(self.hidden_size, q, row),
            "out": linear(heads.out_size, Source(f"{prefix}.o_proj", self.hidden_size)),
            "k_norm": norm(f"{prefix}.kv_a_layernorm", rank),
            "up_k": self._up(range(nope)),
            "up_v": self._up(range(nope, nope + shape.v_head_dim)),
            "q_norm": q_norm,
            "q_up": q_up,
            **self._index_params(),
        }

    def _index_params(self) -> Params:
        shape, prefix = self.shape.index, f"{self.prefix}.indexer"
        if shape is None:
            return {}
        assert self.q_rank is not None
        q = Source(f"{prefix}.wq_b", shape.num_heads * shape.head_dim)
        k, weights = Source(f"{prefix}.wk", shape.head_dim), f"{prefix}.weights_proj"
        return {
            "index_q": linear(self.q_rank, q),
            "index_k": linear(self.hidden_size, k, Source(weights, shape.num_heads)),
            "index_norm": norm(f"{prefix}.k_norm", shape.head_dim),
            "index_bias": Param((Source(f"{prefix}.k_norm.bias", shape.head_dim),)),
        }

    def _up(self, rows: range) -> Param:
        heads, head_rows = self.heads, self.shape.nope_dim + self.shape.v_head_dim
        order = [head * head_rows + row for head in range(heads.num_heads) for row in rows]
        source = Source(f"{self.prefix}.kv_b_proj.weight", heads.num_heads * head_rows, order)
        return Param((source,), heads.value_dim, is_packed=False)

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: AttentionInputs,
        weights: MlaAttentionWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        kernels, heads, ranks = context.kernels, self.heads, context.ranks
        joined = kernels.linear(x, weights.qkv)
        q_size = self.q_rank or heads.sizes[0]
        q, row = joined[:, :q_size], joined[:, q_size:]
        index = None
        if weights.q_up is not None:
            low = kernels.norm(q, weights.q_norm, heads.norm_eps)
            q, index = kernels.linear(low, weights.q_up), self._index(context, x, low, weights)
        shape = heads.num_heads, -1, heads.value_dim
        up = MlaWeights(weights.k_norm, weights.up_k.view(shape), weights.up_v.view(shape))
        attended = kernels.mla_attention(
            q, row, up, inputs.angles, inputs.kv, inputs.plan, heads, index
        )
        x = Normed(attended)
        return context.linear_add_norm(ranks.attention, x, weights.out, residual, norms)

    def _index(
        self, context: BlockContext, x: Normed, low: Normed, weights: MlaAttentionWeights
    ) -> IndexInputs | None:
        """Return the inputs of the indexer, from hidden states and low-rank queries."""
        shape = self.shape.index
        if shape is None or weights.index_q is None or weights.index_k is None:
            return None
        assert weights.index_norm is not None and weights.index_bias is not None
        sizes = [shape.head_dim, shape.num_heads]
        k, of_heads = torch.split(context.kernels.linear(x, weights.index_k), sizes, dim=-1)
        q = context.kernels.linear(low, weights.index_q)
        return IndexInputs(q, k, of_heads, weights.index_norm, weights.index_bias)
