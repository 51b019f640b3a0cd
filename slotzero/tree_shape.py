"""The shape of a tree of drafts, and the places in the KV cache that drafts take.

It knows no tensors, so that settings can be checked with it.
"""

from dataclasses import dataclass

from slotzero.errors import ConfigError

MAX_PLACES = 63
"""Most places of a tree: the bits of an int64 without its sign."""


@dataclass(frozen=True)
class TreeShape:
    steps: int
    topk: int
    """Guesses after a token, and tokens from which a step goes on."""
    num_nodes: int
    """That are verified: the newest token, and the best guesses."""

    def __post_init__(self) -> None:
        most = min(MAX_PLACES, 1 + self.num_guesses)
        if not 2 <= self.num_nodes <= most:
            raise ConfigError(
                f"speculative_num_draft_tokens={self.num_nodes}: choose 2 to {most} for "
                f"{self.steps} steps of {self.topk} guesses"
            )
        if self.num_grown > MAX_PLACES:
            raise ConfigError(
                f"speculative_steps={self.steps} with speculative_topk={self.topk}: a tree grows "
                f"from at most {MAX_PLACES} guesses, lower one of them"
            )

    @classmethod
    def of(cls, steps: int, topk: int, num_nodes: int | None) -> "TreeShape":
        if num_nodes is None:
            num_nodes = min(1 + steps * topk, MAX_PLACES)
        return cls(steps, topk, num_nodes)

    @property
    def num_guesses(self) -> int:
        return self.topk + (self.steps - 1) * self.topk**2

    @property
    def num_grown(self) -> int:
        """Guesses from which the tree grows on."""
        return (self.steps - 1) * self.topk

    @property
    def num_places(self) -> int:
        """Behind the newest token: for what is verified, and before that for what is grown from."""
        return max(self.num_nodes - 1, self.num_grown)


def places_ahead(width: int, tree: TreeShape | None) -> int:
    """Behind the newest token, that drafts may take: of a tree, or of a row with `width` tokens."""
    return width - 1 if tree is None else tree.num_places
