"""Log probabilities in OpenAI's two shapes: a list of objects for chats, parallel lists for
completions; and those of a prompt, in the second or in vLLM's.

The rule: JSON has no infinity, so a token that cannot be chosen has OpenAI's -9999.
"""

import math
from collections.abc import Sequence

from slotzero.server.answers import GenerationRequest, TokenRow
from slotzero.server.messages import TokenLogprobs
from slotzero.server.replies import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)
from slotzero.text.tokenizer import Detokenizer, Tokenizer

NEVER = -9999.0
_HALF = "\N{REPLACEMENT CHARACTER}"


class LogprobShapes:
    """The shapes for one request to the server. It decodes each token id once."""

    def __init__(self, tokenizer: Tokenizer, shows_ids: bool | None = None) -> None:
        """`shows_ids`: tokens are shown as vLLM's "token_id:5" in place of their text, and the
        chosen one is always among the most likely."""
        self._tokenizer, self._shows_ids = tokenizer, bool(shows_ids)
        self._texts: dict[int, str] = {}

    def of_chat(self, rows: Sequence[TokenRow], num_top: int) -> ChatLogprobs:
        return ChatLogprobs(content=[self._chat_row(row, num_top) for row in rows], refusal=None)

    def of_completion(
        self, rows: Sequence[TokenRow], num_top: int, text_before: int = 0
    ) -> CompletionLogprobs:
        """`text_before`: characters of the choice's text before the answer."""
        has_top = bool(num_top) or self._shows_ids
        return CompletionLogprobs(
            tokens=[self._shown(row.token) for row in rows],
            token_logprobs=[_finite(row.values.chosen) for row in rows],
            top_logprobs=[self._top_texts(row, num_top) for row in rows] if has_top else None,
            text_offset=[text_before + row.offset for row in rows],
        )

    def of_echo(
        self, request: GenerationRequest, scores: Sequence[TokenLogprobs], num_top: int
    ) -> CompletionLogprobs:
        """Return the log probabilities of an echoed prompt, of which the first token has none."""
        first, *others = request.prompt
        offsets = self._offsets(request)
        rows = [TokenRow(*values) for values in zip(others, offsets[1:], scores, strict=True)]
        made = self.of_completion(rows, num_top)
        made.tokens.insert(0, self._shown(first))
        made.token_logprobs.insert(0, None)
        made.text_offset.insert(0, offsets[0])
        if made.top_logprobs is not None:
            made.top_logprobs.insert(0, None)
        return made

    def of_prompt(
        self, prompt: Sequence[int], scores: Sequence[TokenLogprobs], num_top: int
    ) -> PromptLogprobs:
        """Return the log probabilities of a prompt in vLLM's shape."""
        pairs = zip(prompt[1:], scores, strict=True)
        return [None, *(self._by_id(TokenRow(token, 0, of), num_top) for token, of in pairs)]

    def _by_id(self, row: TokenRow, num_top: int) -> dict[str, PromptLogprob]:
        entries: dict[int, tuple[float, int | None]] = {row.token: (row.values.chosen, None)}
        for rank, (token, value) in enumerate(_top(row, num_top), start=1):
            entries[token] = value, rank
        return {
            str(token): PromptLogprob(
                logprob=_finite(value), rank=rank, decoded_token=self._text(token)
            )
            for token, (value, rank) in entries.items()
        }

    def _offsets(self, request: GenerationRequest) -> list[int]:
        """Return where the text of each token of the prompt begins in the echo, which ends with
        their text. Special tokens are part of an echo if the prompt was sent as text."""
        echo = request.echo
        starts, text = self._starts(request.prompt, skip_special_tokens=False)
        if not (text.endswith(echo) or echo.endswith(text)):
            starts, text = self._starts(request.prompt, skip_special_tokens=True)
        return [max(0, len(echo) - len(text) + start) for start in starts]

    def _starts(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> tuple[list[int], str]:
        """Return where the text of each token begins, and the whole text."""
        detokenizer = Detokenizer(self._tokenizer, skip_special_tokens=skip_special_tokens)
        starts, parts, length = [], [], 0
        for token in tokens:
            starts.append(length)
            parts.append(detokenizer.push(token))
            length += len(parts[-1])
        return starts, "".join(parts) + detokenizer.flush()

    def _chat_row(self, row: TokenRow, num_top: int) -> TokenLogprob:
        chosen = self._entry(row.token, row.values.chosen)
        top = [self._entry(token, value) for token, value in _top(row, num_top)]
        return TokenLogprob(
            token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top
        )

    def _top_texts(self, row: TokenRow, num_top: int) -> dict[str, float]:
        """Return the most likely tokens, and the chosen one if it is not among them. Of tokens with
        the same text, as parts of characters have, only the most likely one is returned."""
        texts: dict[str, float] = {}
        for token, value in (*_top(row, num_top), (row.token, row.values.chosen)):
            texts.setdefault(self._shown(token), _finite(value))
        return texts

    def _entry(self, token: int, value: float) -> TopLogprob:
        text = self._shown(token)
        # part of a character has no text
        spelled = None if _HALF in text or self._shows_ids else list(text.encode())
        return TopLogprob(token=text, logprob=_finite(value), bytes=spelled)

    def _shown(self, token: int) -> str:
        return f"token_id:{token}" if self._shows_ids else self._text(token)

    def _text(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._texts[token]


def joined(first: CompletionLogprobs, then: CompletionLogprobs) -> CompletionLogprobs:
    top = None
    if first.top_logprobs is not None and then.top_logprobs is not None:
        top = first.top_logprobs + then.top_logprobs
    return CompletionLogprobs(
        tokens=first.tokens + then.tokens,
        token_logprobs=first.token_logprobs + then.token_logprobs,
        top_logprobs=top,
        text_offset=first.text_offset + then.text_offset,
    )


def _top(row: TokenRow, num_top: int) -> list[tuple[int, float]]:
    return list(zip(row.values.top_ids, row.values.top_values, strict=True))[:num_top]


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NEVER
