"""What the config of an assistant says, in our words: a text model whose layers own no KV.

What it shares with the target that it was made for is checked by who knows both.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slotzero.errors import UnsupportedModelError
from slotzero.models.config import ModelConfig, parse_config

MODEL_TYPE, ARCHITECTURE = "gemma4_assistant", "Gemma4AssistantForCausalLM"
JOIN, BACK = "pre_projection.weight", "post_projection.weight"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True)
class AssistantConfig:
    model: ModelConfig  # whose groups have readers only
    backbone_size: int  # of the target's hidden states
    num_clusters: int  # of tokens; 0: it looks at all of them
    top_clusters: int


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
    if model.input_size:
        raise UnsupportedModelError(f"{name}: inputs of layers are not implemented in an assistant")
    groups = tuple(replace(g, layers=(), readers=g.layers) for g in model.groups)
    is_clustered = bool(config.get("use_ordered_embeddings"))
    num, top = (config.get(f) for f in ("num_centroids", "centroid_intermediate_top_k"))
    if is_clustered and (not num or not top or top > num or model.vocab_size % num):
        raise UnsupportedModelError(
            f"{name}: num_centroids={num}, centroid_intermediate_top_k={top}: a part of "
            f"vocab_size={model.vocab_size}, and a part of that, is needed"
        )
    return AssistantConfig(
        replace(model, groups=groups),
        int(config.get("backbone_hidden_size") or 0),
        int(num or 0) if is_clustered else 0,
        int(top or 0) if is_clustered else 0,
    )
