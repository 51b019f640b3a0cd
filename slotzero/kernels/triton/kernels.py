"""The CUDA kernel set: Triton for everything except products over many rows, which use cuBLAS.

Nothing here reads device memory from the host, so a whole step can be captured.
"""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.attention_plans import (
    AttentionPlan,
    DecodePlan,
    PrefillPlan,
    StreamKPlan,
    VerifyPlan,
)
from slotzero.kernels.contract import Kernels
from slotzero.kernels.quantized import QuantizedRows, pack_rows
from slotzero.kernels.triton import embed, write_back
from slotzero.kernels.triton.attention import (
    decode,
    decode_stream_k,
    mla,
    mla_plan,
    prefill,
    verify,
)
from slotzero.kernels.triton.attention.rotate_heads import rotate_heads
from slotzero.kernels.triton.launch import INTERPRETED, compiling_ahead
from slotzero.kernels.triton.linear import elementwise, fragments, linear_quantized, linear_tma
from slotzero.kernels.triton.linear.elementwise import apply_norm
from slotzero.kernels.triton.linear.products import Products
from slotzero.kernels.triton.linear.products_tuned import TunedProducts
from slotzero.kernels.triton.linear.tune import Choices
from slotzero.kernels.triton.moe import experts, routing
from slotzero.kernels.triton.recurrent import convolution, scan, trail
from slotzero.kernels.triton.recurrent import gate as recurrent_gate
from slotzero.kernels.triton.sampling import sample
from slotzero.kernels.triton.speculation import speculation, trees
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
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, ScanWeights
from slotzero.kernels.weights import DenseWeight, LinearWeight, QuantizedWeight, WeightFormat

MAX_DIM = 512  # largest head that the attention tiles hold
MAX_GROUP, MAX_LARGE_GROUP = 128, 16  # query heads per KV head; for head sizes above 256
NO_NORMS = QkNorms(None, None)
T = TypeVar("T")


