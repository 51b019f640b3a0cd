"""The grammars of one engine: which are compiled, which of them stay, and what becomes of answers.

Each grammar has a worker process. So a grammar that takes too long or too much memory is killed
without harm to the engine, and its memory is really free then. Nothing here waits, except `poll`
and `wait`, for at most as long as they are told. The caller holds the engine's lock.

The rules it keeps, with `memory` the limit of one grammar:

- A worker that does not reply within the limits of time is killed. The answer that it was working
  on fails; the others are followed again, from their tokens, in a new worker.
- Workers without answers are kept for the next request, up to _MAX_IDLE and `memory` in all: the
  one that was not used for the longest time goes first.
- Workers with answers are at most _MAX_RUNNING, with _MOST_IN_USE times `memory` in all. No other
  grammar is compiled while they have that, and if they grow beyond it, the answers of the largest
  fail. A worker that replaces another does not wait for that, or its answers might wait forever.
"""

import functools
import importlib.util
import itertools
import math
import selectors
import signal
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from slotzero.grammars.channel import Channel
from slotzero.grammars.grammar import Grammar, words
from slotzero.grammars.matcher import WORD_BITS, mask_of
from slotzero.grammars.messages import (
    COMPILE,
    GrammarSource,
    NotStarted,
    Ready,
    Reply,
    Unusable,
    WorkerEnded,
)
from slotzero.grammars.process import ForkServer, GrammarWorker
from slotzero.grammars.worker import OUT_OF_MEMORY
from slotzero.sampling.structured import StructuredOutputs, structure_error
from slotzero.system.child import ending
from slotzero.text.tokenizer import Tokenizer

_MOST_COMPILING = 4
_MOST_IN_USE = 8
_MAX_IDLE = 32
_MAX_RUNNING = 64  # with answers; idle ones that are used again come on top
_PROCESS_BYTES = 1 << 20  # what an idle process costs, however small its grammar is
_MOST_REFUSALS = 256
_SECONDS_REFUSED = 60.0
_MOST_RESTARTS = 1  # after an end that no limit explains
_CRASHES = (OUT_OF_MEMORY, -signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS)
"""How a worker ends at its limit of memory: Rust aborts if it cannot allocate."""


@dataclass(frozen=True, kw_only=True)
class GrammarLimits:
    reply_seconds: float = 5.0
    """To compile a grammar, by the clock on the wall. A mask may not take longer, either."""
    mask_seconds: float = 1.0
    """To compute one mask, in CPU time: a busy machine must not end an answer."""
    memory: int = 256 << 20
    """Bytes, for one grammar."""
    queue_seconds: float = 300.0
    """How long a grammar waits to be compiled while no other is started."""


