"""The sanitizer for live traffic: which steps are checked, and how a violation is handled.

It attaches to the runners of an engine; an engine without it never imports this module. The rule:
it raises before the step's results leave the device, or the step continues as if unobserved.
"""

import logging
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence

import torch

from slotzero.certify.answers import AnswerCheck
from slotzero.certify.memory import StepMemory
from slotzero.certify.mirror import Mirror
from slotzero.certify.report import Violation
from slotzero.certify.scenarios import bounds_of
from slotzero.certify.shadow import Shadow
from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.errors import PoolError, SanitizerError
from slotzero.graph import GraphKey, Runner
from slotzero.graph.observer import Observer
from slotzero.request import Request

KEPT = 100
_log = logging.getLogger("slotzero.certify")


def attach(engine: Engine, config: EngineConfig) -> "LiveSanitizer":
    """Attach the sanitizer to an engine. If it checks every step, it also checks what the host
    writes to tables; otherwise it does not, because that makes a GPU wait for the host between
    steps."""
    limits = engine.limits
    is_full = config.sanitize == "full"
    live = LiveSanitizer(
        engine,
        every=1 if is_full else config.sanitize_every,
        action=config.sanitize_action,
        bound=bounds_of(engine).replay,
        highest_index=min(
            limits.max_num_seqs,
            *(num_pages - 1 for num_pages in limits.num_pages.values()),
            limits.max_model_len - 1,
            engine.worker.vocab_size - 1,
        ),
    )
    for runner in engine.worker.runners:
        runner.observer = live
    if is_full:
        engine.worker.tables.observer = Mirror(engine.worker.tables)
    return live


class LiveSanitizer(Observer):
    def __init__(
        self,
        engine: Engine,
        *,
        every: int,
        action: str,
        bound: float,
        highest_index: int,
    ) -> None:
        self.answers = AnswerCheck(engine, is_full=every == 1)
        self.violations = 0
        self.steps_watched = 0
        self.steps_without_room = 0
        self.last: deque[Violation] = deque(maxlen=KEPT)
        self._every, self._action, self._bound = every, action, bound
        self._engine, self._highest_trap = engine, highest_index
        self._steps: Counter[str] = Counter()  # by runner
        self._num_commits = 0
        self._last_miscount = ""
        self._fallen: dict[str, str] = {}  # runner: why it runs eagerly
        self._rng = random.Random(0)

    def replay(self, runner: Runner, key: GraphKey, num_tokens: int) -> None:
        name = runner.spec.name
        if name in self._fallen and runner.records[key].backend != "eager":
            runner.fall_back([key], self._fallen[name])  # recorded since
        self._steps[name] += 1
        if (self._steps[name] - 1) % self._every:
            runner.replay(key)
            return
        try:
            memory = StepMemory(runner, key, self._highest_trap, self._rng)
            violations = Shadow(runner, key, memory, self._bound_of(runner, key)).examine()
        except torch.OutOfMemoryError:
            self._go_on_unwatched(key)
            runner.replay(key)
            return
        self.steps_watched += 1
        if violations:
            self._report(violations)
            runner.registry.reupload_published()
            if self._action == "fallback":
                self._fall_back(runner, memory, violations[0])
            runner.replay(key)

    @property
    def is_pending(self) -> bool:
        return self.answers.is_pending

    def committed(self, finished: Sequence[Request]) -> None:
        """Check after the engine has committed a step in which these requests finished."""
        is_due = self._num_commits % self._every == 0
        self._num_commits += 1
        violations = [*self._miscounts()] if is_due else []
        violations += self.answers.committed(finished, is_due)
        if violations:
            self._report(violations)
            if self._action == "fallback":
                self._engine.decode_plainly()

    def weights_will_change(self) -> None:
        self.answers.forget()

    def _miscounts(self) -> Iterator[Violation]:
        """Check S9. A violation that the previous step had too is not reported again."""
        try:
            self._engine.check()
            self._last_miscount = ""
        except PoolError as error:
            if str(error) != self._last_miscount:
                self._last_miscount = str(error)
                step = f"step {self._engine.num_steps}"
                yield Violation("S9", "engine", step, "", self._last_miscount)

    def _bound_of(self, runner: Runner, key: GraphKey) -> float:
        """Return the bound for this size; an eager step runs the same code twice."""
        return 0.0 if runner.records[key].backend == "eager" else self._bound

    def _report(self, violations: Sequence[Violation]) -> None:
        for violation in violations:
            _log.error("%s", violation)
        self.violations += len(violations)
        self.last.extend(violations)
        if self._action == "raise":
            more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
            raise SanitizerError(f"{violations[0]}{more}")

    def _fall_back(self, runner: Runner, memory: StepMemory, violation: Violation) -> None:
        name = runner.spec.name
        if name not in self._fallen:
            self._fallen[name] = f"sanitizer: {violation.check}, tensor {violation.tensor!r}"
            _log.warning("runner %s runs eagerly from now on: %s", name, self._fallen[name])
            runner.fall_back(list(runner.records), self._fallen[name])
        if any(memory.changed_rows(entry) for entry in memory.paged):
            # no request may find damaged pages that no slot holds
            self._engine.schedulers[0].ledger.cache.clear()

    def _go_on_unwatched(self, key: GraphKey) -> None:
        if not self.steps_without_room:
            _log.warning(
                "the sanitizer skips %s: no memory for a copy of the KV cache of its slots", key
            )
        self.steps_without_room += 1
