"""The decoder skeleton: every family of models/config.py is this, told apart by data.

It maps tokens that carry (slot, position) to hidden states. It does not know requests, batches or
sampling, and allocates nothing that outlives a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels
from slotzero.kernels.nouns import (
    Angles,
    Branches,
    Experts,
    ExpertWeights,
    Normed,
    Rows,
    Tokens,
    standing,
)
from slotzero.models.config import KvGroup, ModelConfig
from slotzero.models.rope import speeds
from slotzero.models.weights import DecoderWeights, LayerWeights

LAYER_WEIGHTS = [field.name for field in fields(LayerWeights) if field.name != "input_norm"]
NO_TAPS: Mapping[int, Tensor] = {}


class Batch(NamedTuple):
    """What a step computes: its tokens, and where a row may hold many of them, its rows."""

    tokens: Tokens
    ids: Tensor  # [slots + 1, max_len], by position
    prompt_len: Tensor  # [slots + 1]
    rows: Rows | None
    branches: Branches | None = None


class KvPages(NamedTuple):
    """Of one group of layers."""

    pages: Tensor  # [layers, pages, page_size, kv_heads, row_size]
    page_table: Tensor  # [slots + 1, pages_per_slot]


@dataclass(frozen=True)
class Kind:
    """Layers that differ in nothing but their weights: what is compiled once for all of them."""

    config: ModelConfig
    group: KvGroup
    experts: Experts | None
    kernels: Kernels
    reads: bool = False  # layers that own no KV

    def run(
        self,
        residual: Tensor,
        x: Tensor,
        squares: Tensor | None,
        layer_input: Tensor | None,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        kv_pages: Tensor,
        page_table: Tensor,
        qkv: Tensor,
        qkv_bias: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        q_up: Tensor | None,
        up_k: Tensor | None,
        up_v: Tensor | None,
        sinks: Tensor | None,
        out: Tensor,
        out_bias: Tensor | None,
        after_attention: Tensor | None,
        mlp_norm: Tensor | None,
        router: Tensor | None,
        router_bias: Tensor | None,
        correction: Tensor | None,
        gate_up: Tensor,
        gate_up_bias: Tensor | None,
        down: Tensor,
        down_bias: Tensor | None,
        after_mlp: Tensor | None,
        input_gate: Tensor | None,
        input_out: Tensor | None,
        after_input: Tensor | None,
        scale: Tensor | None,
        next_norm: Tensor | None,
        *plan: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The residual, and it under this layer's norm -> the same under the next one's."""
        kernels, config, eps = self.kernels, self.config, self.config.norm_eps
        heads = self.group.reader_heads if self.reads else self.group.heads
        inner = config.intermediate_size * (config.reader_width if self.reads else 1)
        mlp_next = next_norm if scale is None else None
        sizes, angles = heads.sizes, Angles(cos, sin)
        if q_up is not None:
            assert config.q_rank is not None
            sizes = config.q_rank, *sizes[1:]
        joined = kernels.linear(Normed(x, squares), eps, qkv, qkv_bias, sum(sizes))
        if up_k is None or up_v is None or k_norm is None or heads.latent is None:
            attended = kernels.attention(
                joined, q_norm, k_norm, sinks, angles, kv_pages, page_table, plan, heads
            )
        else:
            q, k = joined[:, : sizes[0]], joined[:, sizes[0] :]
            if q_up is not None:
                short = kernels.norm(q.contiguous(), q_norm, heads.norm_eps)
                q = kernels.linear(short, heads.norm_eps, q_up, None, heads.sizes[0])
            shape = heads.num_heads, -1, heads.value_dim
            attended = kernels.attention_latent(
                q, k, k_norm, up_k.view(shape), up_v.view(shape),
                angles, kv_pages, page_table, plan, heads,
            )  # fmt: skip
        residual, normed = kernels.linear_add_norm(
            attended, out, out_bias, residual, after_attention, mlp_norm, eps
        )
        if self.experts is None or router is None:
            gated = kernels.linear_gated(
                normed, eps, gate_up, gate_up_bias, inner, config.activation
            )
            residual, normed = kernels.linear_add_norm(
                gated, down, down_bias, residual, after_mlp, mlp_next, eps
            )
        else:
            weights = ExpertWeights(
                router, router_bias, correction, gate_up, gate_up_bias, down, down_bias
            )
            change = kernels.experts(normed, eps, slots, weights, self.experts)
            residual, normed = kernels.add_norm(change, residual, after_mlp, mlp_next, eps)
        if layer_input is not None and input_gate is not None and input_out is not None:
            gates = kernels.linear(normed, eps, input_gate, None, config.input_size)
            mixed = kernels.gate(gates, layer_input, config.activation)
            residual, _ = kernels.linear_add_norm(
                mixed, input_out, None, residual, after_input, None, eps
            )
        if scale is not None:
            residual = residual * scale
            normed = kernels.norm(residual, next_norm, eps)
        return residual, *normed


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        frequencies: Mapping[str, Tensor],  # by group
        kernels: Kernels,
    ) -> None:
        self.config = config
        self._weights = weights
        self._frequencies = frequencies
        self._kernels = kernels
        dtype = weights.embedding.dtype
        self._scale = float(torch.tensor(config.embedding_scale).to(dtype))
        self._input_scale = float(torch.tensor(config.input_size**0.5).to(dtype))
        norms = [*(layer.input_norm for layer in weights.layers[1:]), weights.final_norm]
        self._layers = [
            [*(getattr(layer, name) for name in LAYER_WEIGHTS), next_norm]
            for layer, next_norm in zip(weights.layers, norms, strict=True)
        ]
        kinds: dict[tuple[str, bool, bool], Kind] = {}
        self._kinds = []
        for i in range(config.num_layers):
            group, is_sparse = config.group_of(i), i in config.sparse_layers
            experts, reads = config.experts if is_sparse else None, i in group.readers
            kind = Kind(config, group, experts, kernels, reads)
            self._kinds.append(kinds.setdefault((group.name, is_sparse, reads), kind))

    def forward(
        self,
        batch: Batch,
        kv: Mapping[str, KvPages],
        pieces: Pieces,
        taps: Mapping[int, Tensor] = NO_TAPS,
    ) -> Normed:
        """-> [T, hidden] under the final norm; KV of every real token is stored on the way.

        `taps`: by layer, where to write what goes into it, [T, hidden]; one past the last layer is
        what is under the final norm.
        """
        residual, normed = self._kernels.open(
            batch.tokens, batch.ids, self._weights.embedding, self._scale,
            self._weights.layers[0].input_norm, self.config.norm_eps,
        )  # fmt: skip
        inputs = self._layer_inputs(batch, residual)
        stands = standing(batch.tokens, batch.branches)
        return self._through(residual, normed, inputs, batch, stands, kv, pieces, taps)

    def forward_from(
        self,
        begin: Tensor,  # [T, hidden], in place of embeddings
        tokens: Tokens,  # whose keys they see, those before them too
        stands: Tokens,  # where they stand
        prompt_len: Tensor,
        kv: Mapping[str, KvPages],
        pieces: Pieces,
    ) -> Normed:
        """Of layers that store nothing."""
        norm, eps = self._weights.layers[0].input_norm, self.config.norm_eps
        batch, inputs = Batch(tokens, tokens.slots, prompt_len, None), [None] * len(self._layers)
        normed = self._kernels.norm(begin, norm, eps)
        return self._through(begin, normed, inputs, batch, stands, kv, pieces, NO_TAPS)

    def _through(
        self,
        residual: Tensor,
        normed: Normed,
        inputs: Sequence[Tensor | None],
        batch: Batch,
        stands: Tokens,
        kv: Mapping[str, KvPages],
        pieces: Pieces,
        taps: Mapping[int, Tensor],
    ) -> Normed:
        kernels, config = self._kernels, self.config
        plans, angles = {}, {}
        for group in config.groups:
            plans[group.name] = kernels.plan(batch.tokens, batch.rows, group.heads, batch.branches)
            frequency = self._frequencies[group.name]
            speed = speeds(group.rope, frequency, *stands, batch.prompt_len)
            angles[group.name] = kernels.turn(stands, speed, group.rope.attention_factor)
        for i, (kind, layer) in enumerate(zip(self._kinds, self._layers, strict=True)):
            if i in taps:
                taps[i].copy_(residual)
            name = kind.group.name
            pages, page_table = kv[name].pages[kind.group.owner_of(i)], kv[name].page_table
            residual, *parts = pieces(
                kind.run, residual, *normed, inputs[i], batch.tokens.slots, *angles[name],
                pages, page_table, *layer, *plans[name],
            )  # fmt: skip
            normed = Normed(*parts)
        if len(self._layers) in taps:
            taps[len(self._layers)].copy_(kernels.settle(normed, config.norm_eps))
        return normed

    def _layer_inputs(self, batch: Batch, embedded: Tensor) -> Sequence[Tensor | None]:
        """What each layer is given of every token for itself, [T, input_size]: an embedding of its
        own, and what the layer makes of the common one."""
        kernels, config, weights = self._kernels, self.config, self._weights
        num, size = config.num_layers, config.input_size
        if weights.input_embedding is None or weights.input_projection is None:
            return [None] * num
        own, _ = kernels.open(
            batch.tokens, batch.ids, weights.input_embedding, self._input_scale, None, 0.0
        )
        made = kernels.linear(
            Normed(embedded, None), 0.0, weights.input_projection, None, num * size
        )
        # scaled by hidden_size**-0.5 before the norm: the same as a larger eps in it
        both, _ = kernels.add_norm(
            made.view(-1, size), own.view(-1, size), weights.projected_norm, None,
            config.norm_eps * config.hidden_size,
        )  # fmt: skip
        inputs = (both * 0.5**0.5).view(-1, num, size).transpose(0, 1).contiguous()
        return [inputs[i] for i in range(num)]

    def new_hidden(self, num_tokens: int, num_states: int) -> Tensor:
        """Room for so many hidden states of every token, side by side."""
        return self._weights.final_norm.new_empty(num_tokens, num_states * self.config.hidden_size)

    def logits(self, normed: Normed, slots: Tensor, out: Tensor) -> None:
        """[rows, hidden] -> [rows, vocab]; zeros for rows of slot 0"""
        config = self.config
        self._kernels.logits(
            normed, config.norm_eps, self._weights.head, slots, config.final_softcap, out
        )
