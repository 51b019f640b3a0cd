"""Experts that a checkpoint stores in one tensor, presented as one tensor per expert.

Publishers of some families store the experts of a layer in either form, and of its MTP layers in
the other. The rule: a family in `MODEL_TYPES` reads one tensor per expert, `down_proj`, `gate_proj`
and `up_proj`; a joint tensor has output features before input features, and gates before values.
"""

from collections.abc import Collection
from typing import NamedTuple, final

from torch import Tensor

from slotzero.models.checkpoint import Checkpoint, CheckpointView, Part

MODEL_TYPES = ("qwen3_5_moe_text",)
GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"


class _Place(NamedTuple):
    """Where an expert's tensor is stored."""

    name: str
    expert: int
    part: int  # of `num_parts` equal parts of the rows
    num_parts: int


@final
class SeparateExperts(CheckpointView):
    """View of a checkpoint that presents joint experts one by one."""

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        self._names = {name for name in stored.names() if not name.endswith((GATE_UP, DOWN))}
        self._places: dict[str, _Place] = {}
        for name in set(stored.names()) - self._names:
            prefix, _, kind = name.rpartition(".")
            kinds = (kind,) if name.endswith(DOWN) else ("gate_proj", "up_proj")
            nothing = slice(0)
            _, (num_experts, *_) = stored.read_part(name, nothing, nothing, nothing)
            self._places |= {
                f"{prefix}.{expert}.{one}.weight": _Place(name, expert, part, len(kinds))
                for expert in range(num_experts)
                for part, one in enumerate(kinds)
            }

    def names(self) -> Collection[str]:
        return self._names | self._places.keys()

    def read(self, name: str) -> Tensor:
        if name not in self._places:
            return self._stored.read(name)
        return self.read_part(name, slice(None), slice(None)).tensor

    def read_part(self, name: str, *wanted: slice) -> Part:
        place = self._places.get(name)
        if place is None:
            return self._stored.read_part(name, *wanted)
        nothing = slice(0)
        _, whole = self._stored.read_part(place.name, nothing, nothing, nothing)
        num_rows = whole[1] // place.num_parts
        shape = num_rows, *whole[2:]
        if len(shape) != len(wanted):
            return Part(self._stored.read_part(place.name, nothing).tensor, shape)
        begin, end, step = wanted[0].indices(num_rows)
        first = place.part * num_rows
        rows = slice(first + begin, first + end, step)
        expert = slice(place.expert, place.expert + 1)
        return Part(self._stored.read_part(place.name, expert, rows, *wanted[1:]).tensor[0], shape)


def separate_experts(checkpoint: Checkpoint) -> Checkpoint:
    """Return a view with separate experts if the family needs them and some are stored jointly."""
    if checkpoint.config.get("model_type") not in MODEL_TYPES:
        return checkpoint
    is_joint = any(name.endswith((GATE_UP, DOWN)) for name in checkpoint.names())
    return SeparateExperts(checkpoint) if is_joint else checkpoint
