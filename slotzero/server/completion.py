"""Completions: answers as text that continues a prompt, whole or piece by piece."""

from collections.abc import Iterator, Sequence

from slotzero.server.answers import Ask, Piece, TokenRow
from slotzero.server.logprobs import completion_logprobs
from slotzero.server.protocol import CompletionRequest
from slotzero.server.replies import CompletionChoice, CompletionReply, head
from slotzero.server.runs import Run
from slotzero.server.usage import StreamUsage, usage
from slotzero.text.tokenizer import Tokenizer


class _Choice:
    def __init__(self, echo: str) -> None:
        self.unsent_echo = echo
        self.text = echo
        self.rows: list[TokenRow] = []
        self.finish_reason: str | None = None


class CompletionWriter:
    def __init__(
        self, body: CompletionRequest, asks: Sequence[Ask], tokenizer: Tokenizer, model: str
    ) -> None:
        """`model`: its name in replies, whichever of its names the request used."""
        self._tokenizer = tokenizer
        self._num_top = body.logprobs
        self._choices = [_Choice(ask.echo) for ask in asks]
        self._usage = StreamUsage(body.stream_options)
        self._head = head("cmpl", "text_completion", model)

    def add(self, piece: Piece) -> None:
        choice = self._choices[piece.index]
        choice.text += piece.text
        choice.rows += piece.rows
        choice.finish_reason = piece.finish_reason

    def chunks(self, piece: Piece, run: Run) -> Iterator[CompletionReply]:
        self.add(piece)
        self._usage.count(piece)
        choice = self._choices[piece.index]
        text = choice.unsent_echo + piece.text
        choice.unsent_echo = ""
        if text or piece.rows or piece.finish_reason is not None:
            made = self._choice(piece.index, text, piece.rows, piece.finish_reason)
            chunk = CompletionReply(choices=[made], **self._head)
            self._usage.put(chunk, run.answers)
            yield chunk

    def is_enough(self, index: int) -> bool:
        return self._choices[index].finish_reason is not None

    def last_chunk(self, run: Run) -> CompletionReply | None:
        if not self._usage.has_last:
            return None
        return CompletionReply(choices=[], usage=usage(run.answers), **self._head)

    def whole(self, run: Run) -> CompletionReply:
        choices = [
            self._choice(i, choice.text, choice.rows, choice.finish_reason)
            for i, choice in enumerate(self._choices)
        ]
        return CompletionReply(choices=choices, usage=usage(run.answers), **self._head)

    def _choice(
        self, index: int, text: str, rows: list[TokenRow], reason: str | None
    ) -> CompletionChoice:
        logprobs = None
        if self._num_top is not None:
            logprobs = completion_logprobs(self._tokenizer, rows, self._num_top)
        return CompletionChoice(index=index, text=text, logprobs=logprobs, finish_reason=reason)
