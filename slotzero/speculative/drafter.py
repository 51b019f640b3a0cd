"""The contract of a drafter: it guesses what a request's next tokens are, and is never believed.

What it knows of a request is by slot: its own KV, and tables. `extend` follows the target over
tokens that are certain, `defer` leaves that for later; `draft` writes guesses where the tokens
would be, past the newest one. A guess that is wrong costs time and nothing else, since every one is
verified. It does not know requests, steps, or how many of its guesses were right.

The rule: where it guesses, it has followed to the newest token.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.graph import Pieces
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types import Branches, Rows, Tokens
from slotzero.kernels.types_speculation import DraftRows
from slotzero.models.blocks.attention import KvGroup
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import DrafterInputs
from slotzero.sampling.params import MAX_LOGPROBS
from slotzero.sampling.tables import Sampled, SamplingTables, TableSpec

NUM_DRAFTS, DRAFTED_AT = "num_drafts", "drafted_at"
LIMIT, PAGED, SPECULATES, DRAFTER_LEN = "limit", "paged", "speculates", "drafter_len"
NO_DRAFT = -1
FEATURES = "features"
MOST_PENDING = 16
"""Tokens by which a drafter may be behind; they are caught up with at once."""

SPECULATION_TABLES = (
    TableSpec(LIMIT, 1, "int32", 0),  # tokens that the request may have, prompt and answer
    TableSpec(PAGED, 1, "int32", 0),  # positions that have pages
    TableSpec(SPECULATES, 1, "int32", 0),  # whether drafts are wanted
    TableSpec(NUM_DRAFTS, 1, "int32", 0),
    TableSpec(DRAFTED_AT, 1, "int32", NO_DRAFT),  # drafts are good only at this length
    TableSpec(DRAFTER_LEN, 1, "int32", 0),  # the drafter has computed all positions before
)


class Drafter(ABC):  # a DrafterHook
    name: str
    groups: tuple[KvGroup, ...] = ()
    """Of its own layers."""
    taps: tuple[int, ...] = ()
    writes: tuple[str, ...] = ()
    """Outputs of every pass of its layers."""
    states: tuple[str, ...] = ()
    """Tables by slot, which no host writes: what the next guess is made from."""
    num_turns: int = 1
    """Layers that take turns: each stores one place behind the one before, and goes on from its
    state."""

    def __init__(self, kernels: Kernels, tables: SlotTables, pending: Tensor) -> None:
        """pending: [slots + 1, MOST_PENDING or more, taps * hidden], what it wants to know of
        tokens from where it followed to on"""
        self.kernels, self.tables, self.pending = kernels, tables, pending

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None:
        tokens, rows, _, last = inputs
        self.kernels.follow(rows, tokens, last, self.tables[DRAFTER_LEN])

    def defer(self, tokens: Tokens, features: Tensor) -> None:
        drafter_len = self.tables[DRAFTER_LEN]
        self.kernels.keep_next(tokens, drafter_len, features, self.pending)

    @abstractmethod
    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        """Guesses tokens [length + 1, length + 1 + num) of each slot, num <= steps -> how many it
        has guessed, num or fewer. A slot whose num is 0 is left alone."""

    def writes_of(self, steps: int) -> tuple[str, ...]:
        """Of a draft of so many steps."""
        return self.writes

    def write(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        self.kernels.record_ngrams(slots, positions, ids, self.tables["tokens"])


class Guess(NamedTuple):
    state: Tensor | None  # [T, size]: what the next guess is made from, beside the tokens
    logits: Tensor  # [T, vocab]


class LogitsDrafter(Drafter):
    """Who guesses one token after another, from logits, with KV of its own or the target's."""

    behind: int
    """1 if it computes pairs, which stand one place before their token; 0 if it computes tokens."""

    @abstractmethod
    def first(self, tokens: Tokens, pieces: Pieces) -> Guess:
        """What follows the newest tokens, or the pairs that they end, [R]."""

    @abstractmethod
    def next(
        self,
        tokens: Tokens,
        state: Tensor | None,  # of the token before each of these
        pieces: Pieces,
        rows: Rows | None = None,
        branches: Branches | None = None,
    ) -> Guess:
        """What follows these, which were guessed before: one of each row, or a tree's."""

    def writes_of(self, steps: int) -> tuple[str, ...]:
        """The newest pair is computed already."""
        return self.writes if steps > self.behind else ()

    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        aims = self.kernels.draft_targets(DraftRows(slots, length, num), steps, self.behind)
        state = None
        for i, (wanted, place, after) in enumerate(zip(*aims, strict=True)):
            tokens = Tokens(wanted, place)
            if i:
                state, logits = self.next(tokens, state, pieces)
            else:
                state, logits = self.first(tokens, pieces)
            drawn = self.sample(logits, wanted, after, self.tables.sampling)
            self.write(wanted, after, drawn.tokens)
        return num

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables
    ) -> Sampled:
        """What would be sampled from these logits [R, vocab] at these positions. The target will be
        asked the same with the same noise, so that it will often answer the same."""
        rows = len(slots)
        drawn = Sampled(
            logits.new_empty(rows, dtype=torch.int32),
            logits.new_empty(rows, dtype=torch.float32),
            logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.int32),
            logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.float32),
        )
        self.kernels.sample(logits, slots, positions, tables, drawn)
        return drawn
