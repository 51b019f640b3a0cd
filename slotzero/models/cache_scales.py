"""The scales of an FP8 KV cache in a checkpoint: one of keys and one of values for each layer.

Exporters store them under several names. A layer without any has scales of 1. A scale that no layer
reads is an error: ignoring it would change results.
"""

from collections.abc import Collection, Sequence

from torch import Tensor

from slotzero.errors import CorruptCheckpointError, UnsupportedModelError
from slotzero.kernels.float8_kv import no_scales
from slotzero.models.blocks.attention import Attention
from slotzero.models.blocks.mla import MlaAttention
from slotzero.models.blocks.parallel import ParallelMixers
from slotzero.models.config import ModelConfig
from slotzero.models.layer import DecoderLayer
from slotzero.models.mtp import mtp_layer_prefix
from slotzero.quantization.method import CACHE_SCALES, TensorSource, finite, take_one

_NAMES = ("{}_scale", "attn.{}_scale", "{}_proj.{}_scale", "{}_proj.output_scale", "kv_scale")
"""Names of the scale of keys (k) or values (v) after the name of a layer's attention."""


def read_cache_scales(model: ModelConfig, checkpoint: TensorSource) -> dict[str, Tensor]:
    """Return the scales [layers, 2] of each KV group of a model."""
    prefixes = {i: model.names.layer.format(layer=i) for i in range(model.num_layers)}
    found = _Found(checkpoint, tuple(prefixes.values()))
    scales = {
        group.name: found.of_layers([(model.layers[i], prefixes[i]) for i in group.layers])
        for group in model.groups
    }
    found.refuse_rest()
    return scales


def read_mtp_scales(model: ModelConfig, checkpoint: TensorSource) -> Tensor:
    """Return the scales [layers, 2] of a model's MTP layers."""
    assert model.mtp is not None
    prefixes = [mtp_layer_prefix(model, index) for index in range(model.num_mtp_layers)]
    found = _Found(checkpoint, prefixes)
    scales = found.of_layers([(model.mtp.layer, prefix) for prefix in prefixes])
    found.refuse_rest()
    return scales


def scale_names(model: ModelConfig) -> list[str]:
    """Return a name for each scale that a checkpoint of this model may have, MTP layers included.

    Random checkpoints have all of them, so that every layer has scales of its own.
    """
    held = [i for group in model.groups for i in group.layers]
    layers = [(model.layers[i], model.names.layer.format(layer=i)) for i in held]
    if model.mtp is not None:
        prefixes = (mtp_layer_prefix(model, index) for index in range(model.num_mtp_layers))
        layers += [(model.mtp.layer, prefix) for prefix in prefixes]
    return [
        f"{prefix}{_attention_of(layer).prefix}.{which}_scale"
        for layer, prefix in layers
        for which in ("k" if isinstance(layer.mixer, MlaAttention) else "kv")
    ]


class _Found:
    """The scales that a checkpoint has for some layers, and which of them were read."""

    def __init__(self, checkpoint: TensorSource, prefixes: Sequence[str]) -> None:
        self._checkpoint, self._read = checkpoint, set[str]()
        self._names = {
            name
            for name in checkpoint.names()
            if name.endswith(CACHE_SCALES) and name.startswith(tuple(prefixes))
        }

    def of_layers(self, layers: Collection[tuple[DecoderLayer, str]]) -> Tensor:
        scales = no_scales(len(layers))
        for row, (layer, prefix) in zip(scales, layers, strict=True):
            attention = prefix + _attention_of(layer).prefix
            stored = [self._scale(attention, which) for which in "kv"]
            is_mla = isinstance(layer.mixer, MlaAttention)
            if stored[1] is None and is_mla:
                stored[1] = stored[0]
            self._check(attention, stored, is_mla)
            for i, scale in enumerate(stored):
                if scale is not None:
                    row[i] = scale
        return scales

    def refuse_rest(self) -> None:
        """Raise if there are scales that were not read."""
        if rest := sorted(self._names - self._read):
            raise UnsupportedModelError(
                f"{self._checkpoint.name}: tensor {rest[0]} ({len(rest)} in total) is a scale of "
                "the KV cache that no layer reads: this way of scaling is not implemented"
            )

    def _scale(self, attention: str, which: str) -> float | None:
        names = [f"{attention}.{name.format(which, which)}" for name in _NAMES]
        name = next((name for name in names if name in self._names), None)
        if name is None:
            return None
        self._read.add(name)
        scale = float(finite(self._checkpoint, name, take_one(self._checkpoint, name)))
        if scale <= 0:
            raise CorruptCheckpointError(
                f"{self._checkpoint.name}: tensor {name} must be positive, and it is {scale}"
            )
        return scale

    def _check(self, attention: str, stored: Sequence[float | None], is_mla: bool) -> None:
        k, v = stored
        if (k is None) != (v is None):
            there, missing = ("keys", "values") if v is None else ("values", "keys")
            raise CorruptCheckpointError(
                f"{self._checkpoint.name}: {attention} has a scale for its {there} in the KV cache "
                f"and none for its {missing}: the checkpoint is incomplete, download it again"
            )
        if is_mla and k != v:
            raise UnsupportedModelError(
                f"{self._checkpoint.name}: {attention} has different scales for keys ({k}) and "
                f"values ({v}) in the KV cache, but with MLA both are the same stored row"
            )


def _attention_of(layer: DecoderLayer) -> Attention | MlaAttention:
    mixer = layer.mixer.attention if isinstance(layer.mixer, ParallelMixers) else layer.mixer
    assert isinstance(mixer, Attention | MlaAttention)
    return mixer
