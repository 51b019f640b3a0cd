"""The language model of a multimodal checkpoint.

Slotzero supports text only: the server refuses images and audio by name, and the tensors that
encode them are never read. A family lists in `Family.multimodal` the architectures whose language
model it is; their config.json has its config in `text_config`. The rule: a tensor that belongs
neither to the language model nor to the parts below keeps its name, and loading fails if the model
does not use it.
"""

from collections.abc import Collection, Mapping
from typing import Any, final

from torch import Tensor

from slotzero.errors import UnsupportedModelError
from slotzero.models.checkpoint import Checkpoint, CheckpointView, Part
from slotzero.models.families.family import language_models

COMMON_FIELDS = (  # for all parts, unless text_config has its own
    "dtype", "torch_dtype", "quantization_config", "eos_token_id", "tie_word_embeddings",
)  # fmt: skip
PREFIXES: Mapping[str, str] = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",  # before transformers 4.52, and still on the hub
    "language_model.lm_head.": "lm_head.",
}
"""What the names of the language model's tensors begin with, and what replaces it."""
OTHER_PARTS = tuple(
    f"{prefix}{part}."
    for prefix in ("model.", "")
    for part in (
        "vision_tower", "vision_model", "visual", "multi_modal_projector", "mm_projector",
        "embed_vision", "audio_tower", "embed_audio",
    )
)  # fmt: skip


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the language model; for a text-only model, that is the whole config."""
    architectures = config.get("architectures") or [""]
    if not isinstance(architectures, list) or not isinstance(architectures[0], str):
        raise UnsupportedModelError(
            f"config field architectures={architectures!r}: must be a list of names"
        )
    (architecture, *_) = architectures
    known = language_models(architecture)
    if not known:
        return dict(config)
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        raise UnsupportedModelError(
            f"config field text_config={text!r}: must be the config of the text model of "
            f"{architecture}"
        )
    model_type, only = text.get("model_type"), next(iter(known)) if len(known) == 1 else ""
    family = known.get(model_type or only)
    if family is None:
        raise UnsupportedModelError(
            f"config field text_config.model_type={model_type!r} is not supported for "
            f"{architecture}; supported: {', '.join(known)}"
        )
    common = {field: config[field] for field in COMMON_FIELDS if field in config}
    named = {"model_type": family.model_type, "architectures": [family.architecture]}
    return {**common, **text, **named}


def text_part(checkpoint: Checkpoint) -> Checkpoint:
    """Return the language model of a multimodal checkpoint; any other checkpoint as it is."""
    is_multimodal = any(name.startswith(tuple(PREFIXES)) for name in checkpoint.names())
    return TextCheckpoint(checkpoint) if is_multimodal else checkpoint


@final
class TextCheckpoint(CheckpointView):
    """View of a multimodal checkpoint that presents its language model only."""

    def __init__(self, stored: Checkpoint) -> None:
        super().__init__(stored)
        names = (name for name in stored.names() if not name.startswith(OTHER_PARTS))
        self._stored_names = {_text_name(name): name for name in names}

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._stored_names.get(name, name))

    def read_part(self, name: str, *wanted: slice) -> Part:
        return self._stored.read_part(self._stored_names.get(name, name), *wanted)


def _text_name(name: str) -> str:
    for prefix, replacement in PREFIXES.items():
        if name.startswith(prefix):
            return replacement + name.removeprefix(prefix)
    return name
