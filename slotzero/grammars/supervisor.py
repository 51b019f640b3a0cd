"""The supervisor of all workers: it starts, restarts and kills them, and fails their answers.

It does not read messages; pool.py does. Its rules, with `memory` the limit of one grammar:

- A worker that exceeds a time limit is killed. The answer that it was working on fails; its other
  answers are recomputed from their tokens in a new worker.
- Workers without answers are kept for later requests: at most _MAX_IDLE, with `memory` in total.
  The least recently used is removed first.
- Workers with answers are limited to _MAX_RUNNING, with MAX_IN_USE times `memory` in total. At the
  limit, no other grammar is compiled; above the limit on memory, the answers of the largest worker
  fail. A worker that replaces another starts even at the limit: its answers could wait forever.
"""

import itertools
import selectors
import signal
import time
from collections.abc import Callable
from typing import final

import numpy as np

from slotzero.grammars.channel import Channel
from slotzero.grammars.grammar import Grammar
from slotzero.grammars.limits import GrammarLimits, not_started, slow_mask
from slotzero.grammars.messages import COMPILE, GrammarSource
from slotzero.grammars.process import ForkServer, GrammarWorker
from slotzero.grammars.refusals import Refusals
from slotzero.grammars.worker import OUT_OF_MEMORY
from slotzero.grammars.workers import GrammarWorkers
from slotzero.sampling.structured import structure_error
from slotzero.system.child import ending

_REFUSED_SECONDS = 60.0
_MAX_RESTARTS = 1  # of an answer whose worker ended for a reason other than a limit
_CRASHES = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
"""Exit codes of a worker that reaches its memory limit. (Rust aborts if it cannot allocate.)"""


