"""The number of drafts that each step verifies, learnt from how many were accepted."""

from collections.abc import Sequence

from slotzero.config import EngineConfig
from slotzero.executor.results import Results
from slotzero.executor.worker import Worker
from slotzero.speculative.widths import FixedWidth, SpeculationStats, WidthPolicy, Widths
from slotzero.step import Step

# Acceptance is learnt from a row only if its request has room for a whole draft, or for this many
# tokens: with large trees few rows would qualify otherwise.
MAX_UNCUT = 24


class DraftWidths:
    """Choice of the width of a step: its tokens per row, 1 if it verifies no drafts."""

    def __init__(self, config: EngineConfig, worker: Worker) -> None:
        limits, steps = worker.limits, config.speculative_steps
        self.stats = SpeculationStats(steps) if worker.cycles else None
        """None: speculation is off."""
        self._ahead = limits.ahead
        self.policy: Widths = FixedWidth(limits.max_width)
        if config.speculative is not None and config.speculative_adaptive:
            self.policy = WidthPolicy(limits.widths, steps, worker.measure_seconds)

    def choose(self, num_running: int) -> int:
        return self.policy.choose(num_running) if num_running else 1

    def disable(self) -> None:
        """Verify no drafts from now on."""
        self.policy = FixedWidth(1)

    def learn(self, step: Step, results: Sequence[Results]) -> None:
        """Count the drafts of a committed step; `results` are by DP rank."""
        stats = self.stats
        if stats is None or (step.width == 1 and not step.is_decode):
            return  # a prompt has no drafts
        stats.add_step(step.width)
        if step.width == 1:
            return
        depth = min(step.width - 1, stats.num_positions)
        uncut = 2 * (depth + 1) + self._ahead - depth  # tokens left with which a draft is whole
        drafts = (counts for from_rank in results for counts in from_rank.drafts())
        for row, (num_drafts, num_accepted) in zip(step.rows, drafts, strict=True):
            stats.add(num_drafts, num_accepted)
            has_room = row.request.max_len - row.start > min(uncut, MAX_UNCUT)
            if row.request.speculates and has_room:
                self.policy.learn(depth, num_accepted)  # a position without a draft was wrong too
