"""Gemma 4's assistant, a drafter: a small Gemma 4 whose layers own no KV and read the target's.

Whether it fits a target is checked in speculative/assistant.py.
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

MODEL_TYPE, ARCHITECTURE = "gemma4_assistant", "Gemma4AssistantForCausalLM"
JOIN, BACK = "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True)
class AssistantConfig:
    model: ModelConfig  # all of its layers are readers
    backbone_size: int  # hidden size of the target
    num_clusters: int  # of tokens; 0: the vocabulary head computes all logits
    top_clusters: int

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the tensors beside the model's, by name."""
        hidden, theirs, num = self.model.hidden_size, self.backbone_size, self.num_clusters
        shapes: dict[str, tuple[int, ...]] = {JOIN: (hidden, 2 * theirs), BACK: (theirs, hidden)}
        if num:
            shapes |= {CENTROIDS: (num, hidden), ORDER: (self.model.vocab_size,)}
        return shapes


def parse_assistant(config: Mapping[str, Any], name: str) -> AssistantConfig:
    architecture = (config.get("architectures") or [""])[0]
    if architecture != ARCHITECTURE:
        raise UnsupportedModelError(
            f"{name}: {architecture!r} is no assistant, {ARCHITECTURE} is: name one of those with "
            "--speculative-model, or say --speculative draft"
        )
    text = {**dict(config.get("text_config") or {}), "num_kv_shared_layers": 0}
    text |= {"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"]}
    model = parse_config({**text, "tie_word_embeddings": True})
    if model.layer_embedding is not None:
        raise UnsupportedModelError(f"{name}: inputs of layers are not implemented in an assistant")
    model = replace(model, layers=tuple(_reader(layer) for layer in model.layers))
    is_clustered = bool(config.get("use_ordered_embeddings"))
    num, top = (config.get(f) for f in ("num_centroids", "centroid_intermediate_top_k"))
    if is_clustered and (not num or not top or top > num or model.vocab_size % num):
        raise UnsupportedModelError(
            f"{name}: num_centroids={num}, centroid_intermediate_top_k={top}: a part of "
            f"vocab_size={model.vocab_size}, and a part of that, is needed"
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
"""Not a model of its own: `--speculative mtp` takes one beside its target."""
