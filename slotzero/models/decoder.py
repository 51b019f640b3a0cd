"""The decoder: embedding, layers, final norm and vocabulary head of every model.

It maps tokens, each given as a (slot, position), to hidden states. It does not know requests,
scheduling or sampling, and allocates nothing that outlives a step.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.graph import Pieces
from slotzero.kernels.attention_plans import AttentionPlan
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import (
    Angles,
    Normed,
    PagedKv,
    ResidualNorms,
    Tokens,
    standing,
)
from slotzero.kernels.types_recurrent import RecurrentStep, Scan, States, Trail
from slotzero.models.blocks.attention import Attention, AttentionInputs, KvGroup
from slotzero.models.blocks.block import BlockContext
from slotzero.models.blocks.mla import MlaAttention
from slotzero.models.blocks.moe import ChosenExperts, MoeInputs
from slotzero.models.blocks.parallel import ParallelInputs, ParallelMixers
from slotzero.models.blocks.recurrent import RecurrentBlock
from slotzero.models.config import ModelConfig
from slotzero.models.layer import LayerForward, LayerStep, MixerInputs
from slotzero.models.model import NO_TAPS, DecoderBatch, Model
from slotzero.models.rope import query_angles, speeds
from slotzero.models.routing import CHOSEN_EXPERTS, Routing
from slotzero.models.vocabulary import Vocabulary
from slotzero.models.weights import DecoderWeights


class LayerMemory(NamedTuple):
    """What the layers keep of earlier tokens: KV pages by group, and recurrent states."""

    kv: Mapping[str, PagedKv]  # pages [layers, pages, page_size, kv_heads, row_size]
    states: States | None = None  # stacked
    trail: Trail | None = None

    def of_recurrent(self, index: int) -> tuple[States, Trail | None]:
        """Return the states of the `index`th recurrent layer."""
        assert self.states is not None
        states = self.states
        conv, *parts = states[:4]
        scan, conv_kept, scan_kept = (part if part is None else part[index] for part in parts)
        states = States(conv[index], scan, conv_kept, scan_kept, states.rows)
        if self.trail is None:
            return states, None
        conv, scan = self.trail
        scan = None if scan is None else scan[:, :, index]
        return states, Trail(conv[:, :, index], scan)


class GroupStep(NamedTuple):
    """Inputs that all layers of one KV group share in a step."""

    angles: Angles
    plan: AttentionPlan
    still: Angles | None = None
    q_angles: Angles | None = None  # see AttentionInputs


@final
class Decoder(Model):
    def __init__(
        self,
        config: ModelConfig,
        weights: DecoderWeights,
        frequencies: Mapping[str, Tensor],  # by group
        kernels: Kernels,
        routing: Routing | None,
        ranks: Ranks = ALONE,
    ) -> None:
        """Bind weights to kernels; `config` is the rank's part of the model (ModelConfig.shard)."""
        moe_layers = (i for i, layer in enumerate(config.layers) if layer.moe is not None)
        self._moe_index = {i: index for index, i in enumerate(moe_layers)}
        self._config = config
        self.vocabulary = Vocabulary(
            config.vocab_size, weights.embedding, weights.head, kernels, ranks
        )
        self.writes = () if routing is None else (routing.name,)
        self._expert_starts = None if routing is None else routing.starts
        self._weights = weights
        self._frequencies = frequencies
        self._kernels = kernels
        dtype, layer_inputs = weights.final_norm.dtype, config.layer_embedding
        self._scale = float(torch.tensor(config.embedding_scale).to(dtype))
        size = 0 if layer_inputs is None else layer_inputs.input_size
        self._layer_input_scale = float(torch.tensor(size**0.5).to(dtype))
        self._next_norms = [
            *(layer.norms.input for layer in weights.layers[1:]),
            weights.final_norm,
        ]
        self._is_centred = config.layers[0].norms.is_centred
        self._with_still = {  # groups with layers that need AttentionInputs.still
            layer.mixer.group.name
            for layer in config.layers
            if isinstance(layer.mixer, Attention) and layer.mixer.needs_still
        }
        bound: dict[LayerForward, LayerForward] = {}  # one object for layers that compare equal
        context = BlockContext(kernels, ranks)
        forwards = (LayerForward(layer, context) for layer in config.layers)
        self._layers = [bound.setdefault(forward, forward) for forward in forwards]

    @property
    def config(self) -> ModelConfig:
        return self._config

    @property
    def is_batch_invariant(self) -> bool:
        return self._kernels.is_batch_invariant

    def forward(
        self,
        batch: DecoderBatch,
        kv: Mapping[str, PagedKv],
        pieces: Pieces,
        taps: Mapping[int, Tensor] = NO_TAPS,
        states: States | None = None,
        trail: Trail | None = None,
    ) -> Normed:
        residual, normed = self._embed(batch)
        inputs = self._layer_inputs(batch, residual)
        rope_tokens = standing(batch.tokens, batch.branches)
        memory = LayerMemory(kv, states, trail)
        return self._run_layers(residual, normed, inputs, batch, rope_tokens, memory, pieces, taps)

    def _embed(self, batch: DecoderBatch) -> tuple[Tensor, Normed]:
        norm, eps = self._weights.layers[0].norms.input, self.config.norm_eps
        if not self._is_centred:
            return self.vocabulary.embed(batch.tokens, batch.ids, self._scale, norm, eps)
        residual, _ = self.vocabulary.embed(batch.tokens, batch.ids, self._scale, None, eps)
        return residual, self._kernels.norm(residual, norm, eps, is_centred=True)

    def forward_from(
        self,
        begin: Tensor,  # [T, hidden], used instead of embeddings
        tokens: Tokens,  # each attends to the keys up to its own position
        rope_tokens: Tokens,  # positions for rotary embedding
        prompt_len: Tensor,
        kv: Mapping[str, PagedKv],
        pieces: Pieces,
    ) -> Normed:
        """Run layers that store no KV, from given hidden states."""
        norm, eps = self._weights.layers[0].norms.input, self.config.norm_eps
        batch = DecoderBatch(tokens, tokens.slots, prompt_len, None)
        inputs = [None] * len(self._layers)
        normed = self._kernels.norm(begin, norm, eps, self._is_centred)
        memory = LayerMemory(kv)
        return self._run_layers(begin, normed, inputs, batch, rope_tokens, memory, pieces, NO_TAPS)

    def _run_layers(
        self,
        residual: Tensor,
        normed: Normed,
        inputs: Sequence[Tensor | None],
        batch: DecoderBatch,
        rope_tokens: Tokens,
        memory: LayerMemory,
        pieces: Pieces,
        taps: Mapping[int, Tensor],
    ) -> Normed:
        groups = {
            group.name: self._group_step(group, batch, rope_tokens) for group in self.config.groups
        }
        chosen = self._chosen_experts(batch.tokens, memory.kv.get(CHOSEN_EXPERTS))
        for i, (layer, weights) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
            if i in taps:
                taps[i].copy_(residual)
            step = LayerStep(
                residual,
                normed,
                self._mixer_inputs(i, batch, groups, memory),
                self._moe_inputs(i, batch.tokens, chosen),
                inputs[i],
            )
            residual, normed = pieces(layer.run, step, weights, self._next_norms[i])
        if len(self._layers) in taps:
            taps[len(self._layers)].copy_(self._kernels.apply_norm(normed))
        return normed

    def _chosen_experts(self, tokens: Tokens, stored: PagedKv | None) -> ChosenExperts | None:
        """Return where the experts of each token are stored, in all layers."""
        if stored is None:
            return None
        page_size = stored.pages.shape[2]
        pages = stored.page_table[tokens.slots, tokens.positions // page_size]
        pages = pages * (tokens.slots != 0)  # the row of slot 0 may hold anything
        return ChosenExperts(stored.pages, pages, tokens.positions % page_size)

    def _moe_inputs(self, i: int, tokens: Tokens, chosen: ChosenExperts | None) -> MoeInputs | None:
        """Return the inputs of layer `i`'s experts."""
        if self._expert_starts is None:
            return None
        if chosen is not None:
            index = self._moe_index.get(i)
            chosen = None if index is None else chosen._replace(pages=chosen.pages[index])
        return MoeInputs(tokens.slots, self._expert_starts, chosen)

    def _group_step(self, group: KvGroup, batch: DecoderBatch, rope_tokens: Tokens) -> GroupStep:
        kernels, frequency = self._kernels, self._frequencies[group.name]
        plan = kernels.plan(batch.tokens, batch.rows, group.heads, batch.branches)
        speed = speeds(group.rope, frequency, *rope_tokens, batch.prompt_len)
        angles = kernels.rope_angles(rope_tokens, speed, group.rope.attention_factor)
        if group.name not in self._with_still:
            return GroupStep(angles, plan)
        still = Angles(torch.ones_like(angles.cos), torch.zeros_like(angles.sin))
        return GroupStep(angles, plan, still, query_angles(group.rope, rope_tokens, angles))

    def _mixer_inputs(
        self, i: int, batch: DecoderBatch, groups: Mapping[str, GroupStep], memory: LayerMemory
    ) -> MixerInputs | None:
        """Return the inputs of layer `i`'s mixer."""

        def attention(group: KvGroup) -> AttentionInputs:
            angles, plan, still, q_angles = groups[group.name]
            kv = memory.kv[group.name].of_layer(group.owner_of(i))
            return AttentionInputs(angles, kv, plan, still, q_angles)

        def recurrent() -> RecurrentStep:
            assert self.config.recurrent is not None
            states, trail = memory.of_recurrent(self.config.recurrent.index_of(i))
            return RecurrentStep(batch.tokens, batch.rows, states, trail)

        match self.config.layers[i].mixer:
            case Attention(group=group) | MlaAttention(group=group):
                return attention(group)
            case RecurrentBlock():
                return recurrent()
            case ParallelMixers(attention=mixer):
                return ParallelInputs(attention(mixer.group), recurrent())
        return None

    def _layer_inputs(self, batch: DecoderBatch, embedded: Tensor) -> Sequence[Tensor | None]:
        """Return the per-layer input [T, input_size] of each layer; see LayerEmbedding."""
        kernels, block = self._kernels, self.config.layer_embedding
        weights = self._weights.layer_embedding
        if block is None or weights is None:
            return [None] * self.config.num_layers
        num, size = block.num_layers, block.input_size
        own, _ = kernels.embed(
            batch.tokens, batch.ids, weights.embedding, self._layer_input_scale, None, 0.0
        )
        projected = kernels.linear(Normed(embedded), weights.projection)
        # The projection is scaled by hidden_size**-0.5 before the norm, which equals a larger eps.
        norms = ResidualNorms(weights.norm, None, block.norm_eps * block.hidden_size)
        both, _ = kernels.add_norm(projected.view(-1, size), own.view(-1, size), norms)
        inputs = (both * 0.5**0.5).view(-1, num, size).transpose(0, 1).contiguous()
        return [inputs[i] for i in range(num)]

    def scan_of(self, states: States) -> Scan:
        assert self.config.recurrent is not None
        return self.config.recurrent.mixer.scan_of(states)

    def new_hidden(self, num_tokens: int, num_states: int) -> Tensor:
        return self._weights.final_norm.new_empty(num_tokens, num_states * self.config.hidden_size)

    def logits(self, normed: Normed, slots: Tensor, out: Tensor) -> None:
        config = self.config
        if config.logits_scale != 1:
            # without codes in float8: those would not have the factor
            normed = Normed(normed.x * config.logits_scale, normed.squares, normed.eps)
        self.vocabulary.logits(normed, slots, config.final_softcap, out)
