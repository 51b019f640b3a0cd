"""The text model of a multimodal checkpoint.

Slotzero takes text only, so tensors for images and audio are never read. The rule: a tensor that
belongs to neither part keeps its name, and is refused if the model does not know it.
"""

from collections.abc import Collection, Mapping
from typing import Any, final

from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.models.checkpoint import Checkpoint, CheckpointView, Part

TEXT_MODELS: Mapping[str, str] = {"Gemma4ForConditionalGeneration": "Gemma4ForCausalLM"}
OF_BOTH = ("dtype", "torch_dtype", "quantization_config", "eos_token_id")  # shared by all parts
TEXT = "model.language_model."
OTHER_PARTS = tuple(
    f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that is about the text model; all of it for a text-only model."""
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
            f"config field text_config={text!r}: {architecture} needs the config of its text model"
        )
    common = {field: config[field] for field in OF_BOTH if field in config}
    return {**common, **text, "architectures": [TEXT_MODELS[architecture]]}


@final
class TextCheckpoint(CheckpointView):
    """View of a multimodal checkpoint that shows its text model only."""

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        names = (name for name in stored.names() if not name.startswith(OTHER_PARTS))
        self._stored_as = {
            f"model.{name.removeprefix(TEXT)}" if name.startswith(TEXT) else name: name
            for name in names
        }

    def names(self) -> Collection[str]:
        return self._stored_as.keys()

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._stored_as.get(name, name))

    def read_part(self, name: str, *wanted: slice) -> Part:
        return self._stored.read_part(self._stored_as.get(name, name), *wanted)
