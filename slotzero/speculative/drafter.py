"""The contract of a drafter, which predicts a request's next tokens; every draft is verified.

Its state is by slot: its own KV cache, and tables. `extend` processes confirmed tokens, `defer`
postpones that; `draft` writes draft tokens into the places after the newest token. A wrong draft
costs only time. A drafter does not know requests, steps, or how many of its drafts were accepted.

The rule: before it drafts, it has processed all tokens up to the newest one.
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
"""Most tokens by which a drafter may lag behind; it catches up on all of them at once."""

SPECULATION_TABLES = (
    TableSpec(LIMIT, 1, "int32", 0),  # most tokens of the request, prompt plus answer
    TableSpec(PAGED, 1, "int32", 0),  # positions that have pages
    TableSpec(SPECULATES, 1, "int32", 0),  # whether the request uses speculation
    TableSpec(NUM_DRAFTS, 1, "int32", 0),
    TableSpec(DRAFTED_AT, 1, "int32", NO_DRAFT),  # the length at which the drafts are valid
    TableSpec(DRAFTER_LEN, 1, "int32", 0),  # the drafter has computed all earlier positions
)


class Drafter(ABC):  # a DrafterHook
    name: str
    groups: tuple[KvGroup, ...] = ()
    """KV groups of its own layers."""
    taps: tuple[int, ...] = ()
    writes: tuple[str, ...] = ()
    """Outputs of every pass of its layers."""
    states: tuple[str, ...] = ()
    """Tables by slot that only the device writes: the states from which the next draft is made."""
    num_turns: int = 1
    """Number of layers that take turns: each stores its KV one place behind the layer before, and
    continues from its state."""

    def __init__(self, kernels: Kernels, tables: SlotTables, pending: Tensor) -> None:
        """`pending`: [slots + 1, MOST_PENDING or more, taps * hidden], features of the tokens that
        it has not processed yet."""
        self.kernels, self.tables, self.pending = kernels, tables, pending

    def extend(self, inputs: DrafterInputs, pieces: Pieces) -> None:
        tokens, rows, _, last = inputs
        self.kernels.set_drafter_len(rows, tokens, last, self.tables[DRAFTER_LEN])

    def defer(self, tokens: Tokens, features: Tensor) -> None:
        drafter_len = self.tables[DRAFTER_LEN]
        self.kernels.store_next(tokens, drafter_len, features, self.pending)

    @abstractmethod
    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        """Draft tokens [length + 1, length + 1 + num) of each slot, num <= steps, and return how
        many were drafted, at most num. A slot whose num is 0 is not changed."""

    def writes_of(self, steps: int) -> tuple[str, ...]:
        """Return the outputs that a draft of this many steps writes."""
        return self.writes

    def write(self, slots: Tensor, positions: Tensor, ids: Tensor) -> None:
        self.kernels.store_drafts(slots, positions, ids, self.tables.tokens)


class Prediction(NamedTuple):
    state: Tensor | None  # [T, size]: state for the next draft token
    logits: Tensor  # [T, vocab]


class LogitsDrafter(Drafter):
    """A drafter that drafts one token after another from logits, with its own KV cache or the
    target's."""

    behind: int
    """1 if it computes (state, next token) pairs, stored one place before the token; 0 if it
    computes tokens."""

    @abstractmethod
    def first(self, tokens: Tokens, pieces: Pieces) -> Prediction:
        """Predict what follows the newest tokens, or the pairs that end with them, [R]."""

    @abstractmethod
    def next(
        self,
        tokens: Tokens,
        state: Tensor | None,  # of the token before each of these
        pieces: Pieces,
        rows: Rows | None = None,
        branches: Branches | None = None,
    ) -> Prediction:
        """Predict what follows these draft tokens: one per row, or those of a tree."""

    def writes_of(self, steps: int) -> tuple[str, ...]:
        """Return the outputs that a draft writes; the newest pair is computed already."""
        return self.writes if steps > self.behind else ()

    def draft(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, pieces: Pieces
    ) -> Tensor:
        aims = self.kernels.draft_targets(DraftRows(slots, length, num), steps, self.behind)
        state = None
        for i, (owners, place, after) in enumerate(zip(*aims, strict=True)):
            tokens = Tokens(owners, place)
            if i:
                state, logits = self.next(tokens, state, pieces)
            else:
                state, logits = self.first(tokens, pieces)
            drawn = self.sample(logits, owners, after, self.tables.sampling)
            self.write(owners, after, drawn.tokens)
        return num

    def sample(
        self, logits: Tensor, slots: Tensor, positions: Tensor, tables: SamplingTables
    ) -> Sampled:
        """Sample from these logits [R, vocab] at these positions. The target samples with the same
        noise later, so that it often chooses the same tokens."""
        rows = len(slots)
        drawn = Sampled(
            logits.new_empty(rows, dtype=torch.int32),
            logits.new_empty(rows, dtype=torch.float32),
            logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.int32),
            logits.new_empty(rows, MAX_LOGPROBS, dtype=torch.float32),
        )
        self.kernels.sample(logits, slots, positions, tables, drawn)
        return drawn
