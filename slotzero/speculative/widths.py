"""The width of verify steps, that is their tokens per row, chosen step by step.

A row of width w is the newest token and w - 1 drafts; width 1 is a plain decode step. The tokens
that a width gains are learned from acceptance; the seconds that it takes were measured by the
caller. This module does not know requests, drafters or the clock. Costs are not updated while
serving: only that of the width in use could be, which would bias the comparison.

Nothing is learned about drafts that a narrow width does not make, so a wider one is tried
occasionally. The rule for trials, at the number of rows with which they begin: the time that they
can lose is saved up before.

    seconds lost to trials <= SHARE * seconds at the settled width + the first trial
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from slotzero.errors import ConfigError

MEMORY = 256  # drafts at a position over which its acceptance rate is averaged
PRIOR_WEIGHT = 4  # weight, in drafts, of a prior or of an old rate
MARGIN = 0.05  # relative gain needed to switch to a wider width
MARGIN_BACK = 0.02  # and to a narrower one, whose rates are all up to date
PATIENCE = 8  # consecutive choices for which the gain must last
FIRST_TRIAL_STEPS = 32  # steps of the first trial, when nothing is known
TRIAL_STEPS = 8  # steps of any other trial
SHARE = 0.01  # fraction of the time for trials

Cost = Callable[[int, int], float]
"""Seconds of a whole cycle of verify, draft-extend and draft, by (width, num_rows)."""


class Acceptance:
    """Acceptance rate of each draft position, given that all drafts before it were accepted."""

    def __init__(self, num_positions: int, prior: float = 0.7) -> None:
        self._rates = [prior] * num_positions
        self._weights = [PRIOR_WEIGHT] * num_positions

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from one row of one step. `num_drafts` includes places that the drafter could not
        fill, as they cost the same."""
        if not 0 <= num_accepted <= num_drafts <= len(self._rates):
            raise ValueError(f"{num_accepted} of {num_drafts} drafts: at most {len(self._rates)}")
        for i in range(min(num_accepted + 1, num_drafts)):
            weight = self._weights[i] = min(self._weights[i] + 1, MEMORY)
            self._rates[i] += ((i < num_accepted) - self._rates[i]) / weight

    def doubt(self, num_known: int) -> None:
        """Reduce the weight of the rates from position `num_known` on, so that new observations
        soon outweigh them."""
        for i in range(num_known, len(self._weights)):
            self._weights[i] = min(self._weights[i], PRIOR_WEIGHT)

    def expected(self, width: int, num_known: int | None = None) -> float:
        """Return the expected tokens per row and step; with `num_known`, assuming that all drafts
        after the first `num_known` are accepted if those are."""
        tokens = chance = 1.0
        for i in range(min(width - 1, len(self._rates))):  # a tree has more nodes than levels
            if num_known is None or i < num_known:
                chance *= self._rates[i]
            tokens += chance
        return tokens


class Widths(Protocol):
    @property
    def widths(self) -> tuple[int, ...]:
        """All widths that may be chosen, ascending."""

    def choose(self, num_rows: int) -> int:
        """Choose the width of the next step; called once per step."""

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Learn like Acceptance.learn; may be called some steps late."""


class FixedWidth:
    def __init__(self, width: int) -> None:
        self.widths = _checked((width,))

    def choose(self, num_rows: int) -> int:
        return self.widths[0]

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        pass


class WidthPolicy:
    """Choice of the width with the most tokens per second, with hysteresis."""

    def __init__(
        self, widths: Sequence[int], num_positions: int, cost: Cost, prior: float = 0.7
    ) -> None:
        """`num_positions`: most drafts of a row that can be accepted at once."""
        self.widths = _checked(widths)
        self.acceptance = Acceptance(num_positions, prior)
        self.width = self.widths[0]
        """The current width, apart from trials."""
        self._cost = cost
        self._num_beaten = PATIENCE - 1  # the first choice need not wait
        self._purse = 0.0  # seconds, for trials
        self._tried, self._num_left = self.widths[-1], FIRST_TRIAL_STEPS  # the trial that runs

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        self.acceptance.learn(num_drafts, num_accepted)

    def choose(self, num_rows: int) -> int:
        costs = {width: self._cost(width, num_rows) for width in self.widths}
        if not self._num_left:
            self._settle(costs)
            self._save(costs)
        if not self._num_left:
            return self.width
        self._num_left -= 1
        return self._tried

    def _settle(self, costs: dict[int, float]) -> None:
        speeds = {width: self.acceptance.expected(width) / costs[width] for width in self.widths}
        best = max(self.widths, key=speeds.__getitem__)
        margin = MARGIN if best > self.width else MARGIN_BACK
        is_beaten = speeds[best] > (1 + margin) * speeds[self.width]
        self._num_beaten = self._num_beaten + 1 if is_beaten else 0
        if self._num_beaten >= PATIENCE:
            self.width, self._num_beaten = best, 0

    def _save(self, costs: dict[int, float]) -> None:
        """Save time for a trial of the width that would be best if all drafts of unknown rate were
        accepted."""
        num_known = self.width - 1
        hopes = {
            width: self.acceptance.expected(width, num_known) / costs[width]
            for width in self.widths
            if width >= self.width
        }
        best = max(hopes, key=hopes.__getitem__)
        if hopes[best] <= (1 + MARGIN) * hopes[self.width]:
            return
        # a trial emits at least as many tokens, so it loses at most the difference in time
        price = TRIAL_STEPS * (costs[best] - costs[self.width])
        self._purse = min(self._purse + SHARE * costs[self.width], price)
        if self._purse == price:
            self._purse, self._tried, self._num_left = 0.0, best, TRIAL_STEPS
            self.acceptance.doubt(num_known)


def _checked(widths: Sequence[int]) -> tuple[int, ...]:
    if not widths or widths[0] < 1:
        raise ConfigError(f"widths must be 1 or more, got {tuple(widths)}")
    if any(a >= b for a, b in pairwise(widths)):
        raise ConfigError(f"widths must ascend without repeats, got {tuple(widths)}")
    return tuple(widths)


@dataclass
class SpeculationStats:
    num_positions: int
    """Most drafts of a row that can be accepted at once."""
    num_drafts: int = 0
    """Number of rows with drafts."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    accepted_per_pos: list[int] = field(default_factory=list)
    num_steps_by_width: Counter[int] = field(default_factory=Counter)
    width: int = 1
    """Width of the last step."""

    def add_step(self, width: int) -> None:
        self.width = width
        self.num_steps_by_width[width] += 1

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """Count one row of a step."""
        self.num_drafts += num_drafts > 0
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted
        num_positions = min(num_drafts, self.num_positions)
        self.accepted_per_pos += [0] * (num_positions - len(self.accepted_per_pos))
        for i in range(num_accepted):
            self.accepted_per_pos[i] += 1

    @property
    def mean_accepted_length(self) -> float:
        """Mean tokens per row with drafts."""
        return 1 + self.num_accepted_tokens / max(self.num_drafts, 1)
