"""Chat completions: answers as messages with tool calls, whole or streamed."""

from collections.abc import Iterator

from slotzero.server.answers import TextDelta, TokenRow
from slotzero.server.generation import Generation
from slotzero.server.logprobs import chat_logprobs
from slotzero.server.protocol import ChatRequest
from slotzero.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatReply,
    Delta,
    FunctionCall,
    ToolCallReply,
    head,
)
from slotzero.server.tool_calls import Called, Event, Said
from slotzero.server.tools import ToolPlan
from slotzero.server.usage import StreamUsage, usage
from slotzero.text.tokenizer import Tokenizer


class _ChatChoice:
    """One answer so far."""

    def __init__(self, plan: ToolPlan) -> None:
        self._parser = plan.parser()
        self._is_single = plan.is_single
        self.text = ""
        self.calls: list[tuple[str, str, str]] = []  # id, name, arguments
        self.rows: list[TokenRow] = []
        self.num_rows_sent = 0
        self.has_begun = False
        self.finish_reason: str | None = None

    def take(self, delta: TextDelta) -> list[Event]:
        """Add a delta, and return its events in order."""
        self.rows += delta.rows
        events: list[Event] = [Said(delta.text)] if delta.text else []
        if self._parser is not None:
            events = self._parser.push(delta.text)
            if delta.finish_reason is not None:
                events += self._parser.close()
        for event in events:
            self._add(event)
        self.finish_reason = self._reason(delta.finish_reason)
        return events

    def _add(self, event: Event) -> None:
        if isinstance(event, Said):
            self.text += event.text
        elif isinstance(event, Called):
            self.calls.append((event.id, event.name, ""))
        else:
            call_id, name, arguments = self.calls[event.index]
            self.calls[event.index] = (call_id, name, arguments + event.text)

    def _reason(self, reason: str | None) -> str | None:
        """Return the finish reason; "tool_calls" only if all calls are complete."""
        parser = self._parser
        if parser is None or not parser.num_calls:
            return reason
        if self._is_single and parser.num_done:
            reason = "stop"
        is_whole = parser.num_whole == parser.num_calls
        return "tool_calls" if reason == "stop" and is_whole else reason


class ChatWriter:
    def __init__(self, body: ChatRequest, tokenizer: Tokenizer, plan: ToolPlan, model: str) -> None:
        """`model`: the name in replies, whichever of the model's names the request used."""
        self._tokenizer = tokenizer
        self._num_top = body.top_logprobs or 0
        self._has_logprobs = bool(body.logprobs)
        self._choices = [_ChatChoice(plan) for _ in range(body.n or 1)]
        self._usage = StreamUsage(body.stream_options)
        kind = "chat.completion.chunk" if body.stream else "chat.completion"
        self._head = head("chatcmpl", kind, model)

    def add(self, delta: TextDelta) -> None:
        self._choices[delta.index].take(delta)

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[ChatChunk]:
        choice = self._choices[delta.index]
        if choice.finish_reason is not None:
            return
        for message, reason in self._messages(choice, delta):
            chunk = self._chunk(delta.index, message, reason)
            self._usage.put(chunk, generation.answers)
            yield chunk

    def _messages(
        self, choice: _ChatChoice, delta: TextDelta
    ) -> Iterator[tuple[Delta, str | None]]:
        if not choice.has_begun:
            choice.has_begun = True
            yield Delta(role="assistant", content="", refusal=None), None
        self._usage.count(delta)
        for event in choice.take(delta):
            yield _message_of(event), None
        if choice.finish_reason is not None:
            yield Delta(), choice.finish_reason

    def is_enough(self, index: int) -> bool:
        return self._choices[index].finish_reason is not None

    def last_chunk(self, generation: Generation) -> ChatChunk | None:
        if not self._usage.has_last:
            return None
        return ChatChunk(choices=[], usage=usage(generation.answers), **self._head)

    def whole(self, generation: Generation) -> ChatReply:
        choices = [self._whole_choice(i, choice) for i, choice in enumerate(self._choices)]
        return ChatReply(choices=choices, usage=usage(generation.answers), **self._head)

    def _chunk(self, index: int, delta: Delta, finish_reason: str | None) -> ChatChunk:
        choice = ChatChunkChoice(
            index=index, delta=delta, logprobs=None, finish_reason=finish_reason
        )
        state = self._choices[index]
        rows = state.rows[state.num_rows_sent :]
        if self._has_logprobs and rows:
            choice.logprobs = chat_logprobs(self._tokenizer, rows, self._num_top)
            state.num_rows_sent += len(rows)
        return ChatChunk(choices=[choice], **self._head)

    def _whole_choice(self, index: int, choice: _ChatChoice) -> ChatChoice:
        message = Delta(role="assistant", content=choice.text, refusal=None)
        if choice.calls:
            message.content = choice.text or None
            message.tool_calls = [
                ToolCallReply(
                    id=call_id,
                    type="function",
                    function=FunctionCall(name=name, arguments=arguments),
                )
                for call_id, name, arguments in choice.calls
            ]
        logprobs = None
        if self._has_logprobs:
            logprobs = chat_logprobs(self._tokenizer, choice.rows, self._num_top)
        assert choice.finish_reason is not None
        return ChatChoice(
            index=index, message=message, logprobs=logprobs, finish_reason=choice.finish_reason
        )


def _message_of(event: Event) -> Delta:
    if isinstance(event, Said):
        return Delta(content=event.text)
    if isinstance(event, Called):
        function = FunctionCall(name=event.name, arguments="")
        call = ToolCallReply(index=event.index, id=event.id, type="function", function=function)
    else:
        call = ToolCallReply(index=event.index, function=FunctionCall(arguments=event.text))
    return Delta(tool_calls=[call])
