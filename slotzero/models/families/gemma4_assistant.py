"""The Gemma 4 assistant, a drafter: a small Gemma 4 whose layers read the KV of the target.

speculative/assistant.py checks whether an assistant fits its target.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.blocks.attention import Attention
from slotzero.models.config import ModelConfig
from slotzero.models.families import gemma4
from slotzero.models.families.family import parse_config
from slotzero.models.families.tiny import COMMON, layer_types
from slotzero.models.layer import DecoderLayer
from slotzero.quantization.quantization import refuse_quantized

MODEL_TYPE, ARCHITECTURE = "gemma4_assistant", "Gemma4AssistantForCausalLM"
JOIN, BACK = "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True)
class AssistantConfig:
    """The assistant's decoder, and how it connects to the target."""

    model: ModelConfig  # all of its layers are readers
    backbone_size: int  # hidden size of the target
    num_clusters: int  # of the vocabulary; 0: the vocabulary head computes all logits
    top_clusters: int  # number of clusters for which logits are computed

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors that are not part of the model, by name."""
        hidden, target, num = self.model.hidden_size, self.backbone_size, self.num_clusters
        shapes: dict[str, tuple[int, ...]] = {JOIN: (hidden, 2 * target), BACK: (target, hidden)}
        if num:
            shapes |= {CENTROIDS: (num, hidden), ORDER: (self.model.vocab_size,)}
        return shapes


def parse_assistant(config: Mapping[str, Any], name: str) -> AssistantConfig:
    architecture = (config.get("architectures") or [""])[0]
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(
            f"{name} is not an assistant: its architecture is {architecture!r} instead of "
            f"{ARCHITECTURE}; pass an assistant with --speculative-model, or use "
            "--speculative draft"
        )
    refuse_quantized(config, name, "assistant")
    text = {**dict(config.get("text_config") or {}), "num_kv_shared_layers": 0}
    text |= {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    model = parse_config({**text, "tie_word_embeddings": True})
    if model.layer_embedding is not None:
        raise UnsupportedModelError(
            f"{name}: per-layer inputs (config field hidden_size_per_layer_input) are not "
            "implemented for an assistant"
        )
    model = replace(model, layers=tuple(_reader(layer) for layer in model.layers))
    is_clustered = bool(config.get("use_ordered_embeddings"))
    num, top = (config.get(f) for f in ("num_centroids", "centroid_intermediate_top_k"))
    if is_clustered and (not num or not top or top > num or model.vocab_size % num):
        raise UnsupportedModelError(
            f"{name}: config fields num_centroids={num}, centroid_intermediate_top_k={top}: "
            f"num_centroids must divide vocab_size={model.vocab_size}, and "
            "centroid_intermediate_top_k must be from 1 to num_centroids"
        )
    return AssistantConfig(
        model,
        int(config.get("backbone_hidden_size") or 0),
        int(num or 0) if is_clustered else 0,
        int(top or 0) if is_clustered else 0,
    )


def _reader(layer: DecoderLayer) -> DecoderLayer:
    assert isinstance(layer.mixer, Attention)
    group = layer.mixer.group
    group = replace(group, layers=(), readers=group.layers)
    return replace(layer, mixer=replace(layer.mixer, group=group, reads=True))


TINY: Mapping[str, Mapping[str, Any]] = {
    "gemma4-assistant": {
        **COMMON,
        "model_type": MODEL_TYPE,
        "architectures": [ARCHITECTURE],
        "backbone_hidden_size": gemma4.TINY["hidden_size"],
        "initializer_range": 0.05,
        "text_config": {
            **gemma4.TINY, "hidden_size": 48, "intermediate_size": 56, "num_hidden_layers": 3,
            "layer_types": layer_types("ssf"), "num_kv_shared_layers": 3,
            "use_double_wide_mlp": False,
            "per_layer_config": {"2": gemma4.TINY["per_layer_config"]["1"]},
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": None,
        },
    },
}  # fmt: skip
"""Assistants cannot run alone: use one with `--speculative mtp` beside its target."""
