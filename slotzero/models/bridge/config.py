"""What the bridge knows of a model of transformers before its weights are loaded."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

from slotzero.distributed.ranks import Ranks
from slotzero.errors import ConfigError
from slotzero.kernels.types import Experts, Heads
from slotzero.models.blocks.attention import KvGroup
from slotzero.models.blocks.block import FLAG
from slotzero.models.model import RecurrentLayers
from slotzero.models.rope import RopeConfig
from slotzero.quantization.quantization import NOT_QUANTIZED, Quantization


@dataclass(frozen=True)
class BridgedLayer:
    heads: Heads | None
    """The shape of its attention; None if it has none."""
    first_equal: int
    """The first layer that does the same to its weights and inputs; its code serves both."""


@final
@dataclass(frozen=True)
class BridgedConfig:
    family: str  # model_type of the checkpoint's config
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int
    stack: str
    """Path of the list of layers within the decoder."""
    layers: tuple[BridgedLayer, ...]
    num_values: int
    """Number of parameters of the whole model."""

    @property
    def recurrent(self) -> RecurrentLayers | None:
        return None

    @property
    def experts(self) -> Experts | None:
        """None: experts of transformers are not told apart from other weights."""
        return None

    @property
    def quantization(self) -> Quantization:
        return NOT_QUANTIZED

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @cached_property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups: layers whose pages have the same shape and the same window."""
        members: dict[Heads, list[int]] = {}
        for index, layer in enumerate(self.layers):
            if layer.heads is not None:
                members.setdefault(_stored(layer.heads), []).append(index)
        names: list[str] = []
        groups = []
        for heads, layers in members.items():
            kind = "full" if heads.window is None else "sliding"
            num = sum(name.startswith(kind) for name in names)
            names.append(f"{kind}_{num + 1}" if num else kind)
            groups.append(KvGroup(names[-1], tuple(layers), heads, _no_rope(heads)))
        return tuple(sorted(groups, key=lambda group: group.name))

    @cached_property
    def group_by_layer(self) -> tuple[KvGroup | None, ...]:
        found = {index: group for group in self.groups for index in group.layers}
        return tuple(found.get(index) for index in range(self.num_layers))

    def shard(self, ranks: Ranks) -> "BridgedConfig":
        if ranks.is_distributed:
            raise ConfigError(
                f"{FLAG}={ranks.size}: the bridge to transformers runs a model on one device; "
                "drop the setting"
            )
        return self


def _stored(heads: Heads) -> Heads:
    """Return what layers of one group have in common: scale and soft cap belong to each layer."""
    return replace(heads, scale=1.0, softcap=None)


def _no_rope(heads: Heads) -> RopeConfig:
    """Return the rope of queries and keys that are rotated already: no rotation."""
    return RopeConfig("none", 10000.0, heads.head_dim, heads.head_dim, 0)