class TritonKernels(Kernels):
    """The default kernel set. deterministic.py replaces those of its operations that sum in an
    order which depends on the step."""

    name = "triton"

    rope_angles = staticmethod(embed.rope_angles)
    apply_norm = staticmethod(elementwise.apply_norm)
    rotate_heads = staticmethod(rotate_heads)
    gate = staticmethod(elementwise.gate)

    decode_positions = staticmethod(embed.decode_positions)
    sample = staticmethod(sample.sample)
    advance = staticmethod(write_back.advance)

    gate_norm = staticmethod(recurrent_gate.gate_norm)
    commit_trail = staticmethod(trail.commit_trail)

    locate_drafts = staticmethod(speculation.locate_drafts)
    locate_confirmed = staticmethod(speculation.locate_confirmed)
    accept = staticmethod(speculation.accept)
    store_features = staticmethod(speculation.store_features)
    store_last = staticmethod(speculation.store_last)
    store_next = staticmethod(speculation.store_next)
    set_drafter_len = staticmethod(speculation.set_drafter_len)
    load_features = staticmethod(speculation.load_features)
    draft_budget = staticmethod(speculation.draft_budget)
    draft_targets = staticmethod(speculation.draft_targets)
    store_drafts = staticmethod(speculation.store_drafts)
    propose_ngrams = staticmethod(speculation.propose_ngrams)
    set_num_drafts = staticmethod(speculation.set_num_drafts)
    expand_draft_vocab = staticmethod(speculation.expand_draft_vocab)
    tree_branches = staticmethod(trees.tree_branches)
    accept_tree = staticmethod(trees.accept_tree)
    move_kv = staticmethod(trees.move_kv)
    grow_tree = staticmethod(trees.grow_tree)
    select_nodes = staticmethod(trees.select_nodes)

    def __init__(self, products: Products | None = None) -> None:
        self._products = products or TunedProducts()

    @property
    def choices(self) -> Choices:
        """Return the tuned choices of matrix products."""
        return self._products.choices

    @property
    def has_float8_kv(self) -> bool:
        return INTERPRETED or torch.cuda.get_device_capability() >= (8, 9)

    def refuse(self, heads: Heads, float8_kv: bool = False) -> None:
        is_large = max(heads.head_dim, heads.value_dim) > 256
        group = heads.num_heads // heads.num_kv_heads
        limits: tuple[tuple[str, int, int], ...] = (
            ("head_dim", heads.head_dim, MAX_DIM),
            ("value_dim", heads.value_dim, MAX_DIM),
            ("query heads for each KV head", group, MAX_LARGE_GROUP if is_large else MAX_GROUP),
        )
        if heads.mla is not None and heads.mla.index is not None:
            raise UnsupportedModelError(
                f"index_topk: {heads.mla.index.top_k}, and there are no attention kernels for CUDA "
                "that read only the keys that an indexer selects; run the model with --backend cpu"
            )
        if heads.mla is not None:
            limits = mla.limits(heads.value_dim, heads.mla)
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
        if float8_kv and heads.value_dim % 2:
            raise UnsupportedModelError(
                f"value_dim: {heads.value_dim}, and the attention kernels for CUDA read an FP8 KV "
                "cache in pairs of values; drop --kv-cache-dtype"
            )

    def workspace(self) -> Mapping[str, Tensor]:
        return {"arrivals": linear_tma.arrivals()}

    def packed_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        return (out_features, in_features)

    def pack(self, weight: Tensor) -> Tensor:
        return weight

    def quantized_shapes(
        self, out_features: int, in_features: int, format: WeightFormat
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        if fragments.takes(format):
            return fragments.shapes(out_features, in_features, format)
        return format.shapes(out_features, in_features)

    def pack_quantized(self, rows: QuantizedRows, format: WeightFormat) -> dict[str, Tensor]:
        return fragments.pack(rows, format) if fragments.takes(format) else pack_rows(rows, format)

    def prepare(self, rehearse: Callable[[], None]) -> None:
        with compiling_ahead():
            rehearse()

    def plan(
        self,
        tokens: Tokens,
        rows: Rows | None,
        heads: Heads,
        branches: Branches | None = None,
    ) -> AttentionPlan:
        if branches is not None:
            branches.check(tokens, rows)
        if heads.mla is not None:
            return mla_plan.plan(tokens, rows, heads, branches)
        if rows is None and decode_stream_k.takes(len(tokens.slots), heads):
            return decode_stream_k.plan(*tokens, heads)
        if rows is None:
            return decode.plan(*tokens, heads)
        if verify.takes(rows.span, heads):
            return verify.plan(tokens.slots, rows, heads, branches)
        group = heads.num_heads // heads.num_kv_heads
        blocks = prefill.cut_rows(rows, len(tokens.slots), prefill.block_tokens(group))
        return PrefillPlan(tokens, blocks, branches)

    def embed(
        self,
        tokens: Tokens,
        table: Tensor,
        embedding: LinearWeight,
        scale: float,
        norm: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Normed]:
        if isinstance(embedding, DenseWeight):
            late = self._products.is_late(len(tokens.slots), embedding.data.dtype)
            return embed.embed(tokens, table, embedding.data, scale, norm, eps, late)
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
        if isinstance(embedding, DenseWeight):
            return embed.embed_pair(tokens, table, embedding, hidden, norms)
        _, embedded = self.embed(tokens, table, embedding, 1.0, norms.embed, norms.eps)
        beside = self.norm(hidden, norms.hidden, norms.eps)
        return torch.cat((apply_norm(embedded), apply_norm(beside)), dim=-1)

    def embed_ids(self, ids: Tensor, weight: LinearWeight) -> Tensor:
        if isinstance(weight, DenseWeight):
            return weight.data[ids]
        assert isinstance(weight, QuantizedWeight)
        return linear_quantized.unpack(weight, weight.dtype, ids)

    def norm(
        self, x: Tensor, weight: Tensor | None, eps: float, is_centred: bool = False
    ) -> Normed:
        if weight is None:
            return Normed(x)
        return elementwise.norm(x, weight, eps, self._products.is_late(len(x), x.dtype), is_centred)

    def linear(self, x: Normed, weight: LinearWeight) -> Tensor:
        out = x.x.new_empty(len(x.x), weight.out_features)
        self._products.product(x, weight, out)
        return out

    def logits(
        self, x: Normed, weight: LinearWeight, slots: Tensor, softcap: float | None, out: Tensor
    ) -> None:
        self._products.product(x, weight, out, slots)
        if softcap is not None:
            elementwise.cap(out, softcap)

    def linear_gated(self, x: Normed, weight: LinearWeight, activation: Activation) -> Normed:
        return self._products.gated(x, weight, activation)

    def linear_add_norm(
        self, x: Normed, weight: LinearWeight, residual: Tensor, norms: ResidualNorms
    ) -> tuple[Tensor, Normed]:
        # no program of a product sees a whole row, so the norm of the sum is deferred
        is_fused = norms.post is None and norms.next is not None and not norms.is_centred
        if is_fused and self._products.adds(weight, x.x):
            return residual, self._products.add(x, weight, residual, norms)
        return self.add_norm(self.linear(x, weight), residual, norms)

    def add_norm(self, x: Tensor, residual: Tensor, norms: ResidualNorms) -> tuple[Tensor, Normed]:
        late = self._products.is_late(len(x), x.dtype)
        return residual, elementwise.add_norm(residual, x, norms, late)

    def route(
        self,
        x: Normed,
        slots: Tensor,
        weights: ExpertWeights,
        shape: Experts,
        by: Normed | None = None,
    ) -> Routed:
        rows = apply_norm(x)
        scores = self.linear(by or Normed(rows), weights.router)
        return Routed(rows, *routing.route(scores, slots, weights, shape))

    def experts(
        self, routed: Routed, weights: ExpertWeights, shape: Experts, starts: Tensor
    ) -> Tensor:
        rows, by_expert, chosen = (part.contiguous() for part in routed)
        order = experts.sort(chosen, starts, rows.dtype)
        inner = experts.gated(rows, weights.gate_up, order, shape.activation)
        results = experts.product(inner, weights.down, order)
        return experts.add_up(results, by_expert, chosen, len(starts) - 1)

    def convolve(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, step: RecurrentStep, shape: Scan
    ) -> Tensor:
        return convolution.convolve(x, weight, bias, step, shape)

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
        return mla.mla_attention(q, k, weights, angles, kv, plan, heads, index)

    def scan(
        self,
        mixed: Tensor,
        gates: Tensor,
        beta: Tensor | None,
        weights: ScanWeights,
        step: RecurrentStep,
        shape: Scan,
    ) -> Tensor:
        return scan.scan(mixed, gates, beta, weights, step, shape)

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
        if heads.norms_whole:
            qkv, norms = elementwise.norm_heads(qkv, norms, heads), NO_NORMS
        if isinstance(plan, DecodePlan):
            return decode.attend(qkv, norms, sinks, angles, kv, plan, heads)
        if isinstance(plan, StreamKPlan):
            return decode_stream_k.attend(qkv, norms, sinks, angles, kv, plan, heads)
        if isinstance(plan, VerifyPlan):
            return verify.attend(qkv, norms, sinks, angles, kv, plan, heads)
        assert isinstance(plan, PrefillPlan)
        q = prefill.rope_store(qkv, norms, angles, kv, plan.tokens, heads)
        return prefill.attend(q, sinks, kv, plan, heads).flatten(1)
