"""The contract of a checkpoint: a config and named tensors, both in Hugging Face's format.

A checkpoint does not know models: `models/weights.py` decides which tensors a model needs and how
their values are laid out in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import torch

    from slotzero.text.tokenizer import Tokenizer


class Part(NamedTuple):
    """The requested part of a tensor; empty if the request has the wrong number of dimensions."""

    tensor: "torch.Tensor"
    whole: tuple[int, ...]  # shape of the whole tensor


def part_of(tensor: "torch.Tensor", *wanted: slice) -> Part:
    whole = tuple(tensor.shape)
    return Part(tensor[wanted] if len(whole) == len(wanted) else tensor[:0], whole)


class Checkpoint(ABC):
    """Source of a model's config, tensors and tokenizer.

    `config` has the fields of config.json. A GGUF file has none, so its metadata is translated into
    the same fields.
    """

    name: str
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    has_head: bool = True
    """Whether there are logits. Without, the config ties the head to the embedding, and what it
    would compute has no meaning."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """Return the names of all tensors, such as `model.layers.0.self_attn.q_proj.weight`."""

    @abstractmethod
    def read(self, name: str) -> "torch.Tensor":
        """Read a tensor to the CPU, in Hugging Face's layout, in its stored dtype or float32."""

    def read_part(self, name: str, *wanted: slice) -> Part:
        """Read the `wanted` slice of each axis of a tensor.

        By default the whole tensor is read; a checkpoint that can read less overrides this.
        """
        return part_of(self.read(name), *wanted)

    @abstractmethod
    def tokenizer(self) -> "Tokenizer":
        """Load the tokenizer with its chat template.

        Raises TokenizerMissingError if the checkpoint has no tokenizer.
        """

    def sampling(self) -> Mapping[str, Any]:
        """Return the checkpoint's defaults for fields of SamplingParams that a request leaves out.

        They come from generation_config.json, if there is one.
        """
        return {}

    def modules(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        """Return the modules of sentence-transformers, each with its type and its config.

        They come from modules.json, if there is one.
        """
        return ()


class CheckpointView(Checkpoint):
    """Wrapper that presents some tensors of another checkpoint differently from how it stores them.

    For example, it renames tensors.
    """

    def __init__(self, stored: Checkpoint) -> None:
        self._stored = stored
        self.name = stored.name
        self.config = stored.config
        self.eos_token_ids = stored.eos_token_ids
        self.has_head = stored.has_head

    def tokenizer(self) -> "Tokenizer":
        return self._stored.tokenizer()

    def sampling(self) -> Mapping[str, Any]:
        return self._stored.sampling()

    def modules(self) -> Sequence[tuple[str, Mapping[str, Any]]]:
        return self._stored.modules()
