"""The speculation part of a kernel set: drafts, trees of drafts, and the tables between passes."""

from abc import ABC, abstractmethod

from torch import Tensor

from slotzero.kernels.types import Branches, PagedKv, Rows, Tokens
from slotzero.kernels.types_speculation import (
    Candidates,
    DraftRows,
    DraftTables,
    DraftTargets,
    TreeFront,
    TreeStep,
)
from slotzero.sampling.tables import Sampled, SamplingTables


class SpeculationKernels(ABC):
    """Every row of these steps has W tokens: row r has tokens [r * W, (r + 1) * W).

    Tokens past the real ones are slot 0; `Rows.counts` includes them. A slot other than 0 has one
    row. A tensor [slots + 1, ...] is a table.
    """

    @abstractmethod
    def locate_drafts(
        self,
        slots: Tensor,
        tables: DraftTables,
        tokens: Tokens,
        verify_len: Tensor,  # [R]
    ) -> tuple[Rows, Tensor]:
        """Lay out the tokens to verify: the newest token of each slot and its valid drafts, as many
        as W and the limit allow. `verify_len` is their number, 0 where the slot has no room for
        another token -> the rows, and [T]: the length after each token."""

    @abstractmethod
    def locate_confirmed(
        self, slots: Tensor, length: Tensor, drafter_len: Tensor, tokens: Tokens
    ) -> tuple[Rows, Tensor]:
        """Lay out the tokens between drafter_len and length -> the rows, and [R]: the index of each
        row's last token, or of its first one if it has no new token."""

    @abstractmethod
    def accept(
        self,
        slots: Tensor,
        verify_len: Tensor,  # [R], from locate_drafts
        sampled: Tensor,  # [R, W]: the token sampled after each token
        tables: DraftTables,
        num_confirmed: Tensor,  # [R]
    ) -> None:
        """Accept drafts up to the first that differs from the token sampled in its place.

        Writes the accepted tokens and the one sampled after them, and advances the length;
        num_confirmed counts them.
        """

    @abstractmethod
    def store_features(
        self, slots: Tensor, counts: Tensor, x: Tensor, table: Tensor, path: Tensor | None = None
    ) -> None:
        """Copy the first counts[r] rows of x [R * W, size] to the slot's places in table
        [slots + 1, W or more, size], in the order of path [R, W] if it is given."""

    @abstractmethod
    def store_last(self, slots: Tensor, last: Tensor, x: Tensor, table: Tensor) -> None:
        """Copy x[last[r]] to the slot of row r in table [slots + 1, size]; for slot 0, `last` is
        any valid index."""

    @abstractmethod
    def store_next(self, tokens: Tokens, drafter_len: Tensor, x: Tensor, table: Tensor) -> None:
        """Copy x [T, size], one token for each slot, to place position - drafter_len of its slot in
        table [slots + 1, W, size], if there is such a place."""

    @abstractmethod
    def set_drafter_len(
        self, rows: Rows, tokens: Tokens, last: Tensor, drafter_len: Tensor
    ) -> None:
        """Set drafter_len of each slot to the end of its row, whose last token is last[r]."""

    @abstractmethod
    def load_features(self, slots: Tensor, table: Tensor) -> Tensor:
        """Return the slots' rows of table [slots + 1, W, size] -> [R * W, size]."""

    @abstractmethod
    def draft_budget(self, slots: Tensor, tables: DraftTables, most: int) -> DraftRows:
        """Return how many drafts each slot gets: none if the request wants none or does not sample
        yet, and no more than `most` and than can be verified."""

    @abstractmethod
    def draft_targets(self, rows: DraftRows, steps: int, behind: int) -> DraftTargets:
        """Return the positions of the next `steps` drafts of each row, of which the first `num` are
        made. behind is 0 for drafters that compute from the newest token, and 1 for those that
        compute from (token, hidden state) pairs."""

    @abstractmethod
    def store_drafts(self, slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor) -> None:
        """Write ids[r] at positions[r] of the slot's tokens."""

    @abstractmethod
    def propose_ngrams(
        self, rows: DraftRows, tokens: Tensor, steps: int, shortest: int, longest: int
    ) -> Tensor:
        """Draft the tokens that followed the latest of the longest earlier matches of the newest
        tokens, of `shortest` to `longest` tokens -> [R]: num, or 0 where there is no match."""

    @abstractmethod
    def set_num_drafts(self, rows: DraftRows, tables: DraftTables) -> None:
        """Record that each slot has rows.num drafts, valid at rows.length."""

    @abstractmethod
    def expand_draft_vocab(self, logits: Tensor, draft_of: Tensor) -> Tensor:
        """Map logits [R, draft_vocab] to the full vocabulary [R, vocab]: draft_of [vocab] is the
        draft token of each token; -1: it has none, and its logit is -inf."""

    # Trees. The root of a tree, node 0, is the newest token; a parent precedes its children, and
    # the children of one parent differ. Node i is stored at position length + i.

    @abstractmethod
    def tree_branches(self, rows: Rows, tokens: Tokens, parents: Tensor) -> Branches:
        """Return the branches of rows of W nodes: parents is [slots + 1, W or more], and the root's
        entry is not read."""

    @abstractmethod
    def accept_tree(
        self,
        slots: Tensor,
        verify_len: Tensor,
        sampled: Tensor,  # [R, W]: the token sampled after each node
        parents: Tensor,
        branches: Branches,
        tables: DraftTables,
        num_confirmed: Tensor,
        path: Tensor,  # [R, W]
    ) -> None:
        """Accept the path of nodes whose tokens equal the token sampled after their parent, like
        `accept`. `path` gets these nodes from the root on, then zeros."""

    @abstractmethod
    def move_kv(
        self,
        slots: Tensor,
        length: Tensor,  # after accept_tree
        num_confirmed: Tensor,
        path: Tensor,
        kv: PagedKv,  # stacked: [layers, pages, ...]
    ) -> None:
        """Move the stored KV of the path's nodes to the positions of their tokens."""

    @abstractmethod
    def grow_tree(
        self,
        rows: DraftRows,
        drawn: Sampled,  # for the newest token of each row, or for its front
        front: TreeFront | None,
        candidates: Candidates,
        at: TreeStep,
        tables: SamplingTables,
    ) -> TreeFront:
        """Add `topk` candidates after each node of the front: the drawn token, scored like the
        likeliest, and the likeliest others; for a request with penalties only the drawn one, since
        penalties count the tokens of one sequence. The best `topk` of the step are the next front.
        Their tokens are written behind the newest token, those of step s from place s * topk on,
        while there is room."""

    @abstractmethod
    def select_nodes(
        self, rows: DraftRows, candidates: Candidates, most: int, tokens: Tensor, parents: Tensor
    ) -> Tensor:
        """Write the tokens and parents of each row's best candidates, in the order in which they
        were made -> [R]: their number, at most `most` and rows.num. Of equal scores the earlier is
        better, so that a parent is better than its children."""
