"""S8: which answers are recomputed, when, and how a disagreement is reported.

recompute.py knows how an answer is recomputed. The rule: recomputing takes no slot and no page from
the engine, so it delays or preempts no request; an answer for which there is no memory is skipped
and counted.
"""

import logging
from collections import deque
from collections.abc import Iterator, Sequence

import torch

from slotzero.certify.recompute import Disagreement, Recomputation
from slotzero.certify.report import Violation
from slotzero.certify.scenarios import bounds_of
from slotzero.engine.engine import Engine
from slotzero.errors import RequestError
from slotzero.request import Request
from slotzero.runners.passes import SAMPLED
from slotzero.speculative.passes import VERIFIED

_log = logging.getLogger("slotzero.certify")


class AnswerCheck:
    def __init__(self, engine: Engine, is_full: bool) -> None:
        """With `is_full`, every answer is recomputed at once, before it leaves the engine.
        Otherwise one answer at a time is, one chunk after each step, so that other requests wait no
        longer than for a prompt."""
        self.num_recomputed = 0
        self.num_left_out = 0
        self._engine, self._is_full = engine, is_full
        self._rounding = bounds_of(engine).size
        self._is_wanted = False
        self._pending: deque[tuple[Request, Iterator[Disagreement | None]]] = deque()

    @property
    def is_pending(self) -> bool:
        """Whether an answer is being recomputed; steps without rows continue with it."""
        return bool(self._pending)

    def committed(self, finished: Sequence[Request], is_due: bool) -> Iterator[Violation]:
        """Continue after a step in which these requests finished. `is_due`: check the next one."""
        self._is_wanted |= is_due
        for request in finished:
            is_wanted = self._is_full or (self._is_wanted and not self._pending)
            if is_wanted and _can_be_recomputed(request):
                self._is_wanted = False
                self._begin(request)
        while self._pending:
            yield from self._go_on()
            if not self._is_full and self._engine.has_work:
                return

    def forget(self) -> None:
        """Drop what is being recomputed, because the weights are about to change."""
        self._pending.clear()

    def _begin(self, request: Request) -> None:
        engine = self._engine
        masks = None
        if request.is_masked:
            masks = engine.admission.masks(request, engine.worker.vocab_size)
        try:
            with torch.inference_mode():
                again = Recomputation(engine.worker, request, self._rounding, masks)
            self._pending.append((request, again.chunks()))
        except torch.OutOfMemoryError:
            self._leave_out(request, "no memory for its KV")

    def _go_on(self) -> Iterator[Violation]:
        """Recompute one chunk of the oldest pending answer."""
        request, chunks = self._pending[0]
        try:
            with torch.inference_mode():
                found = next(chunks)
        except StopIteration:
            self.num_recomputed += 1
            self._pending.popleft()
        except (torch.OutOfMemoryError, RequestError) as error:
            self._pending.popleft()
            is_grammar = isinstance(error, RequestError)  # which its worker process may have lost
            self._leave_out(request, str(error) if is_grammar else "no memory for its KV")
        else:
            if found is not None:
                yield self._violation(request, found)

    def _leave_out(self, request: Request, why: str) -> None:
        if not self.num_left_out:
            _log.warning(
                "the sanitizer skips request %s, its answer is not recomputed: %s", request.id, why
            )
        self.num_left_out += 1

    def _violation(self, request: Request, found: Disagreement) -> Violation:
        """Describe a disagreement, with what the answer used that recomputing it does without."""
        worker, tensor, made_of = self._engine.worker, SAMPLED, []
        if request.num_found:
            tensor = worker.page_tables[0]
            made_of.append(f"{request.num_found} prompt tokens came from the prefix cache")
        if request.speculates and worker.drafter is not None:
            tensor = VERIFIED
            made_of.append(f"drafts of {worker.drafter.name} were verified")
        if request.num_preemptions:
            made_of.append(f"it was preempted {request.num_preemptions} times")
        found_text = (
            f"token {found.got} at position {found.position} where {found.expected} was expected"
            f"{''.join(f'; {fact}' for fact in made_of)}"
        )
        return Violation("S8", "engine", f"request {request.id}", tensor, found_text)


def _can_be_recomputed(request: Request) -> bool:
    is_answered = request.finish_reason != "abort" and bool(request.output_token_ids)
    return is_answered and not request.saw_update
