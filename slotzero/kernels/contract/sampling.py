"""The start and the end of a step: decode positions, sampling, and the update of the tables."""

from abc import ABC, abstractmethod

from torch import Tensor

from slotzero.sampling.tables import Sampled, SamplingTables


class SamplingKernels(ABC):
    @abstractmethod
    def decode_positions(
        self, slots: Tensor, length: Tensor, token_slots: Tensor, positions: Tensor, after: Tensor
    ) -> None:
        """Write slot, position (the length of the slot) and next length of each token of a decode
        step."""

    @abstractmethod
    def sample(
        self,
        logits: Tensor,  # [rows, vocab]
        slots: Tensor,
        positions: Tensor,  # [rows]: the index that the new token will have
        tables: SamplingTables,
        out: Sampled,
    ) -> None:
        """Sample the next token of each row, as sampling/reference.py defines it."""

    @abstractmethod
    def advance(
        self,
        slots: Tensor,
        new_length: Tensor,
        target: Tensor,
        length: Tensor,
        tokens: Tensor,
        sampled: Tensor,
    ) -> None:
        """Set each slot's length to new_length and, if that has reached the target, append the
        sampled token; elsewhere `sampled` becomes 0."""
