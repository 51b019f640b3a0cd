"""The shape of a tree of guesses. It knows no tensors, so that settings can be checked with it."""

from dataclasses import dataclass

from slotzero.errors import ConfigError

MAX_NODES = 63
"""Bits of an int64 without its sign, in which a node knows what it follows."""


@dataclass(frozen=True)
class TreeShape:
    steps: int
    topk: int
    """Guesses after a token, and tokens from which a step goes on."""
    num_nodes: int
    """That are verified: the newest token, and the best guesses."""

    def __post_init__(self) -> None:
        most = min(MAX_NODES, 1 + self.num_guesses)
        if not 2 <= self.num_nodes <= most:
            raise ConfigError(
                f"speculative_num_draft_tokens={self.num_nodes}: choose 2 to {most} for "
                f"{self.steps} steps of {self.topk} guesses"
            )
        if self.num_grown > MAX_NODES:
            raise ConfigError(
                f"speculative_steps={self.steps} with speculative_topk={self.topk}: a tree grows "
                f"from at most {MAX_NODES} guesses, lower one of them"
            )

    @classmethod
    def of(cls, steps: int, topk: int, num_nodes: int | None) -> "TreeShape":
        if num_nodes is None:
            num_nodes = min(1 + steps * topk, MAX_NODES)
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
