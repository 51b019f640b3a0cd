"""One step: which requests run, from which position, for how many tokens.

A step is the result of planning and all that running needs, and it is the same on every rank. It
does not know capture sizes, graphs or tensors. The rules: a request has at most one row in a step,
and all DP ranks launch the same size, which is that of the rank with the most tokens and rows.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from slotzero.request import Request


class Row(NamedTuple):  # creating one is a microsecond faster than a frozen dataclass
    """One request in a step: tokens[start : start + count) of the request in this slot.

    If the last steps of the request verify drafts, only the device knows its position, and `start`
    is a lower bound.
    """

    request: Request
    slot: int
    """Stored here because the request may lose its slot before the step is committed."""
    start: int
    count: int  # type: ignore[assignment]  # hides tuple.count(), which is not used
    samples: bool
    """Whether these tokens end with the last known token, so that a new token is sampled."""
    most_new: int = 1
    """Maximum number of new tokens: all drafts, and one more."""
    is_scored: bool = False
    """Whether the request wants log probabilities of the prompt tokens that follow these."""
    is_pooled: bool = False
    """Whether the request wants a vector of its prompt."""


@dataclass(frozen=True)
class Step:
    rows_by_dp_rank: tuple[tuple[Row, ...], ...]
    """One entry, or with DP attention one per rank. Some may be empty, but not all."""
    width: int = 1
    """Tokens per row. Above 1, every row verifies drafts: the newest token and width - 1 drafts."""
    catches_up: bool = False
    """Whether the drafter first catches up with tokens that were decoded without it."""

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """Rows of all DP ranks."""
        return tuple(row for rows in self.rows_by_dp_rank for row in rows)

    @cached_property
    def num_rows(self) -> int:
        """Number of rows on the largest DP rank."""
        return max(map(len, self.rows_by_dp_rank))

    @cached_property
    def num_tokens(self) -> int:
        """Number of tokens on the largest DP rank."""
        return max(sum(row.count for row in rows) for rows in self.rows_by_dp_rank)

    @cached_property
    def is_scored(self) -> bool:
        return any(row.is_scored for row in self.rows)

    @cached_property
    def is_pooled(self) -> bool:
        return any(row.is_pooled for row in self.rows)

    @cached_property
    def is_decode(self) -> bool:
        """Whether every row computes one token, `tokens[slot, length]`, and samples the next.

        The last chunk of a prompt can be such a row. An earlier chunk of one token cannot: sampling
        after it would overwrite a token of the prompt. Only prefill computes vectors.
        """
        is_plain = self.width == 1 and not self.is_pooled
        return is_plain and all(row.count == 1 and row.samples for row in self.rows)
