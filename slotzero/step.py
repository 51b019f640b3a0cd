"""One step: which requests run, from which position, for how many tokens.

It is the whole message from planning to running, and the same on every rank. It does not know
buckets, graphs or tensors. The rules it keeps: a request is at most one row of a step, and all
DP ranks launch a step alike, in the size that the largest needs.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from slotzero.request import Request


class Row(NamedTuple):  # frozen like a dataclass, and made a microsecond faster, hundreds a step
    """Compute tokens[start : start + count) of the request in this slot.

    If the last steps of the request verify drafts, only the device knows its position; `start` is
    then the smallest that it can be.
    """

    request: Request
    slot: int
    """Kept here because the request may have lost its slot when the step is committed."""
    start: int
    count: int  # type: ignore[assignment]  # tuple.count() is not missed
    samples: bool
    """Whether the last of these tokens is the last known one, so that a new one follows it."""
    most_new: int = 1
    """Maximum number of new tokens: the drafts that can be accepted, and one more."""


@dataclass(frozen=True)
class Step:
    rows_by_dp_rank: tuple[tuple[Row, ...], ...]
    """One entry, or with DP attention one for each rank. Some may be empty, but not all."""
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
    def is_decode(self) -> bool:
        """Whether every row feeds one token, `tokens[slot, length]`, and samples the next.

        The last chunk of a prompt may be such a row. An earlier chunk of one token is not: to
        sample there would overwrite a token of the prompt.
        """
        return self.width == 1 and all(row.count == 1 and row.samples for row in self.rows)
