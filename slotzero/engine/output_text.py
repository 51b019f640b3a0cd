"""Text of one answer: detokenised as tokens come, ended by the first stop string.

`LLM` and the HTTP server both use it: in `LLM` the engine calls it at each commit, in the server
the HTTP process does. It decides where an answer ends because of its text, and which text is final.
With `text` the text so far:

    text[0 : num_taken)              was handed out by `take`
    text[num_taken : num_final)      is handed out next
    text[num_final :)                may still turn out to be the beginning of a stop string
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from slotzero.sampling.params import SamplingParams
from slotzero.text.tokenizer import Detokenizer, Tokenizer


class TokenSpan(NamedTuple):
    """Text that one token added when it came: text[start : end)."""

    start: int
    end: int
    is_hidden: bool
    """Whether it is a stop token, which is not part of the text."""


class OutputText:
    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, eos_token_ids: Collection[int]
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stop_ids = params.ends_at(eos_token_ids)
        self._stops = tuple(params.stop)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._search_from = 0  # a stop string that begins earlier came before min_tokens
        self._is_closed = False
        self._num_taken = 0
        self.num_tokens = 0
        self.text = ""
        self.stop: str | None = None
        """The stop string that ended the answer."""

    @property
    def num_final(self) -> int:
        """Number of characters that no later token can take away."""
        if self._is_closed:
            return len(self.text)
        longest = max((self._held_back(stop) for stop in self._stops), default=0)
        return len(self.text) - longest

    def extend(self, token_ids: Sequence[int], finish_reason: str | None) -> list[TokenSpan]:
        """Append new tokens, and return the span of each token that is kept.

        Tokens after a stop string are dropped, and `stop` is set: then the answer is over.
        `finish_reason` is why it ended with the last of these tokens, else None.
        """
        spans: list[TokenSpan] = []
        for i, token in enumerate(token_ids):
            is_last = i == len(token_ids) - 1
            # without a stop token at its end, it was the grammar that was complete
            is_stop_token = is_last and finish_reason == "stop" and token in self._stop_ids
            spans.append(self._push(token, is_stop_token and not self._include_stop))
            if self.stop is not None:
                break
        if self.stop is not None or finish_reason is not None:
            self._close()
        return spans

    def take(self) -> str:
        """Return the final text that was not handed out yet."""
        new = self.text[self._num_taken : self.num_final]
        self._num_taken += len(new)
        return new

    def _push(self, token_id: int, is_hidden: bool) -> TokenSpan:
        self.num_tokens += 1
        start = len(self.text)
        if is_hidden:
            return TokenSpan(start, start, is_hidden)
        self.text += self._detokenizer.push(token_id)
        if self.num_tokens < self._min_tokens:
            self._search_from = len(self.text) + len(self._detokenizer.held())
        else:
            if self._stops and self._find(start, self._detokenizer.held()) is not None:
                self.text += self._detokenizer.flush()
            self._cut(start)
        return TokenSpan(start, len(self.text), is_hidden)

    def _close(self) -> None:
        """End the text; the last bytes may still complete a stop string."""
        if self.stop is None and not self._is_closed:
            before = len(self.text)
            self.text += self._detokenizer.flush()
            self._cut(before)
        self._is_closed = True

    def _find(self, before: int, held: str = "") -> tuple[int, str] | None:
        """Return where the first stop string that ends after `before` begins, and that string."""
        text, found = self.text + held, None
        for stop in self._stops:
            at = text.find(stop, max(self._search_from, before - len(stop) + 1))
            if at >= 0 and (found is None or at < found[0]):
                found = (at, stop)
        return found

    def _cut(self, before: int) -> None:
        found = self._find(before)
        if found is not None:
            at, self.stop = found
            self.text = self.text[: at + len(self.stop) if self._include_stop else at]

    def _held_back(self, stop: str) -> int:
        """Return the length of the longest end of the text that begins the stop string."""
        for n in range(min(len(stop) - 1, len(self.text) - self._search_from), 0, -1):
            if self.text.endswith(stop[:n]):
                return n
        return 0
