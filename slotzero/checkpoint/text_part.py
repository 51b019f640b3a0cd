"""The text model of a multimodal checkpoint.

Slotzero supports text only, so tensors for images and audio are never read. The rule: a tensor that
belongs neither to the text model nor to these parts keeps its name, and loading fails if the model
does not use it.
"""

from collections.abc import Collection, Mapping
from typing import Any, final

from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.models.checkpoint import Checkpoint, CheckpointView, Part

TEXT_MODELS: Mapping[str, str] = {
    "Gemma4ForConditionalGeneration": "Gemma4ForCausalLM",
    "Qwen3_5ForConditionalGeneration": "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForConditionalGeneration": "Qwen3_5MoeForCausalLM",
}
COMMON_FIELDS = (  # for all parts
    "dtype", "torch_dtype", "quantization_config", "eos_token_id", "tie_word_embeddings",
)  # fmt: skip
TEXT = "model.language_model."
OTHER_PARTS = tuple(
    f"model.{part}."
    for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio", "visual")
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text model; for a text-only model, that is the whole config."""
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise UnsupportedModelError(
            f"config field architectures={architectures!r}: must be a list of names"
        )
    (architecture, *_) = architectures
    if architecture not in TEXT_MODELS:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"config field text_config={text!r}: must be the config of the text model of "
            f"{architecture}"
        )
    common = {field: config[field] for field in COMMON_FIELDS if field in config}
    return {**common, **text, "architectures": [TEXT_MODELS[architecture]]}


@final
class TextCheckpoint(CheckpointView):
    """View of a multimodal checkpoint that presents its text model only."""

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        names = (name for name in stored.names() if not name.startswith(OTHER_PARTS))
        self._stored_names = {
            f"model.{name.removeprefix(TEXT)}" if name.startswith(TEXT) else name: name
            for name in names
        }

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._stored_names.get(name, name))

    def read_part(self, name: str, *wanted: slice) -> Part:
        return self._stored.read_part(self._stored_names.get(name, name), *wanted)
