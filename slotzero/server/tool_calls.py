"""Incremental parser of tool calls in the text that a model generates.

This module does not know HTTP or templates. A format is data; one parser reads them all:

    hermes    text <tool_call>{"name": ..., "arguments": {...}}</tool_call> <tool_call>...
    llama     {"name": ..., "parameters": {...}}; {...}          or text <|python_tag|>{...}
    forced    {"name": ..., "arguments": {...}}                  the grammar allows nothing else

The rule: text and calls are emitted in the order in which they were written, and nothing is lost.
What begins like a call but is none is emitted as text; only white space around calls is dropped.
Arguments are emitted as the model writes them, as soon as the function's name is known.

The result depends on the text alone, not on how it was split, so a stream and a whole reply agree:

- An object that was emitted as a call stays a call (call_object.py decides when). An unknown key
  after the arguments is ignored; before them, in a call without a tag, it makes the object text.
- A call that is cut off by the end of the text is emitted as far as it goes if that decision was
  made before, and is text otherwise. It is incomplete, as is a call whose arguments are not valid
  JSON: only an answer whose calls are all complete ends with finish_reason "tool_calls".
- Text after a call that is not a call is emitted as text; with `is_single`, everything after the
  first call is dropped.
"""

import uuid
from collections.abc import Collection
from dataclasses import dataclass

from slotzero.server.call_object import CallObject, is_json

_SPACE = " \t\r\n"
_SEPARATORS = _SPACE + ";"


@dataclass(frozen=True)
class CallFormat:
    opening: str
    closing: str
    is_bare: bool
    """Whether a call may begin the answer, or follow another call, without its opening tag."""


HERMES = CallFormat("<tool_call>", "</tool_call>", is_bare=False)
LLAMA = CallFormat("<|python_tag|>", "", is_bare=True)
FORCED = CallFormat("", "", is_bare=True)


@dataclass(frozen=True)
class Said:
    text: str


@dataclass(frozen=True)
class Called:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class Argued:
    """A further part of the arguments; all parts together are JSON."""

    index: int
    text: str


Event = Said | Called | Argued


class CallParser:
    def __init__(
        self, form: CallFormat, names: Collection[str], *, is_single: bool = False
    ) -> None:
        """`names`: the functions that may be called. A tagged call of another name is emitted
        too."""
        self._form = form
        self._names = names
        self._is_single = is_single
        self._held = ""  # not parsed yet
        self._space = ""  # white space at the end of the text so far: dropped if a call follows
        self._object: CallObject | None = None
        self._before = ""  # the text before the object, emitted if it is not a call
        self._state = self._bare if form.is_bare else self._text
        self._num_argued = 0  # characters of its arguments that were emitted
        self._said_after = 0  # number of calls before the latest text
        self._events: list[Event] = []
        self.num_calls = 0
        """Number of calls that have begun."""
        self.num_done = 0
        """Number of calls that have ended; the last one may be cut off."""
        self.num_whole = 0
        """Number of calls that have ended with valid JSON arguments."""

    def push(self, text: str) -> list[Event]:
        self._held += text
        while self._state():
            pass
        return self._take()

    def close(self) -> list[Event]:
        """End the text, and return the remaining events."""
        if self._object is not None:
            if not self._object.is_call:  # else it is cut off, and never done
                self._fail(self._object)
        elif self._state == self._opened:
            self._say(self._form.opening)
        if not self._is_rest_of_call():
            self._say(self._held)
        if self._space and not self.num_calls:
            self._events.append(Said(self._space))
        self._held = self._space = ""
        return self._take()

    def _is_rest_of_call(self) -> bool:
        """Return whether the unparsed rest only ends a call, or separates it from the next."""
        if self._state == self._closing:
            return self._form.closing.startswith(self._held.strip(_SPACE))
        return (
            self.num_calls > 0 and self._state == self._bare and not self._held.strip(_SEPARATORS)
        )

    # States: each reads from `_held`, and returns whether there is more to do now.

    def _text(self) -> bool:
        opening = self._form.opening
        at = self._held.find(opening) if opening else -1
        if at < 0:
            keep = _overlap(self._held, opening)
            self._say(self._held[: len(self._held) - keep])
            self._held = self._held[len(self._held) - keep :]
            return False
        self._say(self._held[:at])
        self._held = self._held[at + len(opening) :]
        self._state = self._opened
        return True

    def _bare(self) -> bool:
        """At the beginning or after a call, decide whether a call comes next."""
        ahead = self._held.lstrip(_SEPARATORS if self.num_calls else _SPACE)
        if len(ahead) < len(self._form.opening) and self._form.opening.startswith(ahead):
            return False  # nothing, or part of an opening tag
        if not ahead:
            return False
        if ahead[0] == "{":
            return self._begin(ahead, is_tagged=not self._form.opening)
        self._state = self._text
        return True

    def _opened(self) -> bool:
        ahead = self._held.lstrip(_SPACE)
        if not ahead:
            return False
        if ahead[0] != "{":
            self._say(self._form.opening)
            self._state = self._text
            return True
        return self._begin(ahead, is_tagged=True)

    def _begin(self, ahead: str, is_tagged: bool) -> bool:
        self._object = CallObject(None if is_tagged else self._names)
        self._num_argued = 0
        skipped = self._held[: len(self._held) - len(ahead)]
        self._before = (self._form.opening if is_tagged else "") + skipped
        self._held = ahead
        self._state = self._reading
        return True

    def _reading(self) -> bool:
        call = self._object
        assert call is not None
        self._held = call.feed(self._held)
        if call.is_call:
            self._report(call)
        if call.is_wrong:
            self._fail(call)
            self._state = self._text
        elif call.is_over:
            self.num_done += 1
            self.num_whole += is_json(call.arguments)
            self._object = None
            self._state = self._ended if self._is_single else self._closing
        return bool(self._held)

    def _closing(self) -> bool:
        closing, ahead = self._form.closing, self._held.lstrip(_SPACE)
        if closing and len(ahead) < len(closing) and closing.startswith(ahead):
            return False
        self._held = ahead.removeprefix(closing)
        self._state = self._bare if self._form.is_bare else self._text
        return True

    def _ended(self) -> bool:
        """Drop everything after the only call."""
        self._held = ""
        return False

    # Events

    def _report(self, call: CallObject) -> None:
        """Emit the new part of this call."""
        if self.num_calls == self.num_done:
            assert call.name is not None
            self._space = ""
            self._events.append(Called(self.num_calls, f"call_{uuid.uuid4().hex[:24]}", call.name))
            self.num_calls += 1
        if more := call.arguments[self._num_argued :]:
            self._events.append(Argued(self.num_calls - 1, more))
            self._num_argued += len(more)

    def _fail(self, call: CallObject) -> None:
        """Emit an object that is not a call as text."""
        self._object = None
        self._say(self._before + call.raw)

    def _say(self, text: str) -> None:
        text = self._space + text
        said = text.rstrip(_SPACE)
        self._space = text[len(said) :]
        if self._said_after < self.num_calls:
            said = said.lstrip(_SPACE)
        if said:
            self._events.append(Said(said))
            self._said_after = self.num_calls

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events


def _overlap(text: str, tag: str) -> int:
    """Return the length of the longest end of the text that is a proper prefix of the tag."""
    return next(
        (n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0
    )
