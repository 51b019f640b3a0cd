"""The shape of a draft tree, and the number of KV positions that drafts occupy.

It does not know tensors, so that settings can be validated without torch.
"""

from dataclasses import dataclass

from slotzero.errors import ConfigError

MAX_PLACES = 63
"""Maximum number of nodes of a tree: the bits of an int64 without its sign."""


@dataclass(frozen=True)
class TreeShape:
    """How a draft tree is grown, and how many of its nodes are verified."""

    steps: int
    topk: int
    """Number of drafts after each token, and number of tokens that each drafting step extends."""
    num_nodes: int
    """Number of tokens that are verified: the newest token and the best drafts."""

    def __post_init__(self) -> None:
        most = min(MAX_PLACES, 1 + self.num_candidates)
        if not 2 <= self.num_nodes <= most:
            raise ConfigError(
                f"speculative_num_draft_tokens={self.num_nodes}: must be 2 to {most} for "
                f"{self.steps} steps of {self.topk} drafts"
            )
        if self.num_grown > MAX_PLACES:
            raise ConfigError(
                f"speculative_steps={self.steps} with speculative_topk={self.topk}: a tree can be "
                f"grown from at most {MAX_PLACES} drafts; lower one of them"
            )

    @classmethod
    def of(cls, steps: int, topk: int, num_nodes: int | None) -> "TreeShape":
        if num_nodes is None:
            num_nodes = min(1 + steps * topk, MAX_PLACES)
        return cls(steps, topk, num_nodes)

    @property
    def num_candidates(self) -> int:
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def num_grown(self) -> int:
        """Number of drafts that the tree is grown from."""
        return (self.steps - 1) * self.topk

    @property
    def num_places(self) -> int:
        """Maximum number of KV positions after the newest token that the tree occupies, both while
        it is grown and while it is verified."""
        return max(self.num_nodes - 1, self.num_grown)


def places_ahead(width: int, tree: TreeShape | None) -> int:
    """Return the number of positions after the newest token that drafts may occupy.

    These are the positions of the tree, or, without a tree, of a row of `width` tokens.
    """
    return width - 1 if tree is None else tree.num_places
