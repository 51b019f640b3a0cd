"""The contract of a kernel set, continued: what only speculation needs done."""

from abc import ABC, abstractmethod

from torch import Tensor

from slotzero.kernels.types import Branches, PagedKv, Rows, Tokens
from slotzero.kernels.types_speculation import (
    DraftRows,
    DraftTables,
    DraftTargets,
    Guesses,
    TreeFront,
    TreeStep,
)
from slotzero.sampling.tables import Sampled, SamplingTables


class SpeculationKernels(ABC):
    """Every row of these steps has W tokens: row r has [r * W, (r + 1) * W). Those that are not
    real are slot 0; of `Rows` they count, and what they are worth nobody asks. A slot other than 0
    has one row. What is [slots + 1] and not [R] is a table."""

    @abstractmethod
    def locate_drafts(
        self,
        slots: Tensor,
        tables: DraftTables,
        tokens: Tokens,
        num_tried: Tensor,  # [R]
    ) -> tuple[Rows, Tensor]:
        """Who is verified: the newest token of each slot, and as many of its drafts as are good and
        as W and the limit have room for, `num_tried` in all -> the rows, and [T]: the length after
        each token. Where not even one more token may come, nobody is."""

    @abstractmethod
    def locate_new(
        self, slots: Tensor, length: Tensor, drafter_len: Tensor, tokens: Tokens
    ) -> tuple[Rows, Tensor]:
        """What lies between where a slot was followed to and its length -> the rows, and [R]: which
        token is the last of each; the first one where there is none."""

    @abstractmethod
    def accept(
        self,
        slots: Tensor,
        num_tried: Tensor,  # [R], from locate_drafts
        sampled: Tensor,  # [R, W]: what follows each token
        tables: DraftTables,
        num_verified: Tensor,  # [R]
    ) -> None:
        """A draft is right if it is what was sampled in its place, and so were all before it. What
        was sampled is written in the place of those, and once behind them; that many tokens are
        verified."""

    @abstractmethod
    def store_features(
        self, slots: Tensor, counts: Tensor, x: Tensor, table: Tensor, path: Tensor | None = None
    ) -> None:
        """Of each row of x [R * W, size], the first `counts` [R] of `path` [R, W] go to the places
        of its slot in table [slots + 1, W or more, size]. Without a path, one after another."""

    @abstractmethod
    def keep_last(self, slots: Tensor, last: Tensor, x: Tensor, table: Tensor) -> None:
        """Of each row, x[last] goes to its slot in table [slots + 1, size]. Of slot 0 `last` is
        anything that x has."""

    @abstractmethod
    def keep_next(self, tokens: Tokens, drafter_len: Tensor, x: Tensor, table: Tensor) -> None:
        """Of each token, one of a slot, x [T, size] goes to its slot in table [slots + 1, W, size],
        to as many places from the first as it stands behind where its slot was followed to."""

    @abstractmethod
    def follow(self, rows: Rows, tokens: Tokens, last: Tensor, drafter_len: Tensor) -> None:
        """Each slot is followed to the end of its row, whose last token `last` [R] names."""

    @abstractmethod
    def load_features(self, slots: Tensor, table: Tensor) -> Tensor:
        """table [slots + 1, W, size] -> [R * W, size]"""

    @abstractmethod
    def draft_budget(self, slots: Tensor, tables: DraftTables, most: int) -> DraftRows:
        """-> [R]: the length of each slot, and how many drafts it gets: none if it wants none or is
        not sampled yet, and no more than can be verified."""

    @abstractmethod
    def draft_targets(self, rows: DraftRows, steps: int, behind: int) -> DraftTargets:
        """The first `num` [R] of so many guesses of each slot. Who computes from the newest token
        is not behind; who computes from pairs is behind by 1. All are of lengths [R]."""

    @abstractmethod
    def record_ngrams(self, slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor) -> None:
        """Writes a token of each slot in its place."""

    @abstractmethod
    def propose_ngrams(
        self, rows: DraftRows, tokens: Tensor, steps: int, shortest: int, longest: int
    ) -> Tensor:
        """Writes `num` [R] <= steps guesses behind the newest token of each slot: what followed
        where its newest tokens stood before, `longest` of them or fewer; the longest match wins,
        and of equals the latest -> [R]: num, or 0 where no match is `shortest`."""

    @abstractmethod
    def close_draft(self, rows: DraftRows, tables: DraftTables) -> None:
        """Each slot has `num` [R] drafts that are good at `length` [R]."""

    @abstractmethod
    def expand_draft_vocab(self, logits: Tensor, draft_of: Tensor) -> Tensor:
        """[R, draft_vocab], and for each token which of those it is, [vocab] -> [R, vocab]; where
        it is none, -1, its logit is -inf."""

    # Trees. A tree of W nodes has the newest token for its root, node 0; a node's parent comes
    # before it, and children of one parent differ. Node i is stored at place length + i.

    @abstractmethod
    def branch(self, rows: Rows, tokens: Tokens, parents: Tensor) -> Branches:
        """Of rows of W nodes: parents [slots + 1, W or more]; what is there for the root is not
        read."""

    @abstractmethod
    def accept_tree(
        self,
        slots: Tensor,
        num_tried: Tensor,
        sampled: Tensor,  # [R, W]: what follows each node
        parents: Tensor,
        branches: Branches,
        tables: DraftTables,
        num_verified: Tensor,
        path: Tensor,  # [R, W]
    ) -> None:
        """As `accept`: a node is right if it is what was sampled after its parent, and its parent
        is right. `path` begins with those that are, from the root on; then come zeros."""

    @abstractmethod
    def move_kv(
        self,
        slots: Tensor,
        length: Tensor,  # after accept_tree
        num_verified: Tensor,
        path: Tensor,
        kv: PagedKv,  # stacked: [layers, pages, ...]
    ) -> None:
        """What was stored for the nodes of a path goes where their tokens now stand."""

    @abstractmethod
    def grow_tree(
        self,
        rows: DraftRows,
        drawn: Sampled,  # for the newest token of each row, or for its front
        front: TreeFront | None,
        guesses: Guesses,
        at: TreeStep,
        tables: SamplingTables,
    ) -> TreeFront:
        """Takes `topk` guesses after each token of the front: what was drawn, which counts like the
        likeliest, and the likeliest others. Of a request with penalties only the first, since what
        they count are tokens one after another. The best `topk` of this step are the next front:
        written behind the newest token, those of step s from place s * topk on, while there is
        room."""

    @abstractmethod
    def select(
        self, rows: DraftRows, guesses: Guesses, most: int, tokens: Tensor, parents: Tensor
    ) -> Tensor:
        """The best guesses of each row become its tree: their tokens and parents are written, in
        the order in which they were made -> [R]: how many, as `most` and room allow. Of equals the
        earlier is better, so that a parent is better than its children."""
