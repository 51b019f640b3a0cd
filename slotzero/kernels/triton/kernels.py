"""CUDA's kernel set: Triton for everything but products over many rows, which are cuBLAS's.

Nothing here reads device memory from the host, so a whole step can be captured.
"""

import functools
from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import torch
from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.contract import Kernels
from slotzero.kernels.triton import embed
from slotzero.kernels.triton.attention import (
    decode,
    decode_stream_k,
    mla,
    mla_plan,
    prefill,
    verify,
)
from slotzero.kernels.triton.kernels_recurrent import TritonRecurrent
from slotzero.kernels.triton.kernels_speculation import TritonSpeculation
from slotzero.kernels.triton.launch import INTERPRETED, card_name, compiling_ahead, is_compiling
from slotzero.kernels.triton.linear import elementwise, linear_tma
from slotzero.kernels.triton.linear import linear as few
from slotzero.kernels.triton.linear.elementwise import applied
from slotzero.kernels.triton.linear.tiles import (
    LIBRARY,
    MAX_ROWS,
    STAGED_ROWS,
    Cublas,
    Tile,
    Way,
    padded_rows,
    ways_for,
)
from slotzero.kernels.triton.linear.tune import Choices
from slotzero.kernels.triton.moe import experts, routing
from slotzero.kernels.triton.sampling.sample import sample
from slotzero.kernels.triton.write_back import advance
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
from slotzero.sampling.tables import Sampled, SamplingTables

MAX_DIM = 512  # what the tiles of attention hold
MAX_GROUP, MAX_LARGE_GROUP = 128, 16  # query heads of a KV head; of heads above 256
DECODE, LINE = len(decode.Shares._fields), len(decode_stream_k.Line._fields)
VERIFY, PREFILL = verify.PLANNED, 3 + len(Branches._fields)
"""Tensors of a plan: a layer is given no more than them, so their number says whose it is."""
assert len({DECODE, LINE, VERIFY, PREFILL}) == 4
T = TypeVar("T")


