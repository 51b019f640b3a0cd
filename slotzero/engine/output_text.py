"""The text of one answer as it grows: whole characters, ended by the first stop string.

Text that could be the beginning of a stop string is held back until it is decided.
"""

from slotzero.sampling.params import SamplingParams
from slotzero.text.tokenizer import Detokenizer, Tokenizer


class Transcript:
    """text[0 : num_safe) may be shown; text[num_safe :] may still turn out to be a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._stopped = False
        self._closed = False
        self._search_from = 0  # text before it came too early to stop anything
        self.text = ""

    @property
    def num_safe(self) -> int:
        if self._closed:
            return len(self.text)
        longest = max((self._held_back(stop) for stop in self._stops), default=0)
        return len(self.text) - longest

    def push(self, token_id: int, *, hide: bool, may_stop: bool) -> str | None:
        """Adds a token; -> the stop string that it completed. A stop token may be hidden."""
        if hide and not self._include_stop:
            return None
        before = len(self.text)
        self.text += self._detokenizer.push(token_id)
        if not may_stop:
            self._search_from = len(self.text) + len(self._detokenizer.held())
            return None
        if self._stops and self._find(before, self._detokenizer.held()) is not None:
            self.text += self._detokenizer.flush()
        return self._cut(before)

    def close(self) -> str | None:
        """No more tokens; -> the stop string that the last bytes completed."""
        if self._closed or self._stopped:
            self._closed = True
            return None
        self._closed = True
        before = len(self.text)
        self.text += self._detokenizer.flush()
        return self._cut(before)

    def _find(self, before: int, held: str = "") -> tuple[int, str] | None:
        """The first stop string that ends after `before`, and where it begins"""
        text, found = self.text + held, None
        for stop in self._stops:
            at = text.find(stop, max(self._search_from, before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        return found

    def _cut(self, before: int) -> str | None:
        found = self._find(before)
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self._stopped = True
        return stop

    def _held_back(self, stop: str) -> int:
        """The longest end of the text that is a proper beginning of the stop string."""
        for n in range(min(len(stop) - 1, len(self.text) - self._search_from), 0, -1):
            if self.text.endswith(stop[:n]):
                return n
        return 0
