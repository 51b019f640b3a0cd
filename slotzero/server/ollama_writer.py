"""Ollama's replies: an answer as one JSON object, or as one object per line.

This module knows Ollama's shapes, not requests. A call is sent when it is complete, since its
arguments are an object there; a call that is cut off is not sent, and `done_reason` is "length".
"""

import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from slotzero.formats.events import Said, Thought
from slotzero.formats.value_types import json_object
from slotzero.server.answer import Answer
from slotzero.server.answer_plan import AnswerPlan
from slotzero.server.answers import TextDelta
from slotzero.server.generation import Generation
from slotzero.server.replies import ReplyModel
from slotzero.server.stream_format import OLLAMA, WireFormat


class OllamaReply(ReplyModel):
    """A reply of /api/chat (with `message`) or /api/generate (with `response`)."""

    model: str
    created_at: str
    message: dict[str, Any] | None = None
    response: str | None = None
    thinking: str | None = None
    done: bool
    done_reason: str | None = None
    total_duration: int | None = None
    """Nanoseconds."""
    prompt_eval_count: int | None = None
    eval_count: int | None = None


class OllamaErrorReply(ReplyModel):
    error: str


class OllamaWriter:
    shape: WireFormat = OLLAMA

    def __init__(self, plan: AnswerPlan, model: str, *, is_chat: bool) -> None:
        self._answer = Answer(plan.form)
        self._model = model
        self._is_chat = is_chat
        self._began = time.monotonic_ns()

    def add(self, delta: TextDelta) -> None:
        if self._answer.finish_reason is None:
            self._answer.take(delta)

    def chunks(self, delta: TextDelta, generation: Generation) -> Iterator[bytes]:
        if self._answer.finish_reason is not None:
            return
        for event in self._answer.take(delta):
            if isinstance(event, Said):
                yield self.shape.event(self._reply(event.text, "", []).json_bytes())
            elif isinstance(event, Thought):
                yield self.shape.event(self._reply("", event.text, []).json_bytes())

    def is_enough(self, index: int) -> bool:
        return self._answer.finish_reason is not None

    def last_chunks(self, generation: Generation) -> Iterator[bytes]:
        if calls := self._calls():
            yield self.shape.event(self._reply("", "", calls).json_bytes())
        yield self.shape.event(self._ended(self._reply("", "", []), generation).json_bytes())

    def whole(self, generation: Generation) -> OllamaReply:
        answer = self._answer
        return self._ended(self._reply(answer.text, answer.reasoning, self._calls()), generation)

    def _reply(self, text: str, thought: str, calls: list[dict[str, Any]]) -> OllamaReply:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        made = OllamaReply(model=self._model, created_at=now, done=False)
        if not self._is_chat:
            made.response = text
            if thought:
                made.thinking = thought
            return made
        made.message = {"role": "assistant", "content": text}
        if thought:
            made.message["thinking"] = thought
        if calls:
            made.message["tool_calls"] = calls
        return made

    def _ended(self, reply: OllamaReply, generation: Generation) -> OllamaReply:
        (answer,) = generation.answers
        reply.done = True
        # a call that is cut off is not sent, so "stop" would hide it
        is_cut = self._answer.finish_reason == "length" or self._answer.is_broken
        reply.done_reason = "length" if is_cut else "stop"
        reply.total_duration = time.monotonic_ns() - self._began
        reply.prompt_eval_count = len(answer.request.prompt)
        reply.eval_count = answer.num_tokens
        return reply

    def _calls(self) -> list[dict[str, Any]]:
        """Return the calls that are complete: only the last one can be cut off."""
        made = []
        for call in self._answer.calls:
            arguments = json_object(call.arguments)
            if arguments is not None:
                function = {"name": call.name, "arguments": arguments}
                made.append({"id": call.id, "function": function})
        return made
