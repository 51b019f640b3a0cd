"""Attention over a paged KV cache.

It is multi-head, grouped-query (GQA) or multi-query, and full, sliding or in chunks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from slotzero.distributed.ranks import Ranks, norm_over
from slotzero.errors import ConfigError
from slotzero.kernels.attention_plans import AttentionPlan
from slotzero.kernels.types import Angles, Heads, Normed, PagedKv, QkNorms, ResidualNorms
from slotzero.kernels.weights import LinearWeight
from slotzero.models.blocks.block import FLAG, Block, BlockContext, split_evenly
from slotzero.models.param import LinearParam, Param, Params, Source, linear, side_by_side
from slotzero.models.rope import RopeConfig, halves


@dataclass(frozen=True)
class KvGroup:
    """Layers that share one KV pool and one page table."""

    name: str
    layers: tuple[int, ...]  # layers that store KV
    heads: Heads
    rope: RopeConfig
    readers: tuple[int, ...] = ()
    """Layers that store no KV: they attend to the KV of the last of `layers`."""

    @property
    def reader_heads(self) -> Heads:
        """Heads of the layers that store no KV."""
        return replace(self.heads, stores=False)

    @property
    def shapes(self) -> tuple[Heads, ...]:
        """All heads that attention kernels of this group are called with."""
        return (self.heads, self.reader_heads) if self.readers else (self.heads,)

    def owner_of(self, layer: int) -> int:
        """Return the index into `layers` of the layer whose KV this layer attends to."""
        return len(self.layers) - 1 if layer in self.readers else self.layers.index(layer)

    def shard(self, size: int) -> "KvGroup":
        return replace(self, heads=_shard_heads(self.heads, size)) if size > 1 else self


class AttentionScales(NamedTuple):
    """Constants that multiply the weights when they are loaded."""

    q: float = 1.0
    k: float = 1.0
    v: float = 1.0
    input: float = 1.0  # q, k and v, but not their biases
    out: float = 1.0


NO_SCALES = AttentionScales()


class AttentionWeights(NamedTuple):
    qkv: LinearWeight  # [sum(heads.sizes), in_size]
    out: LinearWeight  # [hidden, heads.out_size]
    norms: QkNorms
    sinks: Tensor | None = None  # [heads]
    gate: LinearWeight | None = None  # [heads.out_size, in_size]


class AttentionInputs(NamedTuple):
    """Inputs of attention in one layer of a step."""

    angles: Angles
    kv: PagedKv
    plan: AttentionPlan
    still: Angles | None = None
    """Angles that do not rotate, if a layer of the group needs them."""
    q_angles: Angles | None = None  # of the queries, if they differ; see RopeConfig.query_beta


@dataclass(frozen=True)
class Attention(Block):
    group: KvGroup
    hidden_size: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: Literal["head", "whole", "unit", "rotated_head"] | None = None
    """Norms of queries and keys: of each head, of all heads at once, of each without a weight, or
    of each after RoPE."""
    norm_names: tuple[str, str] = ("q_norm", "k_norm")
    out_name: str = "o_proj"
    norm_offset: float = 0.0
    is_rotated: bool = True
    """False: queries and keys are not rotated (NoPE), although other layers of the group are."""
    reads: bool = False
    """Whether the layer computes queries only and stores no KV; see KvGroup.readers."""
    sinks: str | None = None  # name of the attention sinks in the checkpoint
    is_gated: bool = False
    """Whether the result is multiplied by the sigmoid of gates, which are stored with the queries.
    """
    values_are_keys: bool = False
    """Whether the values are the keys before norm and rotation."""
    scales: AttentionScales = NO_SCALES
    prefix: str = "self_attn"
    fused: str | None = None
    """Name of the one tensor in which the checkpoint stores queries, keys and values."""
    in_features: int | None = None  # None: hidden_size

    weights_type = AttentionWeights

    def __post_init__(self) -> None:
        # rotate_heads norms after the factor on queries, and would undo it
        assert self.qk_norm is None or not self.group.rope.query_beta

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"attention_{self.group.name}" + ("_readers" if self.reads else "")

    @property
    def heads(self) -> Heads:
        return self.group.reader_heads if self.reads else self.group.heads

    @property
    def in_size(self) -> int:
        return self.in_features or self.hidden_size

    @property
    def rotates_ahead(self) -> bool:
        """Whether queries and keys are rotated before the attention kernel is called."""
        return self.qk_norm == "rotated_head" or bool(self.group.rope.query_beta)

    @property
    def needs_still(self) -> bool:
        return self.rotates_ahead or not self.is_rotated

    def shard(self, ranks: Ranks) -> Self:
        return replace(self, group=self.group.shard(ranks.attention.size))

    def params(self) -> Params:
        q, gate = self._query_sources()
        qkv = self._in_fused([q, *self._key_value_sources()])
        biases = [source.scaled(1 / self.scales.input) for source in qkv] if self.qkv_bias else ()
        out = Source(f"{self.prefix}.{self.out_name}", self.hidden_size, scale=self.scales.out)
        out_bias = [out] if self.out_bias else ()
        return {
            "qkv": linear(self.in_size, *qkv, biases=biases),
            "out": linear(self.heads.out_size, out, biases=out_bias, summed_over="attention"),
            "norms": self._norm_params(),
            "sinks": self._sink_param(),
            "gate": None if gate is None else self._gate_param(gate),
        }

    def unread(self) -> tuple[str, ...]:
        """Return the key and value projections of a reader, which some exporters store anyway."""
        if not self.reads:
            return ()
        names = "k_proj.weight", "k_proj.bias", "v_proj.weight", "v_proj.bias", "k_norm.weight"
        return tuple(f"{self.prefix}.{name}" for name in names)

    def _query_sources(self) -> tuple[Source, Source | None]:
        heads, order, scales = self.heads, halves(self.group.rope), self.scales
        size, name = heads.head_dim, f"{self.prefix}.q_proj"
        rows, scale = heads.num_heads * size, scales.q * scales.input
        if not self.is_gated:
            return Source(name, rows, by_head(order, heads.num_heads), scale=scale), None
        both = Source(name, 2 * rows, scale=scale)  # queries and gates alternate head by head

        def rows_from(first: int, rows: Sequence[int]) -> list[int]:
            return [2 * size * h + first + row for h in range(heads.num_heads) for row in rows]

        queries = replace(both, order=rows_from(0, order or range(size)))
        return queries, replace(both, order=rows_from(size, range(size)))

    def _key_value_sources(self) -> list[Source]:
        heads, scales = self.heads, self.scales
        if not heads.stores:
            return []
        _, k_size, v_size = heads.sizes
        values = "k_proj" if self.values_are_keys else "v_proj"
        order = by_head(halves(self.group.rope), heads.num_kv_heads)
        k_scale, v_scale = scales.k * scales.input, scales.v * scales.input
        return [
            Source(f"{self.prefix}.k_proj", k_size, order, scale=k_scale),
            Source(f"{self.prefix}.{values}", v_size, scale=v_scale),
        ]

    def _in_fused(self, sources: list[Source]) -> list[Source]:
        """Return the sources as rows of the fused tensor, if there is one."""
        if self.fused is None:
            return sources
        parts = side_by_side(f"{self.prefix}.{self.fused}", self.heads.sizes)
        return [
            replace(part, order=source.order, scale=source.scale)
            for part, source in zip(parts, sources, strict=True)
        ]

    def _gate_param(self, gate: Source) -> LinearParam:
        return linear(self.in_size, gate, biases=[gate] if self.qkv_bias else ())

    def _norm_params(self) -> Mapping[str, Param | None]:
        heads, order = self.heads, halves(self.group.rope)
        names = () if self.qk_norm is None else ("q", "k") if heads.stores else ("q",)
        params: dict[str, Param | None] = {"q": None, "k": None}
        stored = self.norm_names[: len(names)]
        for name, field, size in zip(stored, names, heads.sizes[: len(names)], strict=True):
            if self.qk_norm == "unit":
                params[field] = Param((), num_ones=heads.head_dim, starts_at_one=True)
                continue
            size = size if self.qk_norm == "whole" else heads.head_dim
            rows = by_head(order, size // heads.head_dim)
            source = Source(f"{self.prefix}.{name}.weight", size, rows)
            params[field] = Param((source,), offset=self.norm_offset, starts_at_one=True)
        return params

    def _sink_param(self) -> Param | None:
        if self.sinks is None:
            return None
        return Param((Source(f"{self.prefix}.{self.sinks}", self.heads.num_heads),))

    def forward(
        self,
        context: BlockContext,
        x: Normed,
        inputs: AttentionInputs,
        weights: AttentionWeights,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        kernels, ranks, heads = context.kernels, context.ranks, self.heads
        qkv, qk_norms = kernels.linear(x, weights.qkv), weights.norms
        if heads.norms_whole and ranks.attention.is_distributed:
            qkv = _norm_over_ranks(ranks, qkv, qk_norms, heads)
            heads, qk_norms = replace(heads, norms_whole=False), QkNorms(None, None)
        angles = inputs.angles
        if self.needs_still:
            assert inputs.still is not None
            angles = inputs.still
        if self.rotates_ahead:
            q_angles = inputs.q_angles or inputs.angles
            qkv = kernels.rotate_heads(qkv, qk_norms, q_angles, inputs.angles, heads)
            qk_norms = QkNorms(None, None)
        attended = kernels.attention(
            qkv, qk_norms, weights.sinks, angles, inputs.kv, inputs.plan, heads
        )
        if weights.gate is not None:
            attended = kernels.gate(kernels.linear(x, weights.gate), attended, "sigmoid")
        x = Normed(attended)
        return context.linear_add_norm(ranks.attention, x, weights.out, residual, norms)


def by_head(order: Sequence[int] | None, num_heads: int) -> list[int] | None:
    """Apply the row order of one head to all heads; None: rows stay as stored."""
    if order is None:
        return None
    return [head * len(order) + row for head in range(num_heads) for row in order]


def _norm_over_ranks(ranks: Ranks, qkv: Tensor, norms: QkNorms, heads: Heads) -> Tensor:
    """Apply norms that span the heads of all ranks."""
    assert norms.q is not None and norms.k is not None
    q, k, v = torch.split(qkv, [*heads.sizes], dim=-1)
    q = norm_over(ranks, q, norms.q, heads.norm_eps)
    return torch.cat((q, norm_over(ranks, k, norms.k, heads.norm_eps), v), dim=-1)


def _shard_heads(heads: Heads, size: int) -> Heads:
    kv = heads.num_kv_heads
    if heads.mla is None and kv % size and size % kv:
        raise ConfigError(
            f"{FLAG}={size}: {kv} KV heads can be neither split evenly over the ranks nor each "
            f"shared by the same number of ranks; choose a divisor or a multiple of {kv}"
        )
    num = split_evenly(heads.num_heads, "num_attention_heads", size)
    return replace(heads, num_heads=num, num_kv_heads=max(1, kv // size))
