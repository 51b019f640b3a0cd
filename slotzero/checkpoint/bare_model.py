"""A checkpoint of a model without its language model head, as embedding models are published.

transformers saves a bare model (`Qwen3Model`) under names without the prefix `model.`, and without
a head. The rule: such a model is presented as the language model that it is the body of; if the
head is not the embedding, it has none, and can only compute vectors.
"""

from collections.abc import Collection, Mapping
from typing import Any, final

from torch import Tensor

from slotzero.models.checkpoint import Checkpoint, CheckpointView, Part
from slotzero.models.families.family import families

PREFIX = "model."
HEAD = "lm_head."
PARTS = ("embed_tokens.", "layers.", "norm.")


def causal_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config that names the language model of which it names the body."""
    named = config.get("architectures")
    body = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else ""
    whole = f"{body.removesuffix('Model')}ForCausalLM"
    if not body.endswith("Model") or body in families() or whole not in families():
        return dict(config)
    return {**config, "architectures": [whole]}


def whole_model(checkpoint: Checkpoint) -> Checkpoint:
    """Return a bare model as a language model; any other checkpoint as it is."""
    names = checkpoint.names()
    is_bare = any(n.startswith(PARTS) for n in names) and not any(
        n.startswith(PREFIX) for n in names
    )
    lacks_head = not any(n.startswith(HEAD) for n in names)
    if is_bare or (lacks_head and checkpoint.modules()):
        return WholeModel(checkpoint, PREFIX if is_bare else "", lacks_head)
    return checkpoint


@final
class WholeModel(CheckpointView):
    """View of a bare model with the names, and the config, of a language model."""

    def __init__(self, stored: Checkpoint, prefix: str, lacks_head: bool) -> None:
        super().__init__(stored)
        self._prefix = prefix
        if lacks_head and not self.config.get("tie_word_embeddings"):
            self.config = {**self.config, "tie_word_embeddings": True}
            self.has_head = False

    def names(self) -> Collection[str]:
        return [self._shown(name) for name in self._stored.names()]

    def read(self, name: str) -> Tensor:
        return self._stored.read(self._name(name))

    def read_part(self, name: str, *wanted: slice) -> Part:
        return self._stored.read_part(self._name(name), *wanted)

    def _shown(self, name: str) -> str:
        return f"{self._prefix}{name}" if name.startswith(PARTS) else name

    def _name(self, shown: str) -> str:
        return shown.removeprefix(self._prefix)