@final
class Supervisor:
    def __init__(self, make_server: Callable[[], ForkServer], limits: GrammarLimits) -> None:
        self.limits = limits
        self.server: ForkServer | None = None
        self.not_started = ""
        """Why the last attempt to start the fork server failed."""
        self.unusable = ""
        """Why no grammar can be compiled for this tokenizer; empty if grammars can be compiled."""
        self.end: np.ndarray | None = None
        """The mask of tokens that end a sequence; None until the fork server is ready."""
        self.selector = selectors.DefaultSelector()
        self.workers = GrammarWorkers()
        self.worker_of: dict[int, GrammarWorker] = {}
        """By number of the answer."""
        self.refusals = Refusals()
        self._make_server = make_server
        self._numbers = itertools.count(COMPILE + 1)

    def next_number(self) -> int:
        """Return an unused number for a worker or an answer."""
        return next(self._numbers)

    def start_server(self) -> None:
        """Start the fork server, unless there is one."""
        if self.server is None:
            try:
                self.server = self._make_server()
            except OSError as error:
                self.not_started = not_started(error.strerror)
                return
            self.selector.register(self.server.socket, selectors.EVENT_READ)

    def server_ended(self, server: ForkServer) -> None:
        """Handle the end of the fork server; its workers have ended with it."""
        self.selector.unregister(server.socket)
        server.close()
        was_ready, self.server, self.end = self.end is not None, None, None
        if not was_ready and not self.unusable:
            ended = "its process ended: send the request again"
            why = server.failures[0] if server.failures else ended
            for worker in list(self.workers.values()):
                self.refuse(worker, why, until=0.0)
            return
        for worker in list(self.workers.values()):
            if self.unusable:
                self.refuse(worker, self.unusable, until=0.0)
            elif worker not in self.workers.queue:
                self.ended(worker, -signal.SIGKILL)
        if self.workers.queue:
            self.start_server()
        if self.server is None:
            for worker in list(self.workers.queue):
                self.refuse(worker, self.not_started, until=0.0)

    def queue(self, source: GrammarSource) -> GrammarWorker:
        """Queue a worker for a new grammar."""
        worker = GrammarWorker(self.next_number(), source, time.monotonic())
        self.workers.add(worker)
        return worker

    def start_failed(self, worker: GrammarWorker, reason: str) -> None:
        """Handle a worker that the fork server could not fork."""
        if self._make_room(worker, reason):
            self._restart(worker)

    def ended(self, worker: GrammarWorker, exit_code: int) -> None:
        """Handle a worker whose process ended by itself or was killed from outside."""
        if worker is not self.workers.get(worker.source):
            return  # it was removed already, because its grammar was refused
        if exit_code == -signal.SIGPROF:
            self._overrun(worker, slow_mask(self.limits.mask_seconds))
            return
        if exit_code in _CRASHES:
            self._overrun(worker, self.limits.too_large)
            return
        for grammar in list(worker.answers.values()):
            grammar.num_restarts += 1
            if grammar.num_restarts > _MAX_RESTARTS:
                self.fail(grammar, f"its process {ending(exit_code)}: send the request again")
        self._restart(worker)

    def enforce_limits(self) -> None:
        """Kill, remove, start and refuse workers according to the limits."""
        self._kill_late()
        self._balance()
        self._start_queued()
        for worker in self.workers.stuck(self.limits.queue_seconds):
            self.refuse(worker, self.limits.not_compiled, until=0.0)

    def attach(self, grammar: Grammar, worker: GrammarWorker) -> None:
        worker.answers[grammar.number] = grammar
        self.worker_of[grammar.number] = worker
        grammar.num_sent = 0
        if worker.first_mask is not None:
            self.give(grammar, worker.first_mask)

    def give(self, grammar: Grammar, mask: np.ndarray) -> None:
        assert self.end is not None
        grammar.receive(mask, self.end)

    def fail(self, grammar: Grammar, why: str) -> None:
        worker = self._detach(grammar)
        grammar.error = structure_error(why, worker.source.kind)

    def release(self, grammar: Grammar) -> None:
        """End an answer. Its worker stays for the next one, if it is compiled."""
        worker = self._detach(grammar)
        if worker.answers:
            return
        if not worker.is_compiled:
            self._remove(worker)
            return
        self.workers.became_idle(worker)
        self._balance()

    def refuse(self, worker: GrammarWorker, why: str, until: float) -> None:
        """Fail all answers of a grammar that cannot be compiled, and refuse it until `until`."""
        for grammar in list(worker.answers.values()):
            self.fail(grammar, why)
        self._remove(worker)
        self.refusals.add(worker.source, why, until)

    def _detach(self, grammar: Grammar) -> GrammarWorker:
        worker = self.worker_of.pop(grammar.number)
        del worker.answers[grammar.number]
        if grammar.num_sent:
            worker.end(grammar.number)
        return worker

    def _start_queued(self) -> None:
        while self.end is not None and self.server is not None:
            worker = self.workers.next_to_start(self.limits)
            if worker is None:
                return
            try:
                end = self.server.start(worker.number)
            except OSError as error:
                self._make_room(worker, error.strerror)
                continue
            now = time.monotonic()
            self.workers.started(now)
            worker.compile(Channel(end, self.selector, worker), now)

    def _make_room(self, worker: GrammarWorker, reason: str | None) -> bool:
        """Handle that no process could be started: remove an idle worker, or refuse this grammar.

        Return whether to try again.
        """
        if idle := self.workers.idle:
            self._remove(idle[0])
            return True
        self.refuse(worker, not_started(reason), until=0.0)
        return False

    def _kill_late(self) -> None:
        seconds = self.limits.reply_seconds
        for worker in self.workers.late(seconds):
            slow = slow_mask(seconds) if worker.is_compiled else self.limits.slow_compile
            self._overrun(worker, slow)

    def _overrun(self, worker: GrammarWorker, why: str) -> None:
        """Fail only the answer that the worker was working on when it reached a limit."""
        if not worker.is_compiled:
            self.refuse(worker, why, time.monotonic() + _REFUSED_SECONDS)
            return
        culprit = worker.answers.get(worker.unanswered[0]) if worker.unanswered else None
        if culprit is not None:
            self.fail(culprit, why)
        self._restart(worker)

    def _restart(self, worker: GrammarWorker) -> None:
        """Continue the remaining answers in a new worker, which starts before other grammars."""
        self._remove(worker)
        if worker.answers:
            now = time.monotonic()
            successor = GrammarWorker(self.next_number(), worker.source, now, is_restart=True)
            self.workers.add(successor)
            for grammar in worker.answers.values():
                self.attach(grammar, successor)

    def _remove(self, worker: GrammarWorker) -> None:
        if self.workers.remove(worker) and self.server is not None:
            self.server.kill(worker.number)
        worker.disconnect()

    def _balance(self) -> None:
        """Keep the number and the memory of all workers within their limits."""
        while (surplus := self.workers.surplus(self.limits)) is not None:
            self._remove(surplus)
        largest = self.workers.largest_if_too_large(self.limits)
        if largest is not None:
            for grammar in list(largest.answers.values()):
                self.fail(grammar, self.limits.too_large_together)
            self._remove(largest)
