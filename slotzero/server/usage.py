"""Token counts of one request, for a whole reply or a stream.

The rule: a chunk counts the tokens whose text was sent so far, not those that are held back; the
last chunk of a stream with include_usage counts all generated tokens.
"""

from collections.abc import Sequence

from slotzero.server.answers import AnswerBuilder, TextDelta
from slotzero.server.protocol import StreamOptions
from slotzero.server.replies import (
    CachedTokens,
    ChatChunk,
    CompletionReply,
    ReasoningTokens,
    Usage,
)


def usage(answers: Sequence[AnswerBuilder], num_reasoning: int | None = None) -> Usage:
    """`num_reasoning`: tokens of the reasoning, if the model can reason."""
    made = _usage(answers, sum(answer.num_tokens for answer in answers))
    if num_reasoning is not None:
        made.completion_tokens_details = ReasoningTokens(reasoning_tokens=num_reasoning)
    return made


class StreamUsage:
    """Adds token counts to the chunks of a stream."""

    def __init__(self, options: StreamOptions | None) -> None:
        self.has_last = bool(options and options.include_usage)
        """Whether the stream ends with a chunk without choices that has the counts of the whole
        request; all other chunks then have `usage: null`."""
        self._is_continuous = bool(options and options.continuous_usage_stats)
        self._num_tokens: dict[int, int] = {}  # by answer

    def count(self, delta: TextDelta) -> None:
        self._num_tokens[delta.index] = delta.num_tokens

    def put(self, chunk: ChatChunk | CompletionReply, answers: Sequence[AnswerBuilder]) -> None:
        if self._is_continuous:
            chunk.usage = _usage(answers, sum(self._num_tokens.values()))
        elif self.has_last:
            chunk.usage = None


def _usage(answers: Sequence[AnswerBuilder], num_generated: int) -> Usage:
    counted = [answer for answer in answers if answer.request.is_counted]
    num_prompt = sum(len(answer.request.prompt) for answer in counted)
    return Usage(
        prompt_tokens=num_prompt,
        completion_tokens=num_generated,
        total_tokens=num_prompt + num_generated,
        prompt_tokens_details=CachedTokens(
            cached_tokens=sum(answer.num_cached for answer in counted)
        ),
    )
