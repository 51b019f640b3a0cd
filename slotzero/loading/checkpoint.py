"""The contract of a checkpoint: a Hugging Face style config, and tensors by Hugging Face name.

It does not know models: `models/weights.py` decides which names it wants and how they are laid out.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from slotzero.tokenizer import Tokenizer


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

    @abstractmethod
    def tokenizer(self) -> "Tokenizer":
        """The checkpoint's tokenizer with its chat template; raises TokenizerMissingError."""
