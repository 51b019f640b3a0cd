"""A model's config: its decoder layers, and the settings outside the layers.

A family (models/families) creates it from a checkpoint's config.json. It does not know tensors.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from slotzero.distributed.ranks import Ranks
from slotzero.kernels.types import Experts
from slotzero.models.blocks.attention import Attention, KvGroup
from slotzero.models.blocks.layer_input import LayerEmbedding
from slotzero.models.blocks.mla import MlaAttention
from slotzero.models.blocks.parallel import ParallelMixers
from slotzero.models.blocks.recurrent import RecurrentBlock
from slotzero.models.layer import DecoderLayer
from slotzero.models.model import RecurrentLayers
from slotzero.quantization.quantization import NOT_QUANTIZED, Quantization

# Names of KV groups.
FULL, SLIDING, CHUNKED, LATENT = "full", "sliding", "chunked", "latent"


class ModelNames(NamedTuple):
    """Names of a checkpoint's tensors outside the layers, and the name prefix of a layer."""

    embedding: str = "model.embed_tokens"
    head: str = "lm_head"
    final_norm: str = "model.norm"
    layer: str = "model.layers.{layer}."


MODEL_NAMES = ModelNames()


class MtpNames(NamedTuple):
    """Names of the tensors of a multi-token prediction (MTP) layer in a checkpoint.

    `{index}` counts the MTP layers from 0; `{layer}` continues the numbering of the model's layers.
    """

    layer: str = "model.layers.{layer}."
    embed_norm: str = "model.layers.{layer}.enorm"
    hidden_norm: str = "model.layers.{layer}.hnorm"
    norm: str = "model.layers.{layer}.shared_head.norm"
    join: str = "model.layers.{layer}.eh_proj"


MTP_NAMES = MtpNames()


@dataclass(frozen=True)
class MtpConfig:
    """Multi-token prediction (MTP): layers after the model's last that predict further tokens."""

    num_layers: int
    layer: DecoderLayer
    names: MtpNames = MTP_NAMES
    chains_normed: bool = False
    """Whether the next draft continues from hidden states under the last norm."""

    @property
    def group(self) -> KvGroup:
        assert self.layer.group is not None
        return self.layer.group


@dataclass(frozen=True)
class ModelConfig:
    family: str  # model_type of the checkpoint's config
    vocab_size: int
    hidden_size: int
    norm_eps: float
    max_position: int
    layers: tuple[DecoderLayer, ...]
    mlp_size: int
    """Inner size of a dense MLP of the whole model, also if every layer has experts instead: the
    default for an EAGLE head."""
    tied_embeddings: bool
    embedding_scale: float = 1.0
    final_softcap: float | None = None
    logits_scale: float = 1.0
    norm_offset: float = 0.0
    """Added to the stored weight of the final norm."""
    layer_embedding: LayerEmbedding | None = None
    mtp: MtpConfig | None = None
    names: ModelNames = MODEL_NAMES
    quantization: Quantization = NOT_QUANTIZED
    ignored: tuple[str, ...] = ()
    """Prefixes of tensors in a checkpoint that the model does not read."""

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_mtp_layers(self) -> int:
        return 0 if self.mtp is None else self.mtp.num_layers

    @cached_property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups of all layers, sorted by name."""
        groups = {layer.group for layer in self.layers} - {None}
        return tuple(sorted((g for g in groups if g is not None), key=lambda g: g.name))

    @cached_property
    def recurrent(self) -> RecurrentLayers | None:
        """The model's recurrent layers; None if it has none."""
        found = {i: layer.recurrent for i, layer in enumerate(self.layers)}
        mixers = {i: mixer for i, mixer in found.items() if mixer is not None}
        return RecurrentLayers(next(iter(mixers.values())), tuple(mixers)) if mixers else None

    @cached_property
    def experts(self) -> Experts | None:
        """The shape of the model's experts; None if no layer has experts."""
        return next((layer.moe.experts for layer in self.layers if layer.moe is not None), None)

    def shard(self, ranks: Ranks) -> "ModelConfig":
        """Return one rank's part of the model: a smaller model of the same family."""
        if not ranks.is_distributed:
            return self
        mtp = self.mtp and replace(self.mtp, layer=self.mtp.layer.shard(ranks))
        return replace(self, layers=tuple(layer.shard(ranks) for layer in self.layers), mtp=mtp)

    def with_snapshots(self, interval: int) -> "ModelConfig":
        """Return the model with a snapshot of each recurrent state every `interval` tokens."""

        def change(layer: DecoderLayer) -> DecoderLayer:
            match layer.mixer:
                case RecurrentBlock():
                    return replace(layer, mixer=layer.mixer.with_snapshots(interval))
                case ParallelMixers(recurrent=recurrent):
                    recurrent = recurrent.with_snapshots(interval)
                    return replace(layer, mixer=replace(layer.mixer, recurrent=recurrent))
            return layer

        return replace(self, layers=tuple(change(layer) for layer in self.layers))

    def with_groups(self, change: Callable[[KvGroup], KvGroup]) -> "ModelConfig":
        """Return the model with `change` applied to the KV group of every layer."""
        return replace(self, layers=tuple(with_group(layer, change) for layer in self.layers))


def with_group(layer: DecoderLayer, change: Callable[[KvGroup], KvGroup]) -> DecoderLayer:
    """Return the layer with `change` applied to its KV group, if it has one."""
    match layer.mixer:
        case Attention(group=group) | MlaAttention(group=group):
            return replace(layer, mixer=replace(layer.mixer, group=change(group)))
        case ParallelMixers(attention=attention):
            attention = replace(attention, group=change(attention.group))
            return replace(layer, mixer=replace(layer.mixer, attention=attention))
    return layer