@final
class Grammars:
    def __init__(
        self,
        make_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits,
    ) -> None:
        """`vocab_size` is the model's: a mask has one bit for each of its logits."""
        self.limits = limits
        self._make_server = functools.partial(
            ForkServer,
            make_tokenizer,
            vocab_size,
            eos_token_ids,
            {"memory": limits.memory, "mask_seconds": limits.mask_seconds},
        )
        self._mask_bytes = -(-vocab_size // WORD_BITS) * WORD_BITS // 8
        self._end: np.ndarray | None = None
        """The mask of tokens that end a sequence; None until the fork server is ready."""
        self._is_installed = importlib.util.find_spec("llguidance") is not None
        self._unusable = ""
        self._not_started = ""
        """Why there is no fork server, after a try to start it."""
        self._server: ForkServer | None = None
        self._selector = selectors.DefaultSelector()
        self._numbers = itertools.count(COMPILE + 1)
        self._workers: OrderedDict[GrammarSource, GrammarWorker] = OrderedDict()
        """By when they were last begun or left: the front is the first to go."""
        self._queue: deque[GrammarWorker] = deque()
        """Those of them that have no process yet."""
        self._moved_at = 0.0
        """When the queue last lost its first."""
        self._worker_of: dict[int, GrammarWorker] = {}
        """By an answer's number."""
        self._refusals: OrderedDict[GrammarSource, tuple[str, float]] = OrderedDict()
        """Why, and until when: what a limit refused may do with less to do on the machine."""

    @property
    def is_busy(self) -> bool:
        """Whether something is to be compiled or computed."""
        return any(worker.asked for worker in self._workers.values()) or bool(self._queue)

    @property
    def cached_bytes(self) -> int:
        """Memory of the compiled grammars that no answer uses."""
        return sum(max(worker.memory, _PROCESS_BYTES) for worker in self._idle)

    @property
    def _idle(self) -> list[GrammarWorker]:
        return [worker for worker in self._workers.values() if not worker.answers]

    def prepare(self) -> None:
        """Start the process that the first grammar would wait for: most of a second for 50,000
        tokens. If it cannot be started, the next call tries again."""
        if self._server is None and self._is_installed:
            try:
                self._server = self._make_server()
            except OSError as error:
                self._not_started = _not_started(error.strerror)
                return
            self._selector.register(self._server.socket, selectors.EVENT_READ)

    def begin(self, asked: StructuredOutputs) -> Grammar:
        """A new answer, which is not ready before its grammar is compiled; raises RequestError if
        it is known that it cannot be."""
        source = GrammarSource(asked.kind, asked.text)
        if not self._is_installed:
            raise structure_error("llguidance is missing: pip install 'slotzero[server]'")
        if self._unusable:
            raise structure_error(self._unusable)
        refusal, until = self._refusals.get(source, ("", 0.0))
        if time.monotonic() < until:
            raise structure_error(refusal, source.kind)
        self.prepare()
        if self._server is None:
            raise structure_error(self._not_started, source.kind)
        worker = self._workers.get(source)
        if worker is None:
            worker = GrammarWorker(next(self._numbers), source, time.monotonic())
            self._workers[source] = worker
            self._queue.append(worker)
        grammar = Grammar(next(self._numbers), self)
        self._attach(grammar, worker)
        return grammar

    def follow(self, grammar: Grammar) -> None:
        worker = self._worker_of[grammar.number]
        if worker.is_compiled:
            worker.follow(grammar, time.monotonic())

    def release(self, grammar: Grammar) -> None:
        worker = self._worker_of.pop(grammar.number, None)
        if worker is None:
            return  # its worker ended before it
        del worker.answers[grammar.number]
        if grammar.num_sent:
            worker.end(grammar.number)
        if worker.answers:
            return
        if not worker.is_compiled:
            self._remove(worker)
            return
        self._workers.move_to_end(worker.source)
        self._balance()

    def wait(self, grammars: Iterable[Grammar], seconds: float) -> None:
        """Wait for masks that were asked for just now. An answer whose mask is late is not waited
        for the next few times: its neighbours would pay for it."""
        awaited = [grammar for grammar in grammars if grammar.is_awaited()]
        until = time.monotonic() + seconds
        pending = awaited[::-1]  # replies mostly come in order: what has come is at the end
        while pending:
            if pending[-1].is_settled:
                pending.pop()
                continue
            left = until - time.monotonic()
            if left <= 0:
                break
            self.poll(left)
        for grammar in pending:
            if not grammar.is_settled:
                grammar.was_late()

    def poll(self, seconds: float) -> None:
        """Take what has come from the processes, or what comes next within some seconds."""
        if self._server is None:
            return
        for key, events in self._selector.select(self._until_deadline(seconds)):
            worker: GrammarWorker | None = key.data
            if worker is None:
                self._hear(self._server)
                continue
            if worker.channel is not None and events & selectors.EVENT_WRITE:
                worker.channel.flush()
            self._take(worker)
        self._kill_late()
        self._balance()
        self._start_queued()
        self._refuse_stuck()

    # Messages

    def _hear(self, server: ForkServer) -> None:
        match server.receive():
            case Ready(ends):
                self._end = words(mask_of(ends, self._mask_bytes))
            case Unusable(reason):
                self._unusable = f"this model's tokenizer cannot be used ({reason})"
            case WorkerEnded(number, exit_code):
                for worker in self._numbered(number):
                    self._bury(worker, exit_code)
            case NotStarted(number, reason):
                for worker in self._numbered(number):
                    if self._make_room(worker, reason):
                        self._restart(worker)
            case None:
                self._lose_server(server)

    def _numbered(self, number: int) -> list[GrammarWorker]:
        """The worker of this number, unless it was removed."""
        return [worker for worker in self._workers.values() if worker.number == number]

    def _take(self, worker: GrammarWorker) -> None:
        """Take all replies that have come."""
        if worker.channel is None:
            return  # there will be no more
        for reply in worker.channel.receive():
            self._take_reply(worker, reply)
        if worker.channel is not None and not worker.channel.is_open:
            self._disconnect(worker)  # the fork server will say how it ended

    def _take_reply(self, worker: GrammarWorker, reply: Reply) -> None:
        worker.asked.popleft()
        worker.since, worker.memory = time.monotonic(), reply.memory
        if reply.number == COMPILE:
            self._compiled(worker, reply)
            return
        grammar = worker.answers.get(reply.number)
        if grammar is None:
            return  # it was released meanwhile
        if reply.error:
            self._fail(grammar, f"the answer cannot go on ({reply.error}): ask for a simpler one")
        else:
            self._give(grammar, words(reply.mask))

    def _compiled(self, worker: GrammarWorker, reply: Reply) -> None:
        if reply.error:
            self._refuse(worker, reply.error, math.inf)
            return
        worker.first_mask = words(reply.mask)
        for grammar in worker.answers.values():
            if grammar.is_ready:
                continue  # it has known its mask since before a restart
            if grammar.tokens:
                worker.follow(grammar, worker.since)
            else:
                self._give(grammar, worker.first_mask)

    # Workers

    def _attach(self, grammar: Grammar, worker: GrammarWorker) -> None:
        worker.answers[grammar.number] = grammar
        self._worker_of[grammar.number] = worker
        grammar.num_sent = 0
        if worker.first_mask is not None:
            self._give(grammar, worker.first_mask)

    def _start_queued(self) -> None:
        while self._queue and self._end is not None and self._server is not None:
            worker = self._queue[0]
            num_compiling = sum(COMPILE in other.asked for other in self._workers.values())
            if num_compiling >= _MOST_COMPILING or (self._is_full and not worker.is_restart):
                return
            try:
                end = self._server.start(worker.number)
            except OSError as error:
                self._make_room(worker, error.strerror)
                continue
            self._queue.popleft()
            self._moved_at = time.monotonic()
            worker.compile(Channel(end, self._selector, worker), self._moved_at)

    @property
    def _is_full(self) -> bool:
        """Whether the grammars in use leave no room for another."""
        in_use = [worker for worker in self._workers.values() if worker.answers]
        compiled = [worker.memory for worker in in_use if worker.is_compiled]
        is_large = compiled and sum(compiled) >= _MOST_IN_USE * self.limits.memory
        return bool(is_large) or len(in_use) - len(self._queue) >= _MAX_RUNNING

    def _make_room(self, worker: GrammarWorker, reason: str | None) -> bool:
        """No process could be started for `worker`: end one that is idle, or refuse this grammar;
        -> whether it can be tried again"""
        if idle := self._idle:
            self._remove(idle[0])
            return True
        self._refuse(worker, _not_started(reason), until=0.0)
        return False

    def _refuse_stuck(self) -> None:
        """Refuse the grammars that have waited too long for others."""
        seconds = self.limits.queue_seconds
        latest = time.monotonic() - seconds
        if self._moved_at > latest:
            return
        for worker in [worker for worker in self._queue if worker.queued_at <= latest]:
            what = f"it was not compiled for {seconds:g} s because of other grammars in use"
            self._refuse(worker, f"{what}: send the request again later", until=0.0)

    def _until_deadline(self, seconds: float) -> float:
        since = min((w.since for w in self._workers.values() if w.asked), default=math.inf)
        return max(0.0, min(seconds, since + self.limits.reply_seconds - time.monotonic()))

    def _kill_late(self) -> None:
        seconds = self.limits.reply_seconds
        latest = time.monotonic() - seconds
        for worker in [w for w in self._workers.values() if w.asked and w.since <= latest]:
            if worker.is_compiled:
                self._overrun(worker, _slow_mask(seconds))
            else:
                what = f"compiling it took more than {seconds:g} s"
                self._overrun(worker, f"{what}: use a simpler grammar, or raise --grammar-timeout")

    def _bury(self, worker: GrammarWorker, exit_code: int) -> None:
        """Its process ended by itself, or was killed from outside."""
        self._take(worker)  # the replies that it left say what it was working on
        if worker is not self._workers.get(worker.source):
            return  # the last reply was a refusal
        if exit_code == -signal.SIGPROF:
            self._overrun(worker, _slow_mask(self.limits.mask_seconds))
            return
        if exit_code in _CRASHES:
            what = f"it needs more than {self.limits.memory >> 20} MiB of memory"
            self._overrun(worker, f"{what}: use a simpler grammar, or raise --grammar-memory")
            return
        for grammar in list(worker.answers.values()):
            grammar.num_restarts += 1
            if grammar.num_restarts > _MOST_RESTARTS:
                self._fail(grammar, f"its process {ending(exit_code)}: send the request again")
        self._restart(worker)

    def _overrun(self, worker: GrammarWorker, why: str) -> None:
        """A limit was reached by what the worker did last: only that answer is to blame."""
        if not worker.is_compiled:
            self._refuse(worker, why, time.monotonic() + _SECONDS_REFUSED)
            return
        culprit = worker.answers.get(worker.asked[0]) if worker.asked else None
        if culprit is not None:
            self._fail(culprit, why)
        self._restart(worker)

    def _restart(self, worker: GrammarWorker) -> None:
        """Follow the answers that are left in a new process, before other grammars."""
        self._remove(worker)
        if worker.answers:
            now = time.monotonic()
            successor = GrammarWorker(next(self._numbers), worker.source, now, is_restart=True)
            self._workers[worker.source] = successor
            self._queue.appendleft(successor)
            for grammar in worker.answers.values():
                self._attach(grammar, successor)

    def _remove(self, worker: GrammarWorker) -> None:
        del self._workers[worker.source]
        if worker in self._queue:
            self._queue.remove(worker)
        elif self._server is not None:
            self._server.kill(worker.number)
        self._disconnect(worker)

    def _disconnect(self, worker: GrammarWorker) -> None:
        if worker.channel is not None:
            worker.channel.close()
            worker.channel = None

    def _lose_server(self, server: ForkServer) -> None:
        """Its workers have ended with it."""
        self._selector.unregister(server.socket)
        server.close()
        was_ready, self._server, self._end = self._end is not None, None, None
        if not was_ready and not self._unusable:
            why = server.failures[0] if server.failures else "its process ended: send it again"
            for worker in list(self._workers.values()):
                self._refuse(worker, why, until=0.0)
            return
        for worker in list(self._workers.values()):
            if self._unusable:
                self._refuse(worker, self._unusable, until=0.0)
            elif worker not in self._queue:
                self._bury(worker, -signal.SIGKILL)
        if self._queue:
            self.prepare()
        if self._server is None:
            for worker in list(self._queue):
                self._refuse(worker, self._not_started, until=0.0)

    def _balance(self) -> None:
        """Keep the number and the memory of all workers within bounds."""
        while len(idle := self._idle) > _MAX_IDLE or self.cached_bytes > self.limits.memory:
            self._remove(idle[0])
        in_use = [worker for worker in self._workers.values() if worker.answers]
        most = _MOST_IN_USE * self.limits.memory
        if sum(worker.memory for worker in in_use) > most:
            largest = max(in_use, key=lambda worker: worker.memory)
            for grammar in list(largest.answers.values()):
                self._fail(
                    grammar,
                    f"all grammars in use need more than {most >> 20} MiB of memory, and this one "
                    "the most: use a simpler grammar, or raise --grammar-memory",
                )
            self._remove(largest)

    # Answers

    def _give(self, grammar: Grammar, mask: np.ndarray) -> None:
        assert self._end is not None
        grammar.receive(mask, self._end)

    def _fail(self, grammar: Grammar, why: str) -> None:
        worker = self._worker_of.pop(grammar.number)
        del worker.answers[grammar.number]
        if grammar.num_sent:
            worker.end(grammar.number)
        grammar.error = structure_error(why, worker.source.kind)

    def _refuse(self, worker: GrammarWorker, why: str, until: float) -> None:
        """It cannot be compiled, and is not tried again before then."""
        for grammar in list(worker.answers.values()):
            self._fail(grammar, why)
        self._remove(worker)
        self._refusals[worker.source] = why, until
        if len(self._refusals) > _MOST_REFUSALS:
            self._refusals.popitem(last=False)


def _not_started(reason: str | None) -> str:
    return f"no process can be started for it ({reason}): send the request again later"


def _slow_mask(seconds: float) -> str:
    what = f"computing the mask for the next token took more than {seconds:g} s"
    return f"{what}: use a simpler grammar"
