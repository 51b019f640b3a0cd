"""New weights that a caller passes as named tensors, wrapped as a checkpoint."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any, final

from torch import Tensor

from slotzero.checkpoint.bare_model import whole_model
from slotzero.checkpoint.joint_experts import separate_experts
from slotzero.checkpoint.text_part import text_part
from slotzero.errors import TokenizerMissingError, WeightUpdateError
from slotzero.models.checkpoint import Checkpoint
from slotzero.text.tokenizer import Tokenizer

NAME = "weight update"

NamedTensors = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
"""Tensors, with their names in the model's checkpoint."""


def checkpoint_of_tensors(config: Mapping[str, Any], named: NamedTensors) -> Checkpoint:
    """Return the tensors as a checkpoint of the model with this config.

    All of them are collected before the update, so that an invalid one changes nothing.
    """
    tensors = dict[str, Tensor]()
    for name, tensor in named.items() if isinstance(named, Mapping) else named:
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise WeightUpdateError(
                f"{NAME}: {name!r:.80} is given with a {type(tensor).__name__}; pass pairs of a "
                "name and a tensor"
            )
        if name in tensors:
            raise WeightUpdateError(f"{NAME}: tensor {name} is given twice")
        tensor = tensor.detach()
        tensors[name] = tensor.cpu() if config.get("quantization_config") else tensor
    return separate_experts(whole_model(text_part(_TensorCheckpoint(config, tensors))))


@final
class _TensorCheckpoint(Checkpoint):
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        self.name, self.config, self.eos_token_ids = NAME, config, ()
        self._tensors = tensors

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def tokenizer(self) -> Tokenizer:
        raise TokenizerMissingError(f"{self.name}: it has no tokenizer")
