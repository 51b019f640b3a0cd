"""From tokens to what a client reads: one answer as it grows.

It does not know HTTP, tools or its siblings. Stop strings are found here, by OutputText: the
engine, in its own process, handles token ids only.

The rule: the log probability of a token is given out once its text is final, and not at all if a
stop string or the end of the sequence took its text away.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from slotzero.engine.output_text import OutputText
from slotzero.errors import EngineDiedError
from slotzero.sampling.params import SamplingParams
from slotzero.server.messages import TokenDelta, TokenLogprobs
from slotzero.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Ask:
    """One answer that is wanted."""

    index: int
    """Its place among the choices."""
    prompt: list[int]
    params: SamplingParams
    engine_params: dict[str, Any]
    """The fields of `params` that were given and that the engine sees."""
    names: dict[str, str] = field(default_factory=dict)
    """Fields of SamplingParams that the client knows by another name."""
    is_counted: bool = True
    """Whether its prompt is counted: siblings share one."""
    echo: str = ""
    """Text before the answer's own."""


@dataclass(frozen=True)
class TokenRow:
    """One token's log probabilities, and where in the answer its text begins."""

    token: int
    offset: int
    values: TokenLogprobs


@dataclass(frozen=True)
class Piece:
    """What one answer gained."""

    index: int
    text: str
    rows: list[TokenRow]
    finish_reason: str | None
    num_tokens: int
    """Tokens of the answer up to here, those whose text is held back included."""

    def __add__(self, later: "Piece") -> "Piece":
        return Piece(
            self.index,
            self.text + later.text,
            self.rows + later.rows,
            later.finish_reason,
            later.num_tokens,
        )


class Answer:
    def __init__(self, ask: Ask, tokenizer: Tokenizer, eos_token_ids: Collection[int]) -> None:
        self.ask = ask
        self._text = OutputText(tokenizer, ask.params, eos_token_ids)
        self._rows: deque[tuple[TokenRow, int]] = deque()  # with the end of their text
        self.num_cached = 0
        self.finish_reason: str | None = None

    def grow(self, grown: TokenDelta) -> Piece:
        if grown.finish_reason == "abort":
            raise EngineDiedError("the engine gave this request up; send it again")
        if self.num_tokens == 0:
            self.num_cached = min(grown.num_cached, len(self.ask.prompt))
        spans = self._text.extend(grown.token_ids, grown.finish_reason)
        for token, span, values in zip(grown.token_ids, spans, grown.logprobs, strict=False):
            if not span.is_hidden:
                self._rows.append((TokenRow(token, span.start, values), span.end))
        self.finish_reason = grown.finish_reason if self._text.stop is None else "stop"
        return self._piece()

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    def _piece(self) -> Piece:
        is_over = self.finish_reason is not None
        num_final, text = self._text.num_final, self._text.take()
        rows = []
        while self._rows and (is_over or self._rows[0][1] <= num_final):
            row, end = self._rows.popleft()
            if not is_over or row.offset < num_final or row.offset == end:
                rows.append(row)
        return Piece(self.ask.index, text, rows, self.finish_reason, self.num_tokens)
