"""A model of transformers behind our contract of a model.

Its trunk maps the tokens of a step, packed into one sequence, to hidden states; its head maps those
to logits. Positions come from us, so the order in the sequence has no meaning; mixing.py checks
that at the start.
"""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Normed, PagedKv, standing
from slotzero.kernels.types_recurrent import Scan, States, Trail
from slotzero.models.blocks.attention import AttentionInputs, KvGroup
from slotzero.models.bridge.config import BridgedConfig
from slotzero.models.bridge.layers import CurrentStep, LayerPiece, StepInputs
from slotzero.models.bridge.parts import Parts
from slotzero.models.model import NO_TAPS, DecoderBatch, Model


@final
class BridgedModel(Model):
    writes = ()

    def __init__(
        self,
        config: BridgedConfig,
        parts: Parts,
        frequencies: Mapping[str, Tensor],  # by group: zeros, as transformers has rotated already
        kernels: Kernels,
    ) -> None:
        self._config, self._parts = config, parts
        self._frequencies, self._kernels = frequencies, kernels
        self._step = CurrentStep()
        modules = parts.trunk.get_submodule(config.stack)
        pieces = [
            LayerPiece(module, index, layer.heads, kernels, self._step)
            for index, (module, layer) in enumerate(zip(modules, config.layers, strict=True))
        ]
        for piece, layer in zip(pieces, config.layers, strict=True):
            piece.code = pieces[layer.first_equal]
        self._pieces = pieces

    @property
    def config(self) -> BridgedConfig:
        return self._config

    @property
    def is_batch_invariant(self) -> bool:
        """False: torch sums in an order that depends on the batch."""
        return False

    def forward(
        self,
        batch: DecoderBatch,
        kv: Mapping[str, PagedKv],
        pieces: Pieces,
        taps: Mapping[int, Tensor] = NO_TAPS,
        states: States | None = None,
        trail: Trail | None = None,
    ) -> Normed:
        slots, places = batch.tokens
        attention = self._attention_inputs(batch, kv)
        positions = standing(batch.tokens, batch.branches).positions.long()
        self._step.inputs = StepInputs(pieces, attention, taps)
        try:
            hidden = self._parts.hidden(batch.ids[slots, places].long(), positions)
        finally:
            self._step.inputs = None
        if self._config.num_layers in taps:
            taps[self._config.num_layers].copy_(hidden)
        return Normed(hidden)

    def _attention_inputs(
        self, batch: DecoderBatch, kv: Mapping[str, PagedKv]
    ) -> tuple[AttentionInputs | None, ...]:
        """Return pages and plan of each layer; None for a layer without attention."""
        shared: dict[str, AttentionInputs] = {}
        for group in self._config.groups:
            angles = self._kernels.rope_angles(batch.tokens, self._frequencies[group.name], 1.0)
            plan = self._kernels.plan(batch.tokens, batch.rows, group.heads, batch.branches)
            shared[group.name] = AttentionInputs(angles, kv[group.name], plan)

        def of_layer(group: KvGroup | None, index: int) -> AttentionInputs | None:
            if group is None:
                return None
            inputs = shared[group.name]
            return inputs._replace(kv=inputs.kv.of_layer(group.owner_of(index)))

        groups = self._config.group_by_layer
        return tuple(of_layer(group, index) for index, group in enumerate(groups))

    def scan_of(self, states: States) -> Scan:
        raise AssertionError("a bridged model has no recurrent layers")

    def new_hidden(self, num_tokens: int, num_states: int) -> Tensor:
        size = num_states * self._config.hidden_size
        return self._parts.like.new_empty(num_tokens, size)

    def logits(self, normed: Normed, slots: Tensor, out: Tensor) -> None:
        scores = self._parts.logits(normed.x)
        out.copy_(scores.masked_fill((slots == 0)[:, None], 0))
