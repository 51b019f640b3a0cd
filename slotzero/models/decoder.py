"""The decoder skeleton: every family of models/config.py is this, told apart by data.

It maps tokens that carry (slot, position) to hidden states. It does not know requests, batches or
sampling, and allocates nothing that outlives a step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks, norm_over
from slotzero.graph import Pieces
from slotzero.kernels.attention_plans import AttentionPlan
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import (
    Angles,
    Branches,
    Experts,
    ExpertWeights,
    Heads,
    LinearWeight,
    MlaWeights,
    Normed,
    PagedKv,
    QkNorms,
    ResidualNorms,
    Rows,
    Tokens,
    standing,
)
from slotzero.kernels.types_recurrent import Scan, States, Trail
from slotzero.models.config import KvGroup, ModelConfig
from slotzero.models.given import Given
from slotzero.models.mixer import mix
from slotzero.models.recurrent import Recurrent
from slotzero.models.rope import speeds
from slotzero.models.routing import Routing
from slotzero.models.spread import experts_over
from slotzero.models.vocabulary import Vocabulary
from slotzero.models.weights import DecoderWeights, LayerWeights

LAYER_WEIGHTS = [field.name for field in fields(LayerWeights) if field.name != "input_norm"]
NUM_GIVEN = len(Given._fields)
NUM_TENSORS = NUM_GIVEN + len(LAYER_WEIGHTS)
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


class Memory(NamedTuple):
    """What layers remember of tokens before."""

    kv: Mapping[str, KvPages]  # by group
    states: States | None = None  # stacked
    trail: Trail | None = None

    def of_layer(self, index: int) -> tuple[States, Trail | None]:
        """Of a recurrent one"""
        assert self.states is not None
        states = self.states
        states = states._replace(conv=states.conv[index], scan=states.scan[index])
        if states.conv_kept is not None and states.scan_kept is not None:
            kept = states.conv_kept[index], states.scan_kept[index]
            states = states._replace(conv_kept=kept[0], scan_kept=kept[1])
        if self.trail is None:
            return states, None
        return states, Trail(*(part[:, :, index] for part in self.trail))


@dataclass(frozen=True)
class Kind:
    """Layers that differ in nothing but their weights: what is compiled once for all of them."""

    config: ModelConfig
    group: KvGroup | None  # None: they do not attend
    experts: Experts | None
    kernels: Kernels
    reads: bool = False  # layers that own no KV
    ranks: Ranks = ALONE  # of which each has a part of every layer
    recurrent: Recurrent | None = None
    has_mlp: bool = True

    def run(self, *given: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """What `Given` holds, a layer's weights, the next one's norm, and the plan of attention ->
        the residual, and it under the next layer's norm."""
        inputs = Given._make(given[:NUM_GIVEN])
        weights, (next_norm, plan) = given[NUM_GIVEN:NUM_TENSORS], given[NUM_TENSORS:]
        layer = LayerWeights(None, *weights)
        eps, residual, ranks = self.config.norm_eps, inputs.residual, self.ranks.attention
        normed = Normed(inputs.x, inputs.squares, eps)
        last = next_norm if layer.scale is None else None
        mixed = []
        if self.group is not None:
            attended = self._attend(normed, inputs, layer, self.group, plan)
            mixed.append((attended, layer.out, layer.out_bias))
        if self.recurrent is not None:
            scanned = mix(self.kernels, ranks, normed, inputs, layer, self.recurrent)
            mixed.append((scanned, layer.scan_out, layer.scan_out_bias))
        for x, out, bias in mixed:
            assert out is not None
            is_last = x is mixed[-1][0]
            norm = (layer.mlp_norm if self.has_mlp else last) if is_last else None
            after = layer.after_attention if is_last else None
            weight = LinearWeight(out, bias, self.config.hidden_size)
            norms = ResidualNorms(after, norm, eps)
            residual, normed = self._add(ranks, x, weight, residual, norms)
        if self.has_mlp:
            residual, normed = self._change(residual, normed, inputs, layer, last)
        if layer.input_gate is not None:
            residual = self._mix_input(residual, normed, inputs.layer_input, layer)
        if layer.scale is not None:
            residual = residual * layer.scale
            normed = self.kernels.norm(residual, next_norm, eps)
        return residual, normed.x, normed.squares

    def _attend(
        self,
        normed: Normed,
        inputs: Given,
        layer: LayerWeights,
        group: KvGroup,
        plan: AttentionPlan,
    ) -> Tensor:
        kernels, config = self.kernels, self.config
        heads = group.reader_heads if self.reads else group.heads
        kv_pages, page_table = inputs.kv_pages, inputs.page_table
        assert inputs.cos is not None and inputs.sin is not None and layer.qkv is not None
        assert kv_pages is not None and page_table is not None
        kv = PagedKv(kv_pages, page_table)
        sizes, angles = heads.sizes, Angles(inputs.cos, inputs.sin)
        q_norm, k_norm, up_k, up_v = layer.q_norm, layer.k_norm, layer.up_k, layer.up_v
        if layer.q_up is not None:
            assert config.q_rank is not None
            sizes = config.q_rank, *sizes[1:]
        joined = kernels.linear(normed, LinearWeight(layer.qkv, layer.qkv_bias, sum(sizes)))
        if heads.norms_whole and self.ranks.attention.is_distributed:
            joined = self._norm_whole(joined, q_norm, k_norm, heads)
            heads, q_norm, k_norm = replace(heads, norms_whole=False), None, None
        if up_k is None or up_v is None or k_norm is None or heads.mla is None:
            attended = kernels.attention(
                joined, QkNorms(q_norm, k_norm), layer.sinks, angles, kv, plan, heads
            )
            if layer.out_gate is None:
                return attended
            out_gate = LinearWeight(layer.out_gate, layer.out_gate_bias, heads.out_size)
            gates = kernels.linear(normed, out_gate)
            return kernels.gate(gates, attended, "sigmoid")
        q, k = joined[:, : sizes[0]], joined[:, sizes[0] :]
        if layer.q_up is not None:
            short = kernels.norm(q, q_norm, heads.norm_eps)
            q = kernels.linear(short, LinearWeight(layer.q_up, None, heads.sizes[0]))
        shape = heads.num_heads, -1, heads.value_dim
        weights = MlaWeights(k_norm, up_k.view(shape), up_v.view(shape))
        return kernels.mla_attention(q, k, weights, angles, kv, plan, heads)

    def _change(
        self,
        residual: Tensor,
        normed: Normed,
        inputs: Given,
        layer: LayerWeights,
        norm: Tensor | None,
    ) -> tuple[Tensor, Normed]:
        """The MLP, experts, or both side by side, to the residual."""
        kernels, config, eps = self.kernels, self.config, self.config.norm_eps
        hidden, norms = config.hidden_size, ResidualNorms(layer.after_mlp, norm, eps)
        inner = config.intermediate_size * (config.reader_width if self.reads else 1)
        assert layer.gate_up is not None and layer.down is not None
        down = LinearWeight(layer.down, layer.down_bias, hidden)
        if self.experts is None or layer.router is None:
            gated = self._inner(self._of_all(normed), layer.gate_up, layer.gate_up_bias, inner)
            return self._add(self.ranks, gated, down, residual, norms)
        weights = ExpertWeights(
            LinearWeight(layer.router, layer.router_bias, self.experts.num_experts),
            layer.correction,
            LinearWeight(layer.gate_up, layer.gate_up_bias, 2 * self.experts.inner_size),
            down,
            layer.factors,
        )
        slots, starts = inputs.slots, inputs.expert_starts
        assert starts is not None
        if layer.dense_gate_up is None or layer.dense_down is None:
            change = self._experts(normed, slots, weights, self.experts, starts)
            return kernels.add_norm(change, residual, norms)
        by = None
        if layer.expert_norm is None:
            x = normed = Normed(kernels.apply_norm(normed))  # once, for all who read it
        else:
            x = kernels.norm(residual, layer.expert_norm, eps)
            by = kernels.norm(residual, layer.router_norm, eps)
        size = config.shared_expert_size or inner
        dense = self._dense(normed, layer.dense_gate_up, layer.dense_down, size)
        if layer.dense_gate is not None:
            gate = kernels.linear(normed, LinearWeight(layer.dense_gate, None, 1))
            dense = kernels.gate(gate.expand_as(dense), dense, "sigmoid")
        mixed = self._experts(x, slots, weights, self.experts, starts, by)
        change = kernels.apply_norm(kernels.norm(dense, layer.after_dense, eps))
        change = change + kernels.apply_norm(kernels.norm(mixed, layer.after_experts, eps))
        return kernels.add_norm(change, residual, norms)

    def _inner(self, x: Normed, gate_up: Tensor, bias: Tensor | None, inner: int) -> Tensor:
        """What an MLP makes of its rows before it brings them down."""
        kernels, config = self.kernels, self.config
        if config.gates_mlp:
            weight = LinearWeight(gate_up, bias, 2 * inner)
            return kernels.linear_gated(x, weight, config.activation)
        up = kernels.linear(x, LinearWeight(gate_up, bias, inner))
        return kernels.gate(up, up, config.activation)

    def _mix_input(
        self, residual: Tensor, normed: Normed, layer_input: Tensor | None, layer: LayerWeights
    ) -> Tensor:
        kernels, config, eps = self.kernels, self.config, self.config.norm_eps
        assert layer_input is not None
        assert layer.input_gate is not None and layer.input_out is not None
        gates = kernels.linear(normed, LinearWeight(layer.input_gate, None, config.input_size))
        mixed = kernels.gate(gates, layer_input, config.activation)
        residual, _ = kernels.linear_add_norm(
            mixed,
            LinearWeight(layer.input_out, None, config.hidden_size),
            residual,
            ResidualNorms(layer.after_input, None, eps),
        )
        return residual

    def _add(
        self,
        ranks: Ranks,  # that have a part of the weight each
        x: Tensor,
        weight: LinearWeight,
        residual: Tensor,
        norms: ResidualNorms,
    ) -> tuple[Tensor, Normed]:
        """x times a packed weight, of whose columns and x's each rank has some, to the residual."""
        kernels = self.kernels
        if not ranks.is_distributed:
            return kernels.linear_add_norm(x, weight, residual, norms)
        part = kernels.linear(Normed(x), weight)
        return kernels.add_norm(_summed(ranks, part), residual, norms)

    def _dense(self, x: Normed, gate_up: Tensor, down: Tensor, inner: int) -> Tensor:
        """A whole MLP, of which each rank has a part -> [T, hidden]"""
        kernels, config = self.kernels, self.config
        gated = self._inner(self._of_all(x), gate_up, None, inner)
        part = kernels.linear(Normed(gated), LinearWeight(down, None, config.hidden_size))
        return _summed(self.ranks, part)

    def _of_all(self, x: Normed) -> Normed:
        """With the rows of the other ranks, where each has its own."""
        if not self.ranks.dp_attention:
            return x
        return Normed(self.ranks.gather(self.kernels.apply_norm(x)))

    def _experts(
        self,
        x: Normed,
        slots: Tensor,
        weights: ExpertWeights,
        shape: Experts,
        starts: Tensor,
        by: Normed | None = None,
    ) -> Tensor:
        kernels, ranks = self.kernels, self.ranks
        if ranks.expert_parallel:
            return experts_over(ranks, kernels, x, by or x, slots, weights, shape, starts)
        if ranks.dp_attention:
            x, by, slots = self._of_all(x), by and self._of_all(by), ranks.gather(slots)
        routed = kernels.route(x, slots, weights, shape, by)
        return _summed(ranks, kernels.experts(routed, weights, shape, starts))

    def _norm_whole(
        self, joined: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, heads: Heads
    ) -> Tensor:
        """Over the heads of all ranks"""
        q, k, v = torch.split(joined, [*heads.sizes], dim=-1)
        assert q_norm is not None and k_norm is not None
        q = norm_over(self.ranks, q, q_norm, heads.norm_eps)
        return torch.cat((q, norm_over(self.ranks, k, k_norm, heads.norm_eps), v), dim=-1)


