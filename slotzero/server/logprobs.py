"""Log probabilities in OpenAI's two shapes: a list of objects for chats, parallel lists for
completions.

The rule: JSON has no infinity, so a token that cannot be chosen has OpenAI's -9999.
"""

import math
from collections.abc import Sequence

from slotzero.server.answers import TokenRow
from slotzero.server.replies import ChatLogprobs, CompletionLogprobs, TokenLogprob, TopLogprob
from slotzero.text.tokenizer import Tokenizer

NEVER = -9999.0
_HALF = "\N{REPLACEMENT CHARACTER}"


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenRow], num_top: int) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_row(tokenizer, row, num_top) for row in rows], refusal=None)


def completion_logprobs(
    tokenizer: Tokenizer, rows: Sequence[TokenRow], num_top: int
) -> CompletionLogprobs:
    return CompletionLogprobs(
        tokens=[_text(tokenizer, row.token) for row in rows],
        token_logprobs=[_finite(row.values.chosen) for row in rows],
        top_logprobs=[_top_texts(tokenizer, row, num_top) for row in rows] if num_top else None,
        text_offset=[row.offset for row in rows],
    )


def _chat_row(tokenizer: Tokenizer, row: TokenRow, num_top: int) -> TokenLogprob:
    chosen = _entry(tokenizer, row.token, row.values.chosen)
    top = [_entry(tokenizer, token, value) for token, value in _top(row, num_top)]
    return TokenLogprob(
        token=chosen.token, logprob=chosen.logprob, bytes=chosen.bytes, top_logprobs=top
    )


def _top_texts(tokenizer: Tokenizer, row: TokenRow, num_top: int) -> dict[str, float]:
    """Return the most likely tokens, and the chosen one if it is not among them."""
    top = {_text(tokenizer, token): _finite(value) for token, value in _top(row, num_top)}
    return top | {_text(tokenizer, row.token): _finite(row.values.chosen)}


def _top(row: TokenRow, num_top: int) -> list[tuple[int, float]]:
    return list(zip(row.values.top_ids, row.values.top_values, strict=True))[:num_top]


def _entry(tokenizer: Tokenizer, token: int, value: float) -> TopLogprob:
    text = _text(tokenizer, token)
    spelled = None if _HALF in text else list(text.encode())  # part of a character has no text
    return TopLogprob(token=text, logprob=_finite(value), bytes=spelled)


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.decode([token], skip_special_tokens=False)


def _finite(value: float) -> float:
    return value if math.isfinite(value) else NEVER
