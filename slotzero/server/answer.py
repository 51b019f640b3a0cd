"""One answer so far: its events as they come, and what they add up to.

All APIs build their replies from it. It knows neither HTTP nor the shape of any reply.

The rule: the finish reason is "tool_calls" only if the answer has calls and all are complete,
with JSON objects as arguments. Otherwise it is the engine's reason, "length" or "stop".
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slotzero.formats.answer_parser import AnswerFormat, AnswerParser
from slotzero.formats.events import Argued, Called, Event, Said, Thought
from slotzero.server.answers import AnswerBuilder, TextDelta, TokenRow
from slotzero.server.tools import template_call, with_reasoning


@dataclass
class AnswerCall:
    id: str
    name: str
    arguments: str = ""


class Answer:
    def __init__(self, form: AnswerFormat) -> None:
        self._parser = AnswerParser(form) if form.has_markers else None
        self._is_single = form.is_single
        self.text = ""
        self.reasoning = ""
        self.calls: list[AnswerCall] = []
        self.rows: list[TokenRow] = []
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None

    def take(self, delta: TextDelta) -> list[Event]:
        """Add a delta, and return its events in order."""
        self.rows += delta.rows
        self.token_ids += delta.token_ids
        events: list[Event] = [Said(delta.text)] if delta.text else []
        if self._parser is not None:
            events = self._parser.push(delta.text)
            if delta.finish_reason is not None:
                events += self._parser.close()
        for event in events:
            self._add(event)
        self.finish_reason = self._reason(delta.finish_reason)
        return events

    @property
    def is_broken(self) -> bool:
        """Whether the answer has calls of which one is incomplete or not JSON."""
        return bool(self.calls) and self.finish_reason not in (None, "tool_calls")

    def num_reasoning_tokens(self, builder: AnswerBuilder) -> int:
        return builder.num_tokens_within(self._parser.thought_spans) if self._parser else 0

    def message(self) -> dict[str, Any]:
        """Return the answer as chat templates expect it. A broken call is left out."""
        made: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.calls and not self.is_broken:
            made["tool_calls"] = [
                template_call("arguments", call.id, call.name, call.arguments)
                for call in self.calls
            ]
        return with_reasoning(made, self.reasoning)

    def _add(self, event: Event) -> None:
        match event:
            case Said(text):
                self.text += text
            case Thought(text):
                self.reasoning += text
            case Called(_, call_id, name):
                self.calls.append(AnswerCall(call_id, name))
            case Argued(index, text):
                self.calls[index].arguments += text

    def _reason(self, reason: str | None) -> str | None:
        parser = self._parser
        if parser is None or not parser.num_calls:
            return reason
        if self._is_single and parser.num_done:
            reason = "stop"
        is_whole = parser.num_whole == parser.num_calls
        return "tool_calls" if reason == "stop" and is_whole else reason


def num_reasoning_tokens(answers: Sequence[Answer], builders: Sequence[AnswerBuilder]) -> int:
    pairs = zip(answers, builders, strict=True)
    return sum(answer.num_reasoning_tokens(builder) for answer, builder in pairs)
