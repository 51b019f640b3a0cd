"""The state of one answer in its grammar, as the engine sees it.

A worker process computes the mask of the next token. Between a token and its mask the answer is not
ready, and its request is left out of steps. This module does not know slots, steps or torch.

The rule: `allowed` depends on the tokens so far only, so it is still valid when a request is
computed again after a preemption.
"""

from collections.abc import Collection
from typing import Protocol, final

import numpy as np

from slotzero.errors import RequestError
from slotzero.grammars.matcher import WORD_BITS, mask_of

_LATE_PENALTY = 16


class GrammarOwner(Protocol):
    """The pool that the answer belongs to."""

    def follow(self, grammar: "Grammar") -> None:
        """Request the mask after `grammar.tokens`."""

    def release(self, grammar: "Grammar") -> None:
        """End an answer."""


@final
class Grammar:
    def __init__(self, number: int, pool: GrammarOwner) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.num_sent = 0
        """tokens[0 : num_sent) have been sent to the worker."""
        self.num_restarts = 0
        """Number of times that the worker ended for a reason other than a limit."""
        self.error: RequestError | None = None
        """Why the answer cannot continue. The pool sets it, and the client receives it."""
        self._pool = pool
        self._allowed: np.ndarray | None = None
        self._end: np.ndarray | None = None
        self._num_unawaited = 0
        self._is_released = False

    @property
    def failure(self) -> str:
        """The message of `error`; empty without an error."""
        return "" if self.error is None else str(self.error)

    @property
    def is_ready(self) -> bool:
        """Whether the mask of the next token is known."""
        return self._allowed is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being computed for this answer."""
        return self.is_ready or self.error is not None

    @property
    def allowed(self) -> np.ndarray:
        """[words] uint32: bit i % 32 of word i // 32 for token i."""
        assert self._allowed is not None
        return self._allowed

    def advance(self, token: int) -> bool:
        """Append a token and request the next mask.

        Return False if the token is not allowed, or if there is an `error`.
        """
        word, bit = divmod(token, WORD_BITS)
        if self.error is not None or not int(self.allowed[word]) >> bit & 1:
            return False
        self.tokens.append(token)
        self._allowed = None
        self._pool.follow(self)
        return self.error is None

    def can_go_on(self, banned: Collection[int] = ()) -> bool:
        """Return whether any token is allowed, except end-of-sequence and the `banned` ones."""
        assert self._end is not None
        rest = self.allowed & ~self._end
        return bool(without(rest, banned).any())

    def release(self) -> None:
        """End the answer. Further calls have no effect."""
        if not self._is_released:
            self._is_released = True
            self._pool.release(self)

    def receive(self, allowed: np.ndarray, end: np.ndarray) -> None:
        """Set the mask of the next token and the mask of end-of-sequence tokens.

        The pool calls this.
        """
        self._allowed, self._end = allowed, end

    def is_awaited(self) -> bool:
        """Return whether to wait for this mask: not if a recent one was late.

        Call this once per mask.
        """
        self._num_unawaited -= self._num_unawaited > 0
        return not self._num_unawaited

    def was_late(self) -> None:
        self._num_unawaited = _LATE_PENALTY


def next_mask(grammar: Grammar | None, banned: Collection[int], vocab_size: int) -> np.ndarray:
    """Return the mask of the next token: all that the grammar allows, without the banned ones."""
    if grammar is None:
        all_tokens = np.full(-(-vocab_size // WORD_BITS), 0xFFFFFFFF, np.uint32)
        return without(all_tokens, banned)
    return without(grammar.allowed, banned)


def without(mask: np.ndarray, banned: Collection[int]) -> np.ndarray:
    return mask & ~words(mask_of(banned, mask.nbytes)) if banned else mask


def words(mask: bytes) -> np.ndarray:
    return np.frombuffer(mask, "<u4").astype(np.uint32, copy=False)
