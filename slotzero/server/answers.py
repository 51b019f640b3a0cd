"""From tokens to text: one answer while it is generated.

This module does not know HTTP, tools or the request's other answers. Stop strings are found here,
by OutputText: the engine, in its own process, handles token ids only.

The rule: a token's log probability is sent once its text is final, and, unless the request asks for
those of every token, never if a stop string or the end of the sequence removed its text.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from slotzero.engine.output_text import OutputText
from slotzero.errors import EngineDiedError
from slotzero.sampling.params import SamplingParams
from slotzero.server.messages import ABORTED, TokenDelta, TokenExperts, TokenLogprobs
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
    is_answered: bool = True
    """Whether the answer is sent. If not, the engine generates one token, which is dropped."""
    shows_end: bool = False
    """Whether tokens that end the answer have log probabilities too, although they are not text:
    clients that score an echo, and trainers, expect them for every generated token."""


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
    token_ids: list[int] = field(default_factory=list)
    """New tokens, including the one that ended the answer."""
    weight_version: str = ""

    def __add__(self, later: "TextDelta") -> "TextDelta":
        return TextDelta(
            self.index,
            self.text + later.text,
            self.rows + later.rows,
            later.finish_reason,
            later.num_tokens,
            self.token_ids + later.token_ids,
            later.weight_version,
        )


class AnswerBuilder:
    def __init__(
        self, request: GenerationRequest, tokenizer: Tokenizer, eos_token_ids: Collection[int]
    ) -> None:
        self.request = request
        self._text = OutputText(tokenizer, request.params, eos_token_ids)
        self._rows: deque[tuple[TokenRow, int]] = deque()  # with the end of their text
        self._starts: list[int] = []  # where the text of each token begins; never decreases
        self.num_cached = 0
        self.prompt_logprobs: list[TokenLogprobs] = []
        self._experts: TokenExperts | None = None
        self.finish_reason: str | None = None
        self.weight_version = ""
        """The version of the weights that computed the newest token."""

    def grow(self, grown: TokenDelta) -> TextDelta:
        self.weight_version = grown.weight_version
        if grown.finish_reason == "abort" and grown.stop_reason != ABORTED:
            raise EngineDiedError("the engine aborted this request: send it again")
        if self.num_tokens == 0:
            self.num_cached = min(grown.num_cached, len(self.request.prompt))
            self.prompt_logprobs = grown.prompt_logprobs
        self._experts = grown.routed_experts
        if not self.request.is_answered:
            self.finish_reason = "length"
            return TextDelta(self.request.index, "", [], self.finish_reason, 0)
        spans = self._text.extend(grown.token_ids, grown.finish_reason)
        for token, span, values in zip(grown.token_ids, spans, grown.logprobs, strict=False):
            if not span.is_hidden or self.request.shows_end:
                self._rows.append((TokenRow(token, span.start, values), span.end))
        self._starts += [span.start for span in spans]
        self.finish_reason = grown.finish_reason if self._text.stop is None else "stop"
        return self._delta(grown.token_ids[: len(spans)])

    @property
    def num_tokens(self) -> int:
        return self._text.num_tokens

    @property
    def routed_experts(self) -> TokenExperts | None:
        """The experts of all tokens but the last one that is part of the answer. None if the engine
        does not return them, or generated past a stop string when this was found."""
        if self._experts is None:
            return None
        num_rows, num_layers, top_k = self._experts.shape
        num_kept = len(self.request.prompt) + self.num_tokens - 1
        data = self._experts.data[: 2 * num_kept * num_layers * top_k]
        return TokenExperts((min(num_kept, num_rows), num_layers, top_k), data)

    @property
    def stop(self) -> str | None:
        """The stop string that ended the answer."""
        return self._text.stop

    def num_tokens_within(self, spans: Sequence[tuple[int, int]]) -> int:
        """Return the number of tokens whose text begins in one of these parts of the text."""
        return sum(
            bisect_left(self._starts, end) - bisect_left(self._starts, start)
            for start, end in spans
        )

    def _delta(self, token_ids: list[int]) -> TextDelta:
        is_over = self.finish_reason is not None
        num_final, text = self._text.num_final, self._text.take()
        rows = []
        while self._rows and (is_over or self._rows[0][1] <= num_final):
            row, end = self._rows.popleft()
            if not is_over or self.request.shows_end or row.offset < num_final or row.offset == end:
                rows.append(row)
        return TextDelta(
            index=self.request.index,
            text=text,
            rows=rows,
            finish_reason=self.finish_reason,
            num_tokens=self.num_tokens,
            token_ids=token_ids,
            weight_version=self.weight_version,
        )
