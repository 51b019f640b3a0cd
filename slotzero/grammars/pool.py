"""The grammars of one engine: where answers begin, wait for their masks, and end.

Each grammar has a worker process. So a grammar that takes too long or too much memory can be killed
without harm to the engine, and all its memory is freed; supervisor.py decides when. This module
exchanges messages with the processes. Only `poll` and `wait` block, for at most the given time. The
caller holds the engine's lock.
"""

import functools
import importlib.util
import math
import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from typing import final

from slotzero.grammars.grammar import Grammar, words
from slotzero.grammars.limits import GrammarLimits
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
from slotzero.grammars.supervisor import Supervisor
from slotzero.sampling.structured import StructuredOutputs, structure_error
from slotzero.text.tokenizer import Tokenizer


@final
class Grammars:
    def __init__(
        self,
        make_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: GrammarLimits,
    ) -> None:
        """Prepare without starting a process; `vocab_size` is the number of the model's logits."""
        make_server = functools.partial(
            ForkServer,
            make_tokenizer,
            vocab_size,
            eos_token_ids,
            {"memory": limits.memory, "mask_seconds": limits.mask_seconds},
        )
        self.supervisor = Supervisor(make_server, limits)
        self._mask_bytes = -(-vocab_size // WORD_BITS) * WORD_BITS // 8
        self._is_installed = importlib.util.find_spec("llguidance") is not None
        self._workers = self.supervisor.workers

    @property
    def is_busy(self) -> bool:
        """Whether a grammar is being compiled or a mask computed."""
        return self._workers.is_busy

    @property
    def cached_bytes(self) -> int:
        """Memory of the compiled grammars that no answer uses."""
        return self._workers.idle_bytes

    def prepare(self) -> None:
        """Start the fork server, so that the first grammar does not wait for it.

        Starting takes most of a second for 50,000 tokens. If it fails, the next call tries again.
        """
        if self._is_installed:
            self.supervisor.start_server()

    def begin(self, structure: StructuredOutputs) -> Grammar:
        """Begin an answer, which is not ready before its grammar is compiled.

        Raise RequestError if it is already known that the grammar cannot be compiled.
        """
        source = GrammarSource(structure.kind, structure.text)
        if not self._is_installed:
            raise structure_error("llguidance is missing: pip install 'slotzero[server]'")
        if self.supervisor.unusable:
            raise structure_error(self.supervisor.unusable)
        refusal = self.supervisor.refusals.reason(source)
        if refusal is not None:
            raise structure_error(refusal, source.kind)
        self.prepare()
        if self.supervisor.server is None:
            raise structure_error(self.supervisor.not_started, source.kind)
        worker = self._workers.get(source) or self.supervisor.queue(source)
        grammar = Grammar(self.supervisor.next_number(), self)
        self.supervisor.attach(grammar, worker)
        return grammar

    def follow(self, grammar: Grammar) -> None:
        worker = self.supervisor.worker_of[grammar.number]
        if worker.is_compiled:
            worker.follow(grammar, time.monotonic())

    def release(self, grammar: Grammar) -> None:
        if grammar.number in self.supervisor.worker_of:  # else its worker ended before it
            self.supervisor.release(grammar)

    def wait(self, grammars: Iterable[Grammar], seconds: float) -> None:
        """Wait for masks that were requested just now.

        If a mask is late, the next few masks of its answer are not waited for, because the other
        answers of the batch would wait too.
        """
        awaited = [grammar for grammar in grammars if grammar.is_awaited()]
        until = time.monotonic() + seconds
        pending = awaited[::-1]  # replies mostly arrive in order, so pop from the end
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
        """Handle the messages that have arrived; wait up to `seconds` if there are none."""
        supervisor = self.supervisor
        if supervisor.server is None:
            return
        left = min(seconds, self._workers.seconds_left(supervisor.limits.reply_seconds))
        for key, events in supervisor.selector.select(left):
            worker: GrammarWorker | None = key.data
            if worker is None:
                self._hear(supervisor.server)
                continue
            if worker.channel is not None and events & selectors.EVENT_WRITE:
                worker.channel.flush()
            self._take(worker)
        supervisor.enforce_limits()

    def _hear(self, server: ForkServer) -> None:
        match server.receive():
            case Ready(ends):
                self.supervisor.end = words(mask_of(ends, self._mask_bytes))
            case Unusable(reason):
                self.supervisor.unusable = (
                    f"this model's tokenizer cannot be used for structured outputs ({reason})"
                )
            case WorkerEnded(number, exit_code):
                worker = self._workers.numbered(number)
                if worker is not None:
                    self._take(worker)  # its last replies show what it was working on
                    self.supervisor.ended(worker, exit_code)
            case NotStarted(number, reason):
                worker = self._workers.numbered(number)
                if worker is not None:
                    self.supervisor.start_failed(worker, reason)
            case None:
                for worker in list(self._workers.values()):
                    self._take(worker)
                self.supervisor.server_ended(server)

    def _take(self, worker: GrammarWorker) -> None:
        """Handle all replies that have arrived."""
        if worker.channel is None:
            return  # no more replies can arrive
        for reply in worker.channel.receive():
            self._take_reply(worker, reply)
        if worker.channel is not None and not worker.channel.is_open:
            worker.disconnect()  # the fork server reports how it ended

    def _take_reply(self, worker: GrammarWorker, reply: Reply) -> None:
        worker.unanswered.popleft()
        worker.since, worker.memory = time.monotonic(), reply.memory
        if reply.number == COMPILE:
            self._compiled(worker, reply)
            return
        grammar = worker.answers.get(reply.number)
        if grammar is None:
            return  # it was released meanwhile
        if reply.error:
            self.supervisor.fail(
                grammar, f"the answer cannot continue ({reply.error}): use a simpler grammar"
            )
        else:
            self.supervisor.give(grammar, words(reply.mask))

    def _compiled(self, worker: GrammarWorker, reply: Reply) -> None:
        if reply.error:
            self.supervisor.refuse(worker, reply.error, math.inf)
            return
        worker.first_mask = words(reply.mask)
        for grammar in worker.answers.values():
            if grammar.is_ready:
                continue  # it received its mask before a restart
            if grammar.tokens:
                worker.follow(grammar, worker.since)
            else:
                self.supervisor.give(grammar, worker.first_mask)
