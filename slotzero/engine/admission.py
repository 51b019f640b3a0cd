"""Requests whose grammar or next mask is still being computed.

A grammar is compiled, and each mask computed, in another process (see grammars/pool.py), while
other requests run. A request with a grammar is in one of these states:

    compiling       its grammar is being compiled; no scheduler has it yet
    scheduled       a scheduler has it, and the mask of its next token is known
    late            a scheduler has it, but its next mask did not arrive within MASK_GRACE: it skips
                    steps until the mask has arrived

It does not know schedulers: the engine passes them the requests that are returned here. The
engine's lock guards every call; only `check` acquires it itself.
"""

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np

from slotzero.errors import RequestError
from slotzero.grammars.grammar import Grammar, next_mask
from slotzero.grammars.pool import Grammars
from slotzero.request import Request, RequestStatus
from slotzero.sampling.structured import structure_error, structured_outputs
from slotzero.system.interrupt import uninterrupted

MASK_GRACE = 0.005  # seconds that a commit waits for the masks after its tokens
IDLE_WAIT = 0.01  # seconds that a step waits for grammars when nothing else can be done
COMPILE_WAIT = 0.001  # seconds between two polls of grammars that are only checked


class GrammarAdmission:
    def __init__(self, grammars: Grammars, lock: threading.RLock) -> None:
        self.grammars = grammars
        self._lock = lock
        self._compiling: dict[str, Request] = {}
        self._late: list[Request] = []

    @property
    def is_busy(self) -> bool:
        """Whether a request, or a process, waits for a grammar."""
        return bool(self._compiling) or self.grammars.is_busy

    @property
    def num_compiling(self) -> int:
        return len(self._compiling)

    @property
    def has_late(self) -> bool:
        return bool(self._late)

    def begin(self, request: Request) -> None:
        """Give a request its grammar, which need not be compiled yet; raises RequestError if the
        grammar is known to be wrong."""
        wanted = structured_outputs(request.params.structured_outputs)
        if wanted is None:
            return
        request.grammar = self.grammars.begin(wanted)
        if request.grammar.is_ready:
            _check_beginning(request)

    def hold(self, request: Request) -> None:
        """Keep a request until its grammar is compiled."""
        self._compiling[request.id] = request

    def cancel(self, request: Request) -> bool:
        """End a request that is held; return whether it was."""
        if self._compiling.pop(request.id, None) is None:
            return False
        _abort(request)
        return True

    def take_compiled(self) -> Iterator[tuple[Request, RequestError | None]]:
        """Yield the held requests whose grammar was compiled or refused; one that is refused has
        ended."""
        if self._compiling or self._late or self.grammars.is_busy:
            self.grammars.poll(0.0)
        for request in [r for r in self._compiling.values() if _grammar(r).is_settled]:
            del self._compiling[request.id]
            try:
                _check_beginning(request)
            except RequestError as error:
                refuse(request, error)
                yield request, error
            else:
                yield request, None

    def take_late(self) -> list[Request]:
        """Return the late requests whose mask has arrived."""
        waiting = [
            request for request in self._late if request.status is not RequestStatus.FINISHED
        ]
        self._late = [request for request in waiting if not _grammar(request).is_settled]
        return [request for request in waiting if _grammar(request).is_settled]

    def await_masks(self, requests: Sequence[Request]) -> list[Request]:
        """Wait briefly for the masks after newly committed tokens; return the requests whose mask
        has arrived. The others are late."""
        pending = [r for r in requests if r.awaits_mask and r.status is not RequestStatus.FINISHED]
        self.grammars.wait([_grammar(request) for request in pending], MASK_GRACE)
        self._late += [request for request in pending if not _grammar(request).is_settled]
        return [request for request in pending if _grammar(request).is_settled]

    def wait(self) -> None:
        """Wait for a grammar or mask when no step can run."""
        if self.grammars.is_busy:
            self.grammars.poll(IDLE_WAIT)

    def check(self, requests: Sequence[Request | RequestError]) -> list[Request | RequestError]:
        """Compile the grammars of requests, all at the same time, and release them again.

        A request whose grammar is wrong is replaced by the error. The lock is not held while this
        waits.
        """
        outcomes = list(requests)
        pending: dict[int, Request] = {}
        try:
            for i, request in enumerate(requests):
                if isinstance(request, RequestError):
                    continue
                try:
                    with self._lock, uninterrupted():
                        self.begin(request)
                        if request.grammar is not None:
                            pending[i] = request
                except RequestError as error:
                    outcomes[i] = error
            while pending:
                with self._lock, uninterrupted():
                    self.grammars.poll(0.0)
                    for i in [i for i, r in pending.items() if _grammar(r).is_settled]:
                        outcomes[i] = _without_grammar(pending.pop(i))
                if pending:
                    time.sleep(COMPILE_WAIT)
        finally:
            with self._lock, uninterrupted():
                for request in pending.values():
                    _without_grammar(request)
        return outcomes

    def masks(self, request: Request, vocab_size: int) -> Iterator[np.ndarray]:
        """Compute the masks of a finished answer again, one for each of its tokens, and wait for
        each; raises RequestError if its grammar fails."""
        params, output = request.params, request.output_token_ids
        wanted = structured_outputs(params.structured_outputs)
        grammar = None if wanted is None else self.grammars.begin(wanted)
        try:
            for i, token in enumerate(output):
                while grammar is not None and not grammar.is_settled:
                    self.grammars.poll(IDLE_WAIT)
                if grammar is not None and grammar.error is not None:
                    raise grammar.error
                yield next_mask(grammar, params.banned_after(output[:i]), vocab_size)
                if grammar is not None:
                    grammar.advance(token)
        finally:
            if grammar is not None:
                grammar.release()


def refuse(request: Request, error: RequestError) -> None:
    """End a request that no scheduler has, because of its grammar."""
    _grammar(request).error = error
    _abort(request)


def _abort(request: Request) -> None:
    request.status, request.finish_reason = RequestStatus.FINISHED, "abort"
    _grammar(request).release()


def _grammar(request: Request) -> Grammar:
    assert request.grammar is not None
    return request.grammar


def _check_beginning(request: Request) -> None:
    """Raise RequestError, and release the grammar, unless an answer can begin."""
    grammar = _grammar(request)
    if grammar.error is None and not grammar.can_go_on(request.banned_ids):
        grammar.error = structure_error("no token can begin such an answer")
    if grammar.error is not None:
        grammar.release()
        raise grammar.error


def _without_grammar(request: Request) -> Request | RequestError:
    """Release a request's grammar; return the request, or what is wrong with its grammar."""
    grammar = _grammar(request)
    try:
        if grammar.is_settled:
            _check_beginning(request)
    except RequestError as error:
        return error
    finally:
        request.grammar = None
        grammar.release()
    return request
