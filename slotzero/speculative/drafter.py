"""The contract of a drafter: it guesses what a request's next tokens are, and is never believed.

What it knows of a request is by slot: its own KV, and tables. `extend` follows the target over
tokens that are certain; `draft` writes guesses where the tokens would be, past the newest one. A
guess that is wrong costs time and nothing else, since every one is verified. It does not know
requests, steps, or how many of its guesses were right.
"""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels
from slotzero.models.config import KvGroup
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import Followed
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled, TableSpec

NUM_DRAFTS, DRAFTED_AT = "num_drafts", "drafted_at"
LIMIT, PAGED, SPECULATES, NUM_NEW = "limit", "paged", "speculates", "num_new"
NOWHERE = -1

SPECULATION_TABLES = (
    TableSpec(LIMIT, 1, "int32", 0),  # tokens that the request may have, prompt and answer
    TableSpec(PAGED, 1, "int32", 0),  # positions that have pages
    TableSpec(SPECULATES, 1, "int32", 0),  # whether drafts are wanted
    TableSpec(NUM_NEW, 1, "int32", 0),  # tokens that became certain when it was last verified
    TableSpec(NUM_DRAFTS, 1, "int32", 0),
    TableSpec(DRAFTED_AT, 1, "int32", NOWHERE),  # drafts are good only at this length
)


class Drafter(ABC):  # a Follower
    name: str
    groups: tuple[KvGroup, ...] = ()
    """Of its own layers."""
    taps: tuple[int, ...] = ()

    def __init__(self, kernels: Kernels, tables: SlotTables) -> None:
        self.kernels, self.tables = kernels, tables

    @abstractmethod
    def extend(self, followed: Followed, pieces: Pieces) -> None: ...

    @abstractmethod
    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        """Guesses tokens [length + 1, length + 1 + num) of each slot, num <= steps -> how many it
        has guessed, num or fewer. A slot whose num is 0 is left alone."""

    def choose(self, logits: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Writes what would be sampled from these logits [R, vocab] at these positions. The target
        will be asked the same with the same noise, so that it will often answer the same."""
        rows = len(slots)
        chosen = Sampled(
            logits.new_empty(rows, dtype=torch.int32),
            logits.new_empty(rows, dtype=torch.float32),
            logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.int32),
            logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.float32),
        )
        self.kernels.sample(logits, slots, positions, self.tables.sampling, chosen)
        self.write(slots, positions, chosen.tokens)

    def write(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        self.kernels.note(slots, positions, ids, self.tables["tokens"])
