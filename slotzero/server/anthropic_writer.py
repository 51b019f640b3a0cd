"""The Messages API's replies: an answer as a list of blocks, whole or as named events.

This module knows the shapes of blocks and events, not requests. An answer becomes, in the order in
which the model wrote it, thinking, text and tool_use blocks.

The rule: a stream's events and the whole reply are made from the same blocks, so they agree.
"""

import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from slotzero.formats.events import Argued, Called, Event, Said, Thought
from slotzero.formats.value_types import json_object
from slotzero.server.answer import Answer
from slotzero.server.answer_plan import AnswerPlan
from slotzero.server.answers import AnswerBuilder, TextDelta
from slotzero.server.generation import Generation
from slotzero.server.replies import ReplyModel
from slotzero.server.stream_format import ANTHROPIC, WireFormat, json_bytes

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_DELTAS = {"text": "text", "thinking": "thinking", "tool_use": "partial_json"}
_DELTA_TYPES = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}


class MessageReply(ReplyModel):
    """A message of Anthropic's Messages API."""

    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: dict[str, Any]


class AnthropicErrorReply(ReplyModel):
    type: str
    error: dict[str, str]


class CountReply(ReplyModel):
    input_tokens: int


class MessageWriter:
    shape: WireFormat = ANTHROPIC

    def __init__(self, plan: AnswerPlan, model: str) -> None:
        self._answer = Answer(plan.form)
        self._id = f"msg_{uuid.uuid4().hex}"
        self._model = model
        self._blocks: list[dict[str, Any]] = []  # a tool_use block's input is its JSON so far
        self._has_begun = False

    def add(self, delta: TextDelta) -> None:
        for _ in self._events(delta):
            pass

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[bytes]:
        if not self._has_begun:
            self._has_begun = True
            message = self._reply(generation.answers[0], []).model_dump()
            message["usage"]["output_tokens"] = 0
            yield self._sent("message_start", {"message": message})
        for name, fields in self._events(delta):
            yield self._sent(name, fields)

    def is_enough(self, index: int) -> bool:
        return self._answer.finish_reason is not None

    def last_chunks(self, generation: Generation) -> Iterator[bytes]:
        reply = self.whole(generation)
        delta = {"stop_reason": reply.stop_reason, "stop_sequence": reply.stop_sequence}
        yield self._sent("message_delta", {"delta": delta, "usage": reply.usage})
        yield self._sent("message_stop", {})

    def whole(self, generation: Generation) -> MessageReply:
        blocks = [self._finished(block) for block in self._blocks]
        return self._reply(generation.answers[0], blocks)

    def _events(self, delta: TextDelta) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._answer.finish_reason is not None:
            return
        for event in self._answer.take(delta):
            yield from self._add(event)
        if self._answer.finish_reason is not None:
            yield from self._close()

    def _add(self, event: Event) -> Iterator[tuple[str, dict[str, Any]]]:
        match event:
            case Thought(text):
                yield from self._grow("thinking", text)
            case Said(text):
                yield from self._grow("text", text)
            case Called(_, call_id, name):
                yield from self._begin({"type": "tool_use", "id": call_id, "name": name})
            case Argued(_, text):
                yield from self._grow("tool_use", text)

    def _grow(self, kind: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
        if not self._blocks or self._blocks[-1]["type"] != kind:
            yield from self._begin({"type": kind})
        block, name = self._blocks[-1], _DELTAS[kind]
        key = "input" if kind == "tool_use" else name
        block[key] += text
        delta = {"type": _DELTA_TYPES[kind], name: text}
        yield "content_block_delta", {"index": len(self._blocks) - 1, "delta": delta}

    def _begin(self, block: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield from self._close()
        empty = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}
        shown = block | empty.get(block["type"], {"input": {}})
        self._blocks.append(block | empty.get(block["type"], {"input": ""}))
        index = len(self._blocks) - 1
        yield "content_block_start", {"index": index, "content_block": shown}

    def _close(self) -> Iterator[tuple[str, dict[str, Any]]]:
        if self._blocks:
            yield "content_block_stop", {"index": len(self._blocks) - 1}

    def _finished(self, block: Mapping[str, Any]) -> dict[str, Any]:
        """Return a block of the whole reply. The input of a call that is cut off is empty, and the
        stop reason says so."""
        if block["type"] != "tool_use":
            return dict(block)
        return {**block, "input": json_object(block["input"]) or {}}

    def _reply(self, answer: AnswerBuilder, blocks: list[dict[str, Any]]) -> MessageReply:
        reason = self._answer.finish_reason
        stop = _STOP_REASONS.get(reason or "")
        if reason == "stop" and answer.stop is not None:
            stop = "stop_sequence"
        elif self._answer.is_broken:
            stop = "max_tokens"  # also if the model itself ended in the middle of a call
        num_prompt = len(answer.request.prompt)
        counts = {
            "input_tokens": num_prompt - answer.num_cached,
            "cache_read_input_tokens": answer.num_cached,
            "cache_creation_input_tokens": 0,
            "output_tokens": answer.num_tokens,
        }
        return MessageReply(
            id=self._id,
            type="message",
            role="assistant",
            model=self._model,
            content=blocks,
            stop_reason=stop,
            stop_sequence=answer.stop if stop == "stop_sequence" else None,
            usage=counts,
        )

    def _sent(self, name: str, fields: Mapping[str, Any]) -> bytes:
        return self.shape.event(json_bytes({"type": name, **fields}), name)
