"""The Responses API's replies: an answer as a list of items, whole or as named events.

This module knows the shapes of items and events, not requests or storage. An answer becomes, in the
order in which the model wrote it, reasoning items, messages and function calls.

The rule: a stream's events and the whole reply are made by the same code, so they agree.
"""

import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from slotzero.formats.events import Argued, Called, Event, Said, Thought
from slotzero.formats.value_types import json_object
from slotzero.server.answer import Answer, num_reasoning_tokens
from slotzero.server.answer_plan import AnswerPlan
from slotzero.server.answers import TextDelta
from slotzero.server.generation import Generation
from slotzero.server.replies import ReplyModel
from slotzero.server.stream_format import RESPONSES, WireFormat, json_bytes

Named = tuple[str, dict[str, Any]]
"""An event: its type, and its fields."""


class ResponseReply(ReplyModel):
    """A response object of OpenAI's Responses API."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    usage: dict[str, Any] | None
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    background: bool
    temperature: float | None
    top_p: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    truncation: str
    user: str | None


@dataclass
class _Item:
    """One item of the output while it grows."""

    kind: str
    id: str
    index: int
    call_id: str = ""
    name: str = ""
    text: str = ""
    status: str = "in_progress"

    def as_json(self) -> dict[str, Any]:
        made: dict[str, Any] = {"id": self.id, "type": self.kind, "status": self.status}
        is_empty = self.status == "in_progress"
        if self.kind == "function_call":
            return made | {"call_id": self.call_id, "name": self.name, "arguments": self.text}
        content = [] if is_empty else [self.part()]
        if self.kind == "reasoning":
            return made | {"summary": [], "content": content, "encrypted_content": None}
        return made | {"role": "assistant", "content": content}

    def part(self) -> dict[str, Any]:
        if self.kind == "reasoning":
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": []}

    @property
    def where(self) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self.id, "output_index": self.index}
        return place if self.kind == "function_call" else place | {"content_index": 0}


_TEXT_EVENTS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}
_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass
class ResponseOutput:
    """The items of one answer, and the events in which they grow."""

    items: list[_Item] = field(default_factory=list)
    _open: _Item | None = None

    def add(self, event: Event) -> Iterator[Named]:
        match event:
            case Thought(text):
                yield from self._grow("reasoning", text)
            case Said(text):
                yield from self._grow("message", text)
            case Called(_, call_id, name):
                yield from self.close("completed")
                yield from self._begin("function_call", call_id, name)
            case Argued(_, text):
                yield from self._grow("function_call", text)

    def close(self, status: str) -> Iterator[Named]:
        """End the item that grows."""
        item, self._open = self._open, None
        if item is None:
            return
        is_broken = item.kind == "function_call" and json_object(item.text) is None
        item.status = "incomplete" if is_broken else status
        name = _TEXT_EVENTS[item.kind]
        if item.kind == "function_call":
            yield f"{name}.done", item.where | {"arguments": item.text, "name": item.name}
        else:
            logprobs: dict[str, Any] = {"logprobs": []} if item.kind == "message" else {}
            yield f"{name}.done", item.where | {"text": item.text} | logprobs
            yield "response.content_part.done", item.where | {"part": item.part()}
        done = {"output_index": item.index, "item": item.as_json()}
        yield "response.output_item.done", done

    def _grow(self, kind: str, text: str) -> Iterator[Named]:
        if self._open is None or self._open.kind != kind:
            yield from self.close("completed")
            yield from self._begin(kind)
        item = self._open
        assert item is not None
        item.text += text
        logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        yield f"{_TEXT_EVENTS[kind]}.delta", item.where | {"delta": text} | logprobs

    def _begin(self, kind: str, call_id: str = "", name: str = "") -> Iterator[Named]:
        item = _Item(kind, _new_id(_ID_PREFIXES[kind]), len(self.items), call_id, name)
        self.items.append(item)
        self._open = item
        added = {"output_index": item.index, "item": item.as_json()}
        yield "response.output_item.added", added
        if kind != "function_call":
            yield "response.content_part.added", item.where | {"part": item.part()}


class ResponsesWriter:
    shape: WireFormat = RESPONSES

    def __init__(self, fields: Mapping[str, Any], plan: AnswerPlan, model: str) -> None:
        """`fields`: the fields of the reply that repeat the request."""
        self._answer = Answer(plan.form)
        self._output = ResponseOutput()
        self._head = {
            "id": _new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            "error": None,
            **fields,
        }
        self._num_sent = 0
        self.status = "in_progress"

    @property
    def id(self) -> str:
        return str(self._head["id"])

    def add(self, delta: TextDelta) -> None:
        for _ in self._events(delta):
            pass

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[bytes]:
        if not self._num_sent:
            for name in ("response.created", "response.in_progress"):
                yield self._sent(name, {"response": self._reply(None).model_dump()})
        for name, fields in self._events(delta):
            yield self._sent(name, fields)

    def is_enough(self, index: int) -> bool:
        return self._answer.finish_reason is not None

    def last_chunks(self, generation: Generation) -> Iterator[bytes]:
        name = "completed" if self.status == "completed" else "incomplete"
        yield self._sent(f"response.{name}", {"response": self.whole(generation).model_dump()})

    def whole(self, generation: Generation) -> ResponseReply:
        (answer,) = generation.answers
        num_reasoning = num_reasoning_tokens([self._answer], generation.answers)
        num_prompt = len(answer.request.prompt)
        counts = {
            "input_tokens": num_prompt,
            "input_tokens_details": {"cached_tokens": answer.num_cached},
            "output_tokens": answer.num_tokens,
            "output_tokens_details": {"reasoning_tokens": num_reasoning},
            "total_tokens": num_prompt + answer.num_tokens,
        }
        return self._reply(counts)

    def message(self) -> dict[str, Any]:
        """Return the answer as the message that continues the conversation."""
        return self._answer.message()

    def _events(self, delta: TextDelta) -> Iterator[Named]:
        if self._answer.finish_reason is not None:
            return
        for event in self._answer.take(delta):
            yield from self._output.add(event)
        reason = self._answer.finish_reason
        if reason is not None:
            is_whole = reason == "tool_calls" or (reason == "stop" and not self._answer.is_broken)
            self.status = "completed" if is_whole else "incomplete"
            if reason in ("cancelled", "abort"):
                self.status = "cancelled"
            yield from self._output.close("completed" if is_whole else "incomplete")

    def _reply(self, counts: dict[str, Any] | None) -> ResponseReply:
        why = None
        if self.status == "incomplete":
            is_long = self._answer.finish_reason == "length"
            why = {"reason": "max_output_tokens" if is_long else "broken_tool_call"}
        return ResponseReply(
            **self._head,
            status=self.status,
            output=[item.as_json() for item in self._output.items],
            usage=counts,
            incomplete_details=why,
        )

    def _sent(self, name: str, fields: Mapping[str, Any]) -> bytes:
        body = {"type": name, **fields, "sequence_number": self._num_sent}
        self._num_sent += 1
        return self.shape.event(json_bytes(body), name)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