class TritonKernels(TritonSpeculation, TritonRecurrent, Kernels):
    name = "triton"

    def __init__(self) -> None:
        self.choices = Choices()

    def refuse(self, heads: Heads) -> None:
        is_large = max(heads.head_dim, heads.value_dim) > 256
        group = heads.num_heads // heads.num_kv_heads
        limits: tuple[tuple[str, int, int], ...] = (
            ("head_dim", heads.head_dim, MAX_DIM),
            ("value_dim", heads.value_dim, MAX_DIM),
            ("query heads for each KV head", group, MAX_LARGE_GROUP if is_large else MAX_GROUP),
        )
        if heads.latent is not None:
            limits = mla.limits(heads.value_dim, heads.latent)
            for name, given in (("window", heads.window), ("softcap", heads.softcap)):
                if given is not None:
                    raise UnsupportedModelError(
                        f"{name}: {given}, and the attention kernels for CUDA have none for latent "
                        "heads; run the model with --backend cpu"
                    )
        for name, value, most in limits:
            if value > most:
                raise UnsupportedModelError(
                    f"{name}: {value}, and the attention kernels for CUDA hold at most {most}; "
                    "run the model with --backend cpu"
                )

    def held(self) -> Mapping[str, Tensor]:
        return {"arrivals": linear_tma.arrivals()}

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (out_features, in_features)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def prepare(self, rehearse: Callable[[], None]) -> None:
        with compiling_ahead():
            rehearse()

    def decode_positions(
        self, slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
    ) -> None:
        embed.decode_positions(slots, length, token_slots, positions, after)

    def plan(
        self,
        tokens: Tokens,
        rows: Rows | None,
        heads: Heads,
        branches: Branches | None = None,
    ) -> Plan:
        if branches is not None:
            branches.check(tokens, rows)
        if heads.latent is not None:
            return mla_plan.plan(tokens, rows, heads, branches)
        if rows is None and decode_stream_k.takes(len(tokens.slots), heads):
            return decode_stream_k.plan(*tokens, heads)
        if rows is None:
            return decode.plan(*tokens, heads)
        if verify.takes(rows.span, heads):
            return verify.plan(tokens.slots, rows, heads, branches)
        group = heads.num_heads // heads.num_kv_heads
        (blocks,) = prefill.plan(
            rows.slots, rows.counts, rows.ends, rows.starts, len(tokens.slots), group
        )
        return *tokens, blocks, *(branches or NO_BRANCHES)

    def rope_angles(self, tokens: Tokens, frequency: Tensor, factor: float) -> Angles:
        return embed.rope_angles(tokens.positions, frequency, factor)

    def embed(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: Tensor,
        scale: float,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        late = _is_late(len(tokens.slots), embedding.dtype)
        return embed.open_step(tokens, table, embedding, scale, norm, eps, late)

    def embedded(self, ids: Tensor, weight: Tensor) -> Tensor:
        return weight[ids]

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
        return embed.embed_pair(tokens, table, embedding, embed_norm, hidden, hidden_norm, eps)

    def norm(self, x: Tensor, weight: Tensor | None, eps: float) -> Normed:
        if weight is None:
            return Normed(x, None)
        return elementwise.norm(x, weight, eps, late=_is_late(len(x), x.dtype))

    def apply_norm(self, x: Normed, eps: float) -> Tensor:
        return applied(x, eps)

    def linear(
        self, x: Normed, eps: float, weight: Tensor, bias: Tensor | None, out_features: int
    ) -> Tensor:
        out = x.x.new_empty(len(x.x), out_features)

        def run(way: Way, weight: Tensor) -> Tensor:
            if isinstance(way, Cublas):
                return _product(applied(x, eps), weight, bias, out)
            return few.linear(x, eps, weight, bias, out, way)

        return self._run("linear", x.x, weight, run)

    def logits(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        slots: Tensor,
        softcap: float | None,
        out: Tensor,
    ) -> None:
        def run(way: Way, weight: Tensor) -> Tensor:
            if isinstance(way, Cublas):
                rows = applied(x, eps).masked_fill((slots == 0)[:, None], 0)
                return _product(rows, weight, None, out)
            return few.linear(x, eps, weight, None, out, way, slots=slots)

        self._run("logits", x.x, weight, run)
        if softcap is not None:
            elementwise.cap(out, softcap)

    def linear_gated(
        self,
        x: Normed,
        eps: float,
        weight: Tensor,
        bias: Tensor | None,
        out_features: int,
        activation: Activation,
    ) -> Tensor:
        def run(way: Way, weight: Tensor) -> Tensor:
            if isinstance(way, Cublas):
                joined = x.x.new_empty(len(x.x), 2 * out_features)
                _product(applied(x, eps), weight, bias, joined)
                gates, values = joined.chunk(2, -1)
                return elementwise.gated(gates, values, activation)
            out = x.x.new_empty(len(x.x), out_features)
            return few.linear(x, eps, weight, bias, out, way, activation=activation)

        return self._run("gated", x.x, weight, run)

    def gate(self, gates: Tensor, values: Tensor, activation: Activation) -> Tensor:
        return elementwise.gated(gates, values, activation)

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
        if after is not None or norm is None:  # no program of a product sees the row that it makes
            change = self.linear(Normed(x, None), eps, weight, bias, residual.shape[1])
            return self.add_norm(change, residual, after, norm, eps)

        def run(way: Way, weight: Tensor) -> Normed:
            if isinstance(way, Tile):
                return few.linear_add(x, weight, bias, residual, norm, way)
            if way.shares > 1:
                delta = _in_shares(x, weight, bias, way.shares)
            elif bias is None:
                return self.norm(residual.addmm_(x, weight.t()), norm, eps)
            else:
                delta = _product(x, weight, bias, torch.empty_like(residual))
            late = _is_late(len(x), x.dtype)
            return elementwise.add_norm(residual, delta, None, norm, eps, late)

        return residual, self._run("add", x, weight, run, changes=residual)

    def add_norm(
        self,
        x: Tensor,
        residual: Tensor,
        after: Tensor | None,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        late = _is_late(len(x), x.dtype)
        return residual, elementwise.add_norm(residual, x, after, norm, eps, late)

    def choose(
        self,
        x: Normed,
        eps: float,
        slots: Tensor,
        weights: ExpertWeights,
        shape: Experts,
        by: Normed | None = None,
    ) -> Chosen:
        rows = applied(x, eps)
        scores = self.linear(
            by or Normed(rows, None), eps, weights.router, weights.router_bias, shape.num_experts
        )
        return Chosen(rows, *routing.route(scores, slots, weights, shape))

    def experts(
        self, chosen: Chosen, weights: ExpertWeights, shape: Experts, starts: Tensor
    ) -> Tensor:
        rows, share, which = (part.contiguous() for part in chosen)
        order = experts.sort(which, starts, rows.dtype)
        inner = experts.gated(rows, weights.gate_up, weights.gate_up_bias, order, shape.activation)
        results = experts.product(inner, weights.down, weights.down_bias, order)
        return experts.add_up(results, share, which, len(starts) - 1)

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
        if heads.norms_whole:
            joined = elementwise.norm_heads(joined, q_norm, k_norm, heads)
            q_norm = k_norm = None
        if len(plan) == DECODE:
            shares = decode.Shares(*cast("tuple[Tensor, ...]", plan))
            return decode.attend(
                joined, q_norm, k_norm, sinks, angles, kv_pages, page_table, shares, heads
            )
        if len(plan) == LINE:
            whole = decode_stream_k.Line(*cast("tuple[Tensor, ...]", plan))
            return decode_stream_k.attend(
                joined, q_norm, k_norm, sinks, angles, kv_pages, page_table, whole, heads
            )
        if len(plan) == VERIFY:
            return verify.attend(
                joined, q_norm, k_norm, sinks, angles, kv_pages, page_table, plan, heads
            )
        slots, positions, blocks, *tree = plan
        assert slots is not None and positions is not None and blocks is not None
        q = prefill.rope_store(
            joined, q_norm, k_norm, angles, kv_pages, page_table, slots, positions, heads
        )
        attended = prefill.attend(q, sinks, kv_pages, page_table, slots, blocks, heads, tree)
        return attended.flatten(1)

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
        work = mla_plan.Work(*cast("tuple[Tensor, ...]", plan))
        return mla.attention(q, k, k_norm, up_k, up_v, angles, kv_pages, page_table, work, heads)

    def sample(
        self,
        logits: Tensor,
        slots: Tensor,
        positions: Tensor,
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        sample(logits, slots, positions, tables, out)

    def advance(
        self,
        slots: Tensor,
        new_length: Tensor,
        target: Tensor,
        length: Tensor,
        tokens: Tensor,
        sampled: Tensor,
    ) -> None:
        advance(slots, new_length, target, length, tokens, sampled)

    def key(self, kind: str, out_features: int, in_features: int, rows: int) -> str:
        """Of a choice: what may make another tile the fastest."""
        return f"{card_name()}/{kind}/{out_features}x{in_features}/{padded_rows(rows)}"

    def _run(
        self,
        kind: str,
        x: Tensor,
        weight: Tensor,
        run: Callable[[Way, Tensor], T],
        changes: Tensor | None = None,
    ) -> T:
        """The way that is the fastest: by our own kernel, or by cuBLAS.

        `changes` is what a run reads and writes, to be put back after a trial.
        """
        rows, (out_features, in_features) = len(x), weight.shape
        if not _is_few(rows, x.dtype):
            return run(LIBRARY, weight)
        ways = _named_ways(rows, in_features, kind, linear_tma.takes(x, weight))
        if INTERPRETED:  # there is no library
            return run(next((w for w in ways.values() if isinstance(w, Tile)), LIBRARY), weight)
        key = self.key(kind, out_features, in_features, rows)
        name = self.choices.known(key, tuple(ways))
        likely = self.choices.likely(key, tuple(ways)) if name is None else [name]
        if is_compiling():
            return [run(ways[each], weight) for each in likely][-1]
        name = likely[0]
        if len(likely) > 1:
            before = None if changes is None else changes.clone()
            name = self.choices.find(key, likely, weight, lambda name, w: run(ways[name], w))
            if changes is not None and before is not None:
                changes.copy_(before)
        return run(ways[name], weight)


@functools.cache
def _named_ways(rows: int, inner: int, kind: str, in_bulk: bool) -> dict[str, Way]:
    ways = ways_for(rows, inner, kind)
    return {str(way): way for way in ways if in_bulk or isinstance(way, Cublas) or not way.rows}


def _is_few(rows: int, dtype: torch.dtype) -> bool:
    """Whether rows may be multiplied by our kernels.

    They may come under a late norm, which multiplies rows that were not scaled yet: bfloat16 holds
    them, float16 may not.
    """
    return rows <= MAX_ROWS and dtype is torch.bfloat16


def _is_late(rows: int, dtype: torch.dtype) -> bool:
    """Whether what norms rows leaves the scaling to a product: cuBLAS, which more rows may be given
    to, does not do it."""
    return rows <= STAGED_ROWS and dtype is torch.bfloat16


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if out.dtype is not x.dtype:  # logits
        return torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def _in_shares(x: Tensor, weight: Tensor, bias: Tensor | None, shares: int) -> Tensor:
    """[shares, rows, features] in float32, to be added up"""
    share = weight.shape[1] // shares
    parts = x.view(len(x), shares, share).transpose(0, 1)
    weights = weight.view(len(weight), shares, share).permute(1, 2, 0)
    made = torch.bmm(parts, weights, out_dtype=torch.float32)
    if bias is not None:
        made[0].add_(bias)
    return made
