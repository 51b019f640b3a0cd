"""Log probabilities in OpenAI's two shapes: a list of objects for chats, parallel lists for
completions; and those of a prompt, in the second or in vLLM's.

The rule: JSON has no infinity, so a token that cannot be chosen has OpenAI's -9999.
"""

import math
from collections.abc import Sequence

from slotzero.server.answers import AnswerBuilder, TokenRow
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


def chat_logprobs(tokenizer: Tokenizer, rows: Sequence[TokenRow], num_top: int) -> ChatLogprobs:
    return ChatLogprobs(content=[_chat_row(tokenizer, row, num_top) for row in rows], refusal=None)


def completion_logprobs(
    tokenizer: Tokenizer, rows: Sequence[TokenRow], num_top: int, text_before: int = 0
) -> CompletionLogprobs:
    """`text_before`: characters of the choice's text before the answer."""
    return CompletionLogprobs(
        tokens=[_text(tokenizer, row.token) for row in rows],
        token_logprobs=[_finite(row.values.chosen) for row in rows],
        top_logprobs=[_top_texts(tokenizer, row, num_top) for row in rows] if num_top else None,
        text_offset=[text_before + row.offset for row in rows],
    )


def echoed_logprobs(
    tokenizer: Tokenizer, answer: AnswerBuilder, num_top: int
) -> CompletionLogprobs:
    """Return the log probabilities of an echoed prompt. Nothing predicts its first token."""
    first, *others = answer.request.prompt
    offsets = _offsets(tokenizer, answer)
    pairs = zip(others, offsets[1:], answer.prompt_logprobs, strict=True)
    rows = [TokenRow(*values) for values in pairs]
    made = completion_logprobs(tokenizer, rows, num_top)
    made.tokens.insert(0, _text(tokenizer, first))
    made.token_logprobs.insert(0, None)
    made.text_offset.insert(0, offsets[0])
    if made.top_logprobs is not None:
        made.top_logprobs.insert(0, None)
    return made


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


def prompt_logprobs(tokenizer: Tokenizer, answer: AnswerBuilder, num_top: int) -> PromptLogprobs:
    """Return the log probabilities of a prompt in vLLM's shape."""
    rows = [
        TokenRow(token, 0, values)
        for token, values in zip(answer.request.prompt[1:], answer.prompt_logprobs, strict=True)
    ]
    return [None, *(_by_id(tokenizer, row, num_top) for row in rows)]


def _by_id(tokenizer: Tokenizer, row: TokenRow, num_top: int) -> dict[str, PromptLogprob]:
    top = {token: (value, rank) for rank, (token, value) in enumerate(_top(row, num_top), start=1)}
    return {
        str(token): PromptLogprob(
            logprob=_finite(value), rank=rank, decoded_token=_text(tokenizer, token)
        )
        for token, (value, rank) in ({row.token: (row.values.chosen, None)} | top).items()
    }


def _offsets(tokenizer: Tokenizer, answer: AnswerBuilder) -> list[int]:
    """Return where the text of each token of the prompt begins in the echo, whose end is the text
    of the last tokens."""
    detokenizer, starts, length = Detokenizer(tokenizer, skip_special_tokens=True), [], 0
    for token in answer.request.prompt:
        starts.append(length)
        length += len(detokenizer.push(token))
    length += len(detokenizer.flush())
    before = len(answer.request.echo) - length
    return [max(0, before + start) for start in starts]


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
