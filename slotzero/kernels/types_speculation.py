"""Types of the speculation kernels: drafts, their tables, and trees of drafts."""

from typing import NamedTuple

from torch import Tensor

from slotzero.kernels.types import Branches, Rows, Tokens


class DraftTables(NamedTuple):
    """The tables that speculation reads and writes, [slots + 1] each but for `tokens`."""

    tokens: Tensor  # [slots + 1, max_len]
    length: Tensor  # tokens of the slot that are computed or sampled, less the newest
    target: Tensor  # the length from which on the slot samples
    limit: Tensor  # tokens that the slot may have
    paged: Tensor  # positions that have pages
    speculates: Tensor  # 0: the request wants no drafts
    num_drafts: Tensor
    drafted_at: Tensor  # the length for which the drafts are valid


class DraftRows(NamedTuple):
    """The rows of a draft pass, [R] each."""

    slots: Tensor
    length: Tensor
    num: Tensor  # drafts to make, or places for a tree behind the newest token


class DraftTargets(NamedTuple):
    """Drafts to make, one step after another, [steps, R] each; zeros where there is none."""

    slots: Tensor
    places: Tensor  # position of the token, or of the pair, that the draft is computed from
    after: Tensor  # index of the token that is drafted


class Candidates(NamedTuple):
    """All candidates for the nodes of a tree, step after step, [R, M] each."""

    ids: Tensor
    scores: Tensor  # float32: log probability of the branch; -inf: there is no such candidate
    parents: Tensor  # index of the parent candidate; -1: the newest token


class TreeStep(NamedTuple):
    """The step in which a tree grows."""

    step: int
    topk: int
    behind: int  # as in draft_targets


class TreeFront(NamedTuple):
    """The nodes from which a tree keeps growing, K per row; unused ones are slot 0."""

    tokens: Tokens  # where the nodes, or their (token, hidden state) pairs, are computed
    rows: Rows
    branches: Branches
    after: Tensor  # [T]: index of the token that is drafted next
    origins: Tensor  # [T]: the row of the logits that each node was chosen from
    nodes: Tensor  # [T]: index among the candidates
    scores: Tensor  # [T]