def _summed(ranks: Ranks, part: Tensor) -> Tensor:
    """Of all ranks; where each has its own rows, part has those of all, and these come back."""
    return ranks.scatter_sum(part) if ranks.dp_attention else ranks.sum(part)


class Decoder:
    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        frequencies: Mapping[str, Tensor],  # by group
        kernels: Kernels,
        routing: Routing | None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`config` is of the rank's part, see models/shards.py."""
        self.config = config
        self.vocabulary = Vocabulary(
            config.vocab_size, weights.embedding, weights.head, kernels, ranks
        )
        self.writes = () if routing is None else (routing.name,)
        """Outputs of every forward pass."""
        self._expert_starts = None if routing is None else routing.starts
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
        kinds: dict[Kind, Kind] = {}
        self._kinds = []
        for i in range(config.num_layers):
            group, recurrent = config.group_of(i), config.recurrent
            kind = Kind(
                config,
                group,
                config.experts if i in config.sparse_layers else None,
                kernels,
                group is not None and i in group.readers,
                ranks,
                recurrent if recurrent is not None and i in recurrent.layers else None,
                config.has_mlp(i),
            )
            self._kinds.append(kinds.setdefault(kind, kind))

    def forward(
        self,
        batch: Batch,
        kv: Mapping[str, KvPages],
        pieces: Pieces,
        taps: Mapping[int, Tensor] = NO_TAPS,
        states: States | None = None,
        trail: Trail | None = None,
    ) -> Normed:
        """-> [T, hidden] under the final norm; KV of every real token is stored on the way, and
        states, both of them stacked, change; or they are left in the trail.

        `taps`: by layer, where to write what goes into it, [T, hidden]; one past the last layer is
        what is under the final norm.
        """
        residual, normed = self.vocabulary.embed(
            batch.tokens, batch.ids, self._scale, self._weights.layers[0].input_norm,
            self.config.norm_eps,
        )  # fmt: skip
        inputs = self._layer_inputs(batch, residual)
        stands = standing(batch.tokens, batch.branches)
        memory = Memory(kv, states, trail)
        return self._through(residual, normed, inputs, batch, stands, memory, pieces, taps)

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
        return self._through(begin, normed, inputs, batch, stands, Memory(kv), pieces, NO_TAPS)

    def _through(
        self,
        residual: Tensor,
        normed: Normed,
        inputs: Sequence[Tensor | None],
        batch: Batch,
        stands: Tokens,
        memory: Memory,
        pieces: Pieces,
        taps: Mapping[int, Tensor],
    ) -> Normed:
        kernels, config = self._kernels, self.config
        plans, angles = {}, {}
        for group in config.groups:
            plans[group.name] = kernels.plan(batch.tokens, batch.rows, group.heads, batch.branches)
            frequency = self._frequencies[group.name]
            speed = speeds(group.rope, frequency, *stands, batch.prompt_len)
            angles[group.name] = kernels.rope_angles(stands, speed, group.rope.attention_factor)
        for i, (kind, layer) in enumerate(zip(self._kinds, self._layers, strict=True)):
            if i in taps:
                taps[i].copy_(residual)
            given = Given(
                residual,
                normed.x,
                normed.squares,
                batch.tokens.slots,
                inputs[i],
                self._expert_starts,
            )
            plan = None
            if kind.group is not None:
                name = kind.group.name
                of_group, plan = memory.kv[name], plans[name]
                pages = of_group.pages[kind.group.owner_of(i)]
                given = given.attending(*angles[name], pages, of_group.page_table)
            if kind.recurrent is not None:
                index = kind.recurrent.index_of(i)
                given = given.recurring(batch.tokens, batch.rows, *memory.of_layer(index))
            residual, *parts = pieces(kind.run, *given, *layer, plan)
            normed = Normed(parts[0], parts[1], config.norm_eps)
        if len(self._layers) in taps:
            taps[len(self._layers)].copy_(kernels.apply_norm(normed))
        return normed

    def _layer_inputs(self, batch: Batch, embedded: Tensor) -> Sequence[Tensor | None]:
        """What each layer is given of every token for itself, [T, input_size]: an embedding of its
        own, and what the layer makes of the common one."""
        kernels, config, weights = self._kernels, self.config, self._weights
        num, size = config.num_layers, config.input_size
        if weights.input_embedding is None or weights.input_projection is None:
            return [None] * num
        own, _ = kernels.embed(
            batch.tokens,
            batch.ids,
            LinearWeight(weights.input_embedding, None, num * size),
            self._input_scale,
            None,
            0.0,
        )
        projection = LinearWeight(weights.input_projection, None, num * size)
        made = kernels.linear(Normed(embedded), projection)
        # scaled by hidden_size**-0.5 before the norm: the same as a larger eps in it
        both, _ = kernels.add_norm(
            made.view(-1, size),
            own.view(-1, size),
            ResidualNorms(weights.projected_norm, None, config.norm_eps * config.hidden_size),
        )
        inputs = (both * 0.5**0.5).view(-1, num, size).transpose(0, 1).contiguous()
        return [inputs[i] for i in range(num)]

    def scan_of(self, states: States) -> Scan:
        """The shape of recurrent layers, with snapshots or without."""
        assert self.config.recurrent is not None
        scan = self.config.recurrent.scan
        return scan if states.rows is not None else scan.every(0)

    def new_hidden(self, num_tokens: int, num_states: int) -> Tensor:
        """Room for so many hidden states of every token, side by side."""
        return self._weights.final_norm.new_empty(num_tokens, num_states * self.config.hidden_size)

    def logits(self, normed: Normed, slots: Tensor, out: Tensor) -> None:
        """[rows, hidden] -> [rows, vocab]; zeros for rows of slot 0"""
        config, scale = self.config, self.config.scales.logits
        if scale != 1:
            normed = normed._replace(x=normed.x * scale)
        self.vocabulary.logits(normed, slots, config.final_softcap, out)
