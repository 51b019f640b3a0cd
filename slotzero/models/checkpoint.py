"""The contract of a checkpoint: a Hugging Face style config, and tensors by Hugging Face name.

It does not know models: `models/weights.py` decides which names it wants and how they are laid out.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from slotzero.text.tokenizer import Tokenizer


class Part(NamedTuple):
    """Of a tensor, what was asked for; nothing where it has another number of dimensions."""

    tensor: "torch.Tensor"
    whole: tuple[int, ...]  # its shape


class Checkpoint(ABC):
    """`config` is what config.json holds (for GGUF: the same fields, made from its metadata)."""

    name: str
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]

    @abstractmethod
    def names(self) -> Collection[str]:
        """Tensor names, as Hugging Face has them (`model.layers.0.self_attn.q_proj.weight`)."""

    @abstractmethod
    def read(self, name: str) -> "torch.Tensor":
        """One tensor on the CPU, in Hugging Face layout, in its stored dtype or float32."""

    def read_part(self, name: str, *wanted: slice) -> Part:
        """The same, of so much of each axis; a checkpoint that can, reads no more than that."""
        tensor = self.read(name)
        whole = tuple(tensor.shape)
        return Part(tensor[wanted] if len(whole) == len(wanted) else tensor[:0], whole)

    @abstractmethod
    def tokenizer(self) -> "Tokenizer":
        """The checkpoint's tokenizer with its chat template; raises TokenizerMissingError."""

    def sampling(self) -> Mapping[str, Any]:
        """What its makers would have for fields of SamplingParams that a request leaves out."""
        return {}


class CheckpointView(Checkpoint):
    """Another checkpoint, some of whose tensors are shown otherwise than they are stored."""

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self.name = stored.name
        self.config = stored.config
        self.eos_token_ids = stored.eos_token_ids

    def tokenizer(self) -> "Tokenizer":
        return self._stored.tokenizer()

    def sampling(self) -> Mapping[str, Any]:
        return self._stored.sampling()
