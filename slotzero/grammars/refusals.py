"""Grammars that could not be compiled: a request with one of them fails at once.

The rule: a grammar that exceeded a limit is tried again later, when the machine may be less busy.
"""

import time
from collections import OrderedDict
from typing import final

from slotzero.grammars.messages import GrammarSource

_MAX_REFUSALS = 256


@final
class Refusals:
    def __init__(self) -> None:
        self._refusals: OrderedDict[GrammarSource, tuple[str, float]] = OrderedDict()
        """By grammar: the reason, and the time at which the refusal expires."""

    def add(self, source: GrammarSource, reason: str, until: float) -> None:
        """Store a refusal, and drop the oldest if there are too many."""
        self._refusals[source] = reason, until
        if len(self._refusals) > _MAX_REFUSALS:
            self._refusals.popitem(last=False)

    def reason(self, source: GrammarSource) -> str | None:
        """Return why this grammar is refused, or None if it may be compiled."""
        reason, until = self._refusals.get(source, ("", 0.0))
        return reason if time.monotonic() < until else None
