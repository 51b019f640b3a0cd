"""One answer's place in its grammar, as the engine sees it.

The mask of the next token is computed in a worker process. Between a token and its mask the answer
is not ready, and its request sits out. It does not know slots, steps or torch.

The rule: `allowed` is what the tokens so far leave open, so a request that is computed again after
a preemption finds it as it left it.
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
        """Ask for the mask after `grammar.tokens`."""

    def release(self, grammar: "Grammar") -> None:
        """End an answer."""


@final
class Grammar:
    def __init__(self, number: int, pool: GrammarOwner) -> None:
        self.number = number
        self.tokens: list[int] = []
        self.num_sent = 0
        """tokens[0 : num_sent) are known to the worker."""
        self.num_restarts = 0
        """Number of times that its worker ended for another reason than a limit."""
        self.error: RequestError | None = None
        """Why the answer cannot go on. Set by the pool; for the client to read."""
        self._pool = pool
        self._allowed: np.ndarray | None = None
        self._end: np.ndarray | None = None
        self._num_unawaited = 0
        self._is_released = False

    @property
    def failure(self) -> str:
        """The message of `error`, or empty."""
        return "" if self.error is None else str(self.error)

    @property
    def is_ready(self) -> bool:
        """Whether the mask of the next token is known."""
        return self._allowed is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is being computed for it."""
        return self.is_ready or self.error is not None

    @property
    def allowed(self) -> np.ndarray:
        """[words] uint32: bit i % 32 of word i // 32 for token i."""
        assert self._allowed is not None
        return self._allowed

    def advance(self, token: int) -> bool:
        """Append a token, and ask for the next mask. False: the token was not allowed, or there is
        a `failure`."""
        word, bit = divmod(token, WORD_BITS)
        if self.error is not None or not int(self.allowed[word]) >> bit & 1:
            return False
        self.tokens.append(token)
        self._allowed = None
        self._pool.follow(self)
        return self.error is None

    def can_go_on(self, banned: Collection[int] = ()) -> bool:
        """Return whether a token other than these and the ends of a sequence is allowed."""
        assert self._end is not None
        rest = self.allowed & ~self._end
        if banned:
            rest &= ~words(mask_of(banned, rest.nbytes))
        return bool(rest.any())

    def release(self) -> None:
        """End the answer; may be called again."""
        if not self._is_released:
            self._is_released = True
            self._pool.release(self)

    def receive(self, allowed: np.ndarray, end: np.ndarray) -> None:
        """Set the mask of the next token, and the mask of all ends of a sequence. The pool calls
        this."""
        self._allowed, self._end = allowed, end

    def is_awaited(self) -> bool:
        """Return whether to wait for this mask: not if a recent one was late. Call it once for each
        mask."""
        self._num_unawaited -= self._num_unawaited > 0
        return not self._num_unawaited

    def was_late(self) -> None:
        self._num_unawaited = _LATE_PENALTY


def words(mask: bytes) -> np.ndarray:
    return np.frombuffer(mask, "<u4").astype(np.uint32, copy=False)
