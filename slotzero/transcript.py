"""The text of one answer as it grows: whole characters, ended by the first stop string.

Text that could be the beginning of a stop string is held back until it is decided.
"""

from slotzero.sampling.params import SamplingParams
from slotzero.tokenizer import Detokenizer, Tokenizer


class Transcript:
    """text[0 : num_safe) may be shown; text[num_safe :] may still turn out to be a stop string."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._stopped = False
        self._closed = False
        self.text = ""

    @property
    def num_safe(self) -> int:
        if self._closed:
            return len(self.text)
        longest = max((self._held_back(stop) for stop in self._stops), default=0)
        return len(self.text) - longest

    def push(self, token_id: int, *, hide: bool) -> str | None:
        """Adds a token; -> the stop string that it completed. A stop token may be hidden."""
        if hide and not self._include_stop:
            return None
        before = len(self.text)
        self.text += self._detokenizer.push(token_id)
        return self._cut(before)

    def close(self) -> None:
        """No more tokens: what was held back is text after all."""
        if not self._closed:
            self.text += "" if self._stopped else self._detokenizer.flush()
            self._closed = True

    def _cut(self, before: int) -> str | None:
        found: tuple[int, str] | None = None
        for stop in self._stops:
            at = self.text.find(stop, max(0, before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        if found is None:
            return None
        at, stop = found
        self.text = self.text[: at + len(stop) if self._include_stop else at]
        self._stopped = True
        return stop

    def _held_back(self, stop: str) -> int:
        """The longest end of the text that is a proper beginning of the stop string."""
        for n in range(min(len(stop) - 1, len(self.text)), 0, -1):
            if self.text.endswith(stop[:n]):
                return n
        return 0
