"""From tokens to text: one answer while it is generated.

This module does not know HTTP, tools or the request's other answers. Stop strings are handled here,
because the engine, in its own process, sees only tokens.

The rule: a token's log probability is sent once its text is final, and never if a stop string or
the end of the sequence removed its text. With `text` the contents of the transcript:

    text[0 : num_given)              was sent
    text[num_given : num_safe)       is sent next
    text[num_safe :)                 may still turn out to be a stop string
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from slotzero.engine.output_text import Transcript
from slotzero.errors import EngineDiedError
from slotzero.sampling.params import SamplingParams
from slotzero.server.messages import TokenDelta, TokenLogprobs
from slotzero.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer, as the engine knows it."""

    index: int
    """Index among the choices."""
    prompt: list[int]
    params: SamplingParams
    engine_params: dict[str, Any]
    """The fields of `params` that were set and that the engine sees."""
    names: dict[str, str] = field(default_factory=dict)
    """The client's names of SamplingParams fields, where they differ."""
    is_counted: bool = True
    """Whether the prompt counts in the usage: several answers share one prompt."""
    echo: str = ""
    """Text sent before the answer."""


@dataclass(frozen=True)
class TokenRow:
    """One token's log probabilities, and the offset of its text in the answer."""

    token: int
    offset: int
    values: TokenLogprobs


@dataclass(frozen=True)
class TextDelta:
    """New text and log probabilities of one answer."""

    index: int
    text: str
    rows: list[TokenRow]
    finish_reason: str | None
    num_tokens: int
    """Tokens of the answer so far, including those whose text is held back."""

    def __add__(self, later: "TextDelta") -> "TextDelta":
        return TextDelta(
            self.index,
            self.text + later.text,
            self.rows + later.rows,
            later.finish_reason,
            later.num_tokens,
        )


class AnswerBuilder:
    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, eos_token_ids: Collection[int]
    ) -> None:
        self.request = request
        self._stop_ids = request.params.ends_at(eos_token_ids)
        self._transcript = Transcript(tokenizer, request.params)
        self._num_given = 0
        self._rows: deque[tuple[TokenRow, int]] = deque()  # with the end of their text
        self.num_tokens = 0
        self.num_cached = 0
        self.finish_reason: str | None = None

    def grow(self, grown: TokenDelta) -> TextDelta:
        if grown.finish_reason == "abort":
            raise EngineDiedError("the engine aborted this request: send it again")
        if self.num_tokens == 0:
            self.num_cached = min(grown.num_cached, len(self.request.prompt))
        is_end = grown.finish_reason is not None
        for i, token in enumerate(grown.token_ids):
            is_last = grown.finish_reason == "stop" and i == len(grown.token_ids) - 1
            is_stop_token = is_last and token in self._stop_ids  # else a grammar ended the answer
            values = grown.logprobs[i] if grown.logprobs else None
            if self._push(token, values, is_stop_token):
                is_end = True
                break
        if is_end:
            stopped = self._transcript.close() is not None
            self.finish_reason = self.finish_reason or grown.finish_reason
            if stopped:
                self.finish_reason = "stop"
        return self._delta()

    def _push(self, token: int, values: TokenLogprobs | None, is_stop_token: bool) -> bool:
        """Add a token, and return whether it completes a stop string."""
        self.num_tokens += 1
        offset = len(self._transcript.text)
        stop = self._transcript.push(
            token, hide=is_stop_token, may_stop=self.num_tokens >= self.request.params.min_tokens
        )
        is_hidden = is_stop_token and not self.request.params.include_stop_str_in_output
        if values is not None and not is_hidden:
            row = TokenRow(token, offset, values)
            self._rows.append((row, len(self._transcript.text)))
        if stop is not None:
            self.finish_reason = "stop"
        return stop is not None

    def _delta(self) -> TextDelta:
        is_over = self.finish_reason is not None
        num_safe = self._transcript.num_safe
        text = self._transcript.text[self._num_given : num_safe]
        self._num_given += len(text)
        rows = []
        while self._rows and (is_over or self._rows[0][1] <= num_safe):
            row, end = self._rows.popleft()
            if not is_over or row.offset < num_safe or row.offset == end:
                rows.append(row)
        return TextDelta(self.request.index, text, rows, self.finish_reason, self.num_tokens)
