"""Replies of SGLang's native route /generate: one per answer, with everything else in `meta_info`.

This module knows SGLang's shapes, not requests. The rule: output_ids and the log probabilities have
one entry for every generated token, also for one that ended the answer. In a stream each event has
the whole text so far.
"""

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from slotzero.server.answers import AnswerBuilder, TextDelta, TokenRow
from slotzero.server.generation import Generation
from slotzero.server.logprobs import NEVER
from slotzero.server.messages import TokenLogprobs
from slotzero.server.replies import ReplyModel
from slotzero.server.sglang_request import SglangRequest
from slotzero.server.stream_format import OPENAI, WireFormat
from slotzero.text.tokenizer import Tokenizer

Scored = tuple[float | None, int, str | None]
"""A log probability, its token, and the token's text if that is wanted."""


class SglangReply(ReplyModel):
    text: str
    output_ids: list[int]
    meta_info: dict[str, Any]
    index: int | None = None  # in streams


class SglangReplies(ReplyModel):
    answers: list[SglangReply]

    def json_bytes(self) -> bytes:
        return b"[" + b",".join(answer.json_bytes() for answer in self.answers) + b"]"


class _Choice:
    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.text = ""
        self.token_ids: list[int] = []
        self.rows: list[TokenRow] = []
        self.finish_reason: str | None = None


class SglangWriter:
    shape: WireFormat = OPENAI

    def __init__(self, body: SglangRequest, num_answers: int, tokenizer: Tokenizer) -> None:
        self._body, self._tokenizer = body, tokenizer
        rids = body.rids
        self._choices = [
            _Choice(rids[i // body.n] if rids else uuid.uuid4().hex) for i in range(num_answers)
        ]

    def add(self, delta: TextDelta) -> None:
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.token_ids += delta.token_ids
        choice.rows += delta.rows
        choice.finish_reason = delta.finish_reason

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[bytes]:
        self.add(delta)
        made = self._reply(delta.index, generation)
        if len(self._choices) > 1:
            made.index = delta.index
        yield self.shape.event(made.json_bytes())

    def is_enough(self, index: int) -> bool:
        return self._choices[index].finish_reason is not None

    def last_chunks(self, generation: Generation) -> Iterator[bytes]:
        return iter(())

    def whole(self, generation: Generation) -> ReplyModel:
        answers = [self._reply(i, generation) for i in range(len(self._choices))]
        if self._body.is_batch or len(answers) > 1:
            return SglangReplies(answers=answers)
        return answers[0]

    def _reply(self, index: int, generation: Generation) -> SglangReply:
        choice, answer = self._choices[index], generation.answers[index]
        meta: dict[str, Any] = {
            "id": choice.rid,
            "finish_reason": _finish_reason(choice, answer),
            "prompt_tokens": len(answer.request.prompt),
            "completion_tokens": len(choice.token_ids),
            "cached_tokens": answer.num_cached,
            "weight_version": answer.weight_version,
        }
        if self._body.return_logprob:
            first = index - index % self._body.n  # the answers of a prompt share its scores
            meta |= self._logprobs(choice, answer, generation.answers[first].prompt_logprobs)
        return SglangReply(text=choice.text, output_ids=choice.token_ids, meta_info=meta)

    def _logprobs(
        self, choice: _Choice, answer: AnswerBuilder, scores: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        made: dict[str, Any] = {
            "input_token_logprobs": [],
            "output_token_logprobs": [
                self._scored(row.values.chosen, row.token) for row in choice.rows
            ],
        }
        start, prompt = self._body.scores_from, answer.request.prompt
        known: Sequence[TokenLogprobs] = []
        if start is not None and start < len(prompt):
            known = scores[start:]
            later = zip(prompt[start + 1 :], known, strict=True)
            made["input_token_logprobs"] = [
                self._scored(None, prompt[start]),  # nothing predicts the first one
                *(self._scored(values.chosen, token) for token, values in later),
            ]
        if self._body.top_logprobs_num:
            made["input_top_logprobs"] = [None, *map(self._top, known)] if known else []
            made["output_top_logprobs"] = [self._top(row.values) for row in choice.rows]
        return made

    def _top(self, values: TokenLogprobs) -> list[Scored]:
        return [
            self._scored(value, token)
            for token, value in zip(values.top_ids, values.top_values, strict=True)
        ][: self._body.top_logprobs_num]

    def _scored(self, value: float | None, token: int) -> Scored:
        text = None
        if self._body.return_text_in_logprobs:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
        return (None if value is None else max(value, NEVER)), token, text


def _finish_reason(choice: _Choice, answer: AnswerBuilder) -> dict[str, Any] | None:
    match choice.finish_reason:
        case None:
            return None
        case "length":
            return {"type": "length", "length": len(choice.token_ids)}
        case "stop":
            matched = choice.token_ids[-1] if answer.stop is None else answer.stop
            return {"type": "stop", "matched": matched}
    return {"type": "abort", "message": "the request was aborted by an administrator"}
