"""Completions: answers as text that continues a prompt, whole or streamed."""

from collections.abc import Iterator, Sequence

from slotzero.server.answers import GenerationRequest, TextDelta, TokenRow
from slotzero.server.generation import Generation
from slotzero.server.generation_requests import answers_per_score
from slotzero.server.logprobs import LogprobShapes, joined
from slotzero.server.messages import TokenLogprobs
from slotzero.server.protocol import CompletionRequest
from slotzero.server.replies import (
    CompletionChoice,
    CompletionLogprobs,
    CompletionReply,
    EncodedExperts,
    head,
)
from slotzero.server.stream_format import OPENAI, WireFormat
from slotzero.server.usage import StreamUsage, usage
from slotzero.text.tokenizer import Tokenizer


class _CompletionChoice:
    def __init__(self, echo: str) -> None:
        self.echo = echo
        self.text = echo
        self.has_begun = False
        self.rows: list[TokenRow] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None


class CompletionWriter:
    shape: WireFormat = OPENAI

    def __init__(
        self,
        body: CompletionRequest,
        requests: Sequence[GenerationRequest],
        tokenizer: Tokenizer,
        model: str,
    ) -> None:
        """`model`: the name in replies, whichever of the model's names the request used."""
        self._shapes = LogprobShapes(tokenizer, body.return_tokens_as_token_ids)
        self._num_sharing = answers_per_score(body)
        self._num_top, self._num_prompt_top = body.logprobs, body.prompt_logprobs
        self._is_echoed = bool(body.echo)
        self._requests = requests
        self._shows_tokens = bool(body.return_token_ids)
        self._choices = [_CompletionChoice(request.echo) for request in requests]
        self._usage = StreamUsage(body.stream_options)
        self._head = head("cmpl", "text_completion", model, body.request_id)

    def add(self, delta: TextDelta) -> None:
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.rows += delta.rows
        choice.token_ids += delta.token_ids
        choice.finish_reason = delta.finish_reason

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[bytes]:
        self.add(delta)
        self._usage.count(delta)
        choice = self._choices[delta.index]
        is_first, choice.has_begun = not choice.has_begun, True
        text = choice.echo + delta.text if is_first else delta.text
        is_echo = self._is_echoed and is_first
        if text or is_echo or delta.rows or delta.finish_reason is not None:
            logprobs = self._logprobs(delta.index, delta.rows, generation, is_echo)
            made = CompletionChoice(
                index=delta.index, text=text, logprobs=logprobs, finish_reason=delta.finish_reason
            )
            if self._shows_tokens:
                made.token_ids = delta.token_ids
            if delta.finish_reason is not None and delta.weight_version:
                made.weight_version = delta.weight_version
            chunk = CompletionReply(choices=[made], **self._head)
            self._usage.put(chunk, generation.answers)
            yield self.shape.event(chunk.json_bytes())

    def is_enough(self, index: int) -> bool:
        return self._choices[index].finish_reason is not None

    def last_chunks(self, generation: Generation) -> Iterator[bytes]:
        if self._usage.has_last:
            counts = usage(generation.answers)
            chunk = CompletionReply(choices=[], usage=counts, **self._head)
            yield self.shape.event(chunk.json_bytes())

    def whole(self, generation: Generation) -> CompletionReply:
        choices = [self._choice(i, choice, generation) for i, choice in enumerate(self._choices)]
        if self._shows_tokens:
            for made, choice, request in zip(choices, self._choices, self._requests, strict=True):
                made.token_ids, made.prompt_token_ids = choice.token_ids, request.prompt
        for made, answer in zip(choices, generation.answers, strict=True):
            if answer.weight_version:
                made.weight_version = answer.weight_version
        return CompletionReply(choices=choices, usage=usage(generation.answers), **self._head)

    def _choice(
        self, index: int, choice: _CompletionChoice, generation: Generation
    ) -> CompletionChoice:
        made = CompletionChoice(
            index=index,
            text=choice.text,
            logprobs=self._logprobs(index, choice.rows, generation, self._is_echoed),
            finish_reason=choice.finish_reason,
        )
        if self._num_prompt_top is not None:
            prompt, scores = self._requests[index].prompt, self._scores(index, generation)
            made.prompt_logprobs = self._shapes.of_prompt(prompt, scores, self._num_prompt_top)
        if (experts := generation.answers[index].routed_experts) is not None:
            made.routed_experts = EncodedExperts.of(experts)
        return made

    def _logprobs(
        self, index: int, rows: Sequence[TokenRow], generation: Generation, is_echo: bool
    ) -> CompletionLogprobs | None:
        """Return those of an answer, or of a part of it, after those of the prompt if this part
        echoes it."""
        if self._num_top is None:
            return None
        request = self._requests[index]
        made = self._shapes.of_completion(rows, self._num_top, len(request.echo))
        if not is_echo:
            return made
        scores = self._scores(index, generation)
        return joined(self._shapes.of_echo(request, scores, self._num_top), made)

    def _scores(self, index: int, generation: Generation) -> Sequence[TokenLogprobs]:
        """Return the log probabilities of a prompt, which only some of its answers have."""
        return generation.answers[index - index % self._num_sharing].prompt_logprobs
