"""The events of one answer while it is parsed.

It knows no format. The rule: white space around a call, and around the reasoning, is dropped; all
other text is emitted.
"""

import uuid

from slotzero.formats.events import Argued, Called, Event, Said, Thought
from slotzero.formats.text_input import SPACE
from slotzero.formats.value_types import json_object


class EventLog:
    def __init__(self) -> None:
        self._events: list[Event] = []
        self._space = ""  # white space at the end of the text so far: dropped if a call follows
        self._drops_space = False  # at the beginning of the next text
        self._thought_space = ""
        self._has_thought = False
        self._thought_at = 0
        self.thought_spans: list[tuple[int, int]] = []
        """Where the reasoning is in the answer's text, with its markers."""
        self._arguments: list[str] = []  # of the latest call
        self.num_calls = 0
        """Number of calls that have begun."""
        self.num_done = 0
        """Number of calls that have ended; the last one may be cut off."""
        self.num_whole = 0
        """Number of calls that have ended, and whose arguments are a JSON object."""

    def take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def say(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip(SPACE)
        self._space = text[len(said) :]
        if self._drops_space:
            said = said.lstrip(SPACE)
        if said:
            self._events.append(Said(said))
            self._drops_space = False

    def think(self, text: str) -> None:
        text = self._thought_space + text
        thought = text.rstrip(SPACE)
        self._thought_space = text[len(thought) :]
        if not self._has_thought:
            thought = thought.lstrip(SPACE)
        if thought:
            self._events.append(Thought(thought))
            self._has_thought = True

    def begin_thought(self, at: int) -> None:
        """Begin a part of the reasoning, with its marker, at this character of the answer."""
        self._thought_at = at

    def end_thought(self, at: int) -> None:
        """End a part of the reasoning; a further part begins in a new paragraph."""
        self.thought_spans.append((self._thought_at, at))
        self._thought_space = "\n\n" if self._has_thought else ""
        self._drops_space = True

    def call(self, name: str, call_id: str = "", id_len: int = 0) -> None:
        """Begin a call. `call_id`: the model's own id, if it has written one."""
        self._space = ""
        self._drops_space = True
        self._arguments = []
        made = uuid.uuid4().hex[:id_len] if id_len else f"call_{uuid.uuid4().hex[:24]}"
        self._events.append(Called(self.num_calls, call_id or made, name))
        self.num_calls += 1

    def argue(self, text: str) -> None:
        if text:
            self._arguments.append(text)
            self._events.append(Argued(self.num_calls - 1, text))

    def end_call(self) -> None:
        """End a call that is complete."""
        self.num_done += 1
        self.num_whole += json_object("".join(self._arguments)) is not None

    def close(self) -> None:
        """Emit the white space at the end of an answer that is text alone."""
        if self._space and not self.num_calls and not self._drops_space:
            self._events.append(Said(self._space))
        self._space = ""
