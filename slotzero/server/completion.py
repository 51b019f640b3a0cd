"""Completions: answers as text that continues a prompt, whole or streamed."""

from collections.abc import Iterator, Sequence

from slotzero.server.answers import GenerationRequest, TextDelta, TokenRow
from slotzero.server.generation import Generation
from slotzero.server.logprobs import completion_logprobs
from slotzero.server.protocol import CompletionRequest
from slotzero.server.replies import CompletionChoice, CompletionReply, head
from slotzero.server.usage import StreamUsage, usage
from slotzero.text.tokenizer import Tokenizer


class _CompletionChoice:
    def __init__(self, echo: str) -> None:
        self.unsent_echo = echo
        self.text = echo
        self.rows: list[TokenRow] = []
        self.finish_reason: str | None = None


class CompletionWriter:
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
        self._choices = [_CompletionChoice(request.echo) for request in requests]
        self._usage = StreamUsage(body.stream_options)
        self._head = head("cmpl", "text_completion", model)

    def add(self, delta: TextDelta) -> None:
        choice = self._choices[delta.index]
        choice.text += delta.text
        choice.rows += delta.rows
        choice.finish_reason = delta.finish_reason

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[CompletionReply]:
        self.add(delta)
        self._usage.count(delta)
        choice = self._choices[delta.index]
        text = choice.unsent_echo + delta.text
        choice.unsent_echo = ""
        if text or delta.rows or delta.finish_reason is not None:
            made = self._choice(delta.index, text, delta.rows, delta.finish_reason)
            chunk = CompletionReply(choices=[made], **self._head)
            self._usage.put(chunk, generation.answers)
            yield chunk

    def is_enough(self, index: int) -> bool:
        return self._choices[index].finish_reason is not None

    def last_chunk(self, generation: Generation) -> CompletionReply | None:
        if not self._usage.has_last:
            return None
        return CompletionReply(choices=[], usage=usage(generation.answers), **self._head)

    def whole(self, generation: Generation) -> CompletionReply:
        choices = [
            self._choice(i, choice.text, choice.rows, choice.finish_reason)
            for i, choice in enumerate(self._choices)
        ]
        return CompletionReply(choices=choices, usage=usage(generation.answers), **self._head)

    def _choice(
        self, index: int, text: str, rows: list[TokenRow], reason: str | None
    ) -> CompletionChoice:
        logprobs = None
        if self._num_top is not None:
            logprobs = completion_logprobs(self._tokenizer, rows, self._num_top)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)
