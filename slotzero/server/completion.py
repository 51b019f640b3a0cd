"""Completions: answers as text that continues a prompt, whole or streamed."""

from collections.abc import Iterator, Sequence

from slotzero.server.answers import GenerationRequest, TextDelta, TokenRow
from slotzero.server.generation import Generation
from slotzero.server.logprobs import completion_logprobs
from slotzero.server.protocol import CompletionRequest
from slotzero.server.replies import CompletionChoice, CompletionReply, head
from slotzero.server.stream_format import OPENAI, Shape
from slotzero.server.usage import StreamUsage, usage
from slotzero.text.tokenizer import Tokenizer


class _CompletionChoice:
    def __init__(self, echo: str) -> None:
        self.unsent_echo = echo
        self.text = echo
        self.rows: list[TokenRow] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None


class CompletionWriter:
    shape: Shape = OPENAI

    def __init__(
        self,
        body: CompletionRequest,
        requests: Sequence[GenerationRequest],
        tokenizer: Tokenizer,
        model: str,
    ) -> None:
        """`model`: the name in replies, whichever of the model's names the request used."""
        self._tokenizer = tokenizer
        self._num_top = body.logprobs
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
        text = choice.unsent_echo + delta.text
        choice.unsent_echo = ""
        if text or delta.rows or delta.finish_reason is not None:
            made = self._choice(delta.index, text, delta.rows, delta.finish_reason)
            if self._shows_tokens:
                made.token_ids = delta.token_ids
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
        choices = [
            self._choice(i, choice.text, choice.rows, choice.finish_reason)
            for i, choice in enumerate(self._choices)
        ]
        if self._shows_tokens:
            for made, choice, request in zip(choices, self._choices, self._requests, strict=True):
                made.token_ids, made.prompt_token_ids = choice.token_ids, request.prompt
        return CompletionReply(choices=choices, usage=usage(generation.answers), **self._head)

    def _choice(
        self, index: int, text: str, rows: list[TokenRow], reason: str | None
    ) -> CompletionChoice:
        logprobs = None
        if self._num_top is not None:
            logprobs = completion_logprobs(self._tokenizer, rows, self._num_top)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)
