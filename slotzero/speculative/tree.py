"""Draft trees: several alternatives after each token, of which the best become the draft.

A tree grows step by step from its front, the best nodes of the previous step. Every node is kept
with the probability of its path, and finally the best of all are written: their tokens after the
newest one, and the parent of each. This module works with any drafter that has logits.
"""

import torch
from torch import Tensor

from slotzero.graph import Pieces, Registry
from slotzero.kernels.types import Tokens
from slotzero.kernels.types_speculation import Candidates, DraftRows, TreeStep
from slotzero.sampling.tables import TableSpec
from slotzero.speculative.drafter import LogitsDrafter
from slotzero.tree_shape import TreeShape

PARENTS = "draft_parents"


def tree_tables(shape: TreeShape) -> tuple[TableSpec, ...]:
    """Return the table of parents: the node that each node follows; the root follows none."""
    return (TableSpec(PARENTS, shape.num_nodes, "int32", 0, is_matrix=True, chosen_from="logits"),)


class Trees:
    """Draft trees, grown from a drafter's logits."""

    def __init__(self, drafter: LogitsDrafter, shape: TreeShape, registry: Registry) -> None:
        self.shape = shape
        self._drafter = drafter
        self.parents = drafter.tables[PARENTS]
        likeliest = torch.full_like(drafter.tables.length, shape.topk)
        likeliest = registry.constant("num_likeliest", likeliest)
        raw = registry.constant("raw_logprobs", torch.zeros_like(likeliest))
        self._tables = drafter.tables.sampling._replace(num_logprobs=likeliest, logprobs_mode=raw)

    def draft(self, slots: Tensor, length: Tensor, room: Tensor, pieces: Pieces) -> Tensor:
        """Draft a tree per slot, and return how many nodes each has. `room` [R]: places after the
        newest token."""
        drafter, shape, tables = self._drafter, self.shape, self._tables
        kernels, behind = drafter.kernels, drafter.behind
        aims = kernels.draft_targets(DraftRows(slots, length, room), 1, behind)
        owners, place, after = (part[0] for part in aims)
        rows = DraftRows(owners, length, room)
        candidates = self._empty(len(slots), length)
        state, logits = drafter.first(Tokens(owners, place), pieces)
        drawn, front = drafter.sample(logits, owners, after, tables), None
        for step in range(shape.steps):
            if front is not None:
                if state is not None:
                    state = state.index_select(0, front.origins)
                state, logits = drafter.next(
                    front.tokens, state, pieces, front.rows, front.branches
                )
                drawn = drafter.sample(logits, front.tokens.slots, front.after, tables)
            front = kernels.grow_tree(
                rows, drawn, front, candidates, TreeStep(step, shape.topk, behind), tables
            )
        most = shape.num_nodes - 1
        return kernels.select_nodes(rows, candidates, most, tables.tokens, self.parents)

    def _empty(self, num_rows: int, like: Tensor) -> Candidates:
        size = num_rows, self.shape.num_candidates
        ids, scores, parents = (
            like.new_empty(size, dtype=dtype) for dtype in (torch.int32, torch.float32, torch.int32)
        )
        return Candidates(ids, scores, parents)
