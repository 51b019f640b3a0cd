"""The calls of speculation: each is one kernel of speculation.py or trees.py."""

from torch import Tensor

from slotzero.kernels.contract_speculation import SpeculationKernels
from slotzero.kernels.triton.speculation import speculation, trees
from slotzero.kernels.types import Aims, Branches, Front, Guesses, Rows, Tokens
from slotzero.sampling.tables import Sampled, SamplingTables


class TritonSpeculation(SpeculationKernels):
    def locate_drafts(
        self,
        slots: Tensor,
        length: Tensor,
        limit: Tensor,
        num_drafts: Tensor,
        drafted_at: Tensor,
        tokens: Tokens,
        num_tried: Tensor,
    ) -> tuple[Rows, Tensor]:
        return speculation.locate_drafts(
            slots, length, limit, num_drafts, drafted_at, tokens, num_tried
        )

    def locate_new(
        self, slots: Tensor, length: Tensor, drafter_len: Tensor, tokens: Tokens
    ) -> tuple[Rows, Tensor]:
        return speculation.locate_new(slots, length, drafter_len, tokens)

    def accept(
        self,
        slots: Tensor,
        num_tried: Tensor,
        sampled: Tensor,
        tokens: Tensor,
        length: Tensor,
        num_verified: Tensor,
    ) -> None:
        speculation.accept(slots, num_tried, sampled, tokens, length, num_verified)

    def store_features(
        self, slots: Tensor, counts: Tensor, x: Tensor, table: Tensor, path: Tensor | None = None
    ) -> None:
        speculation.store_features(slots, counts, x, table, path)

    def keep_last(self, slots: Tensor, last: Tensor, x: Tensor, table: Tensor) -> None:
        speculation.keep_last(slots, last, x, table)

    def keep_next(self, tokens: Tokens, drafter_len: Tensor, x: Tensor, table: Tensor) -> None:
        speculation.keep_next(tokens, drafter_len, x, table)

    def follow(self, rows: Rows, tokens: Tokens, last: Tensor, drafter_len: Tensor) -> None:
        speculation.follow(rows, tokens, last, drafter_len)

    def load_features(self, slots: Tensor, table: Tensor) -> Tensor:
        return speculation.load_features(slots, table)

    def draft_budget(
        self,
        slots: Tensor,
        length: Tensor,
        limit: Tensor,
        paged: Tensor,
        speculates: Tensor,
        target: Tensor,
        most: int,
    ) -> tuple[Tensor, Tensor]:
        return speculation.draft_budget(slots, length, limit, paged, speculates, target, most)

    def draft_targets(
        self, slots: Tensor, length: Tensor, num: Tensor, steps: int, behind: int
    ) -> Aims:
        return speculation.draft_targets(slots, length, num, steps, behind)

    def record_ngrams(self, slots: Tensor, positions: Tensor, ids: Tensor, tokens: Tensor) -> None:
        speculation.record_ngrams(slots, positions, ids, tokens)

    def propose_ngrams(
        self,
        slots: Tensor,
        length: Tensor,
        num: Tensor,
        tokens: Tensor,
        steps: int,
        shortest: int,
        longest: int,
    ) -> Tensor:
        return speculation.propose_ngrams(slots, length, num, tokens, steps, shortest, longest)

    def close_draft(
        self, slots: Tensor, length: Tensor, num: Tensor, num_drafts: Tensor, drafted_at: Tensor
    ) -> None:
        speculation.close_draft(slots, length, num, num_drafts, drafted_at)

    def expand_draft_vocab(self, logits: Tensor, draft_of: Tensor) -> Tensor:
        return speculation.expand_draft_vocab(logits, draft_of)

    def branch(self, rows: Rows, tokens: Tokens, parents: Tensor) -> Branches:
        return trees.branch(rows, tokens, parents)

    def accept_tree(
        self,
        slots: Tensor,
        num_tried: Tensor,
        sampled: Tensor,
        parents: Tensor,
        branches: Branches,
        tokens: Tensor,
        length: Tensor,
        num_verified: Tensor,
        path: Tensor,
    ) -> None:
        trees.accept_tree(
            slots, num_tried, sampled, parents, branches, tokens, length, num_verified, path,
        )  # fmt: skip

    def move_kv(
        self,
        slots: Tensor,
        length: Tensor,
        num_verified: Tensor,
        path: Tensor,
        kv_pages: Tensor,
        page_table: Tensor,
    ) -> None:
        trees.move_kv(slots, length, num_verified, path, kv_pages, page_table)

    def grow_tree(
        self,
        slots: Tensor,
        length: Tensor,
        room: Tensor,
        drawn: Sampled,
        front: Front | None,
        guesses: Guesses,
        step: int,
        topk: int,
        behind: int,
        tables: SamplingTables,
    ) -> Front:
        return trees.grow_tree(
            slots, length, room, drawn, front, guesses, step, topk, behind, tables
        )

    def select(
        self,
        slots: Tensor,
        length: Tensor,
        room: Tensor,
        guesses: Guesses,
        most: int,
        tokens: Tensor,
        parents: Tensor,
    ) -> Tensor:
        return trees.select(slots, length, room, guesses, most, tokens, parents)
