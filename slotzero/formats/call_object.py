"""The JSON object of one tool call, parsed incrementally.

This module does not know what surrounds the object. It is not a JSON parser: it finds the name, and
where the arguments begin and end.

The rule: whether the object is a call is decided once, at one character, and never revised. It is a
call from the character at which its name is known and its arguments, an object, have begun; if they
are missing or not an object, from the closing brace. Until then it may turn out not to be a call;
after that, further keys are ignored. So the decision does not depend on how the text was split.
"""

import json
from collections.abc import Collection

from slotzero.formats.value_types import json_object

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", *_ARGUMENTS)


class CallObject:
    """A possible call while its text arrives.

    raw[0 : read)          is parsed
    raw[start : end)       the arguments; `end` is None until they are complete
    """

    def __init__(self, names: Collection[str] | None) -> None:
        """`names`: the object must call one of these functions, with no unknown key before the
        decision. None: a tag marks it as a call, so any name and key are accepted."""
        self._names = names
        self.raw = ""
        self.name: str | None = None
        self.is_call = False
        self.is_wrong = False
        """Whether it is not a call."""
        self.is_over = False
        self._start: int | None = None
        self._end: int | None = None
        self._odd_arguments: str | None = None  # arguments that are not an object
        self._read = 0
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._string_at = 0
        self._key: str | None = None
        self._value_at: int | None = None

    @property
    def arguments(self) -> str:
        """The call's arguments so far; {} if it has none."""
        if self._start is None:
            return self._odd_arguments or "{}"
        return self.raw[self._start : self._end]

    def feed(self, text: str) -> str:
        """Parse more text, and return what follows the object."""
        self.raw += text
        while self._read < len(self.raw) and not self.is_over and not self.is_wrong:
            self._look(self.raw[self._read], self._read)
            self._read += 1
            if not self.is_call:
                self._decide()
        rest = self.raw[self._read :]
        self.raw = self.raw[: len(self.raw) - len(rest)]
        return rest

    def _decide(self) -> None:
        """Decide after each character, until it is a call or wrong."""
        if self.name is not None and self._names is not None:
            self.is_wrong |= self.name not in self._names
        if self.is_over:
            self.is_wrong |= self.name is None or json_object(self.raw[: self._read]) is None
        has_begun = self._start is not None or self.is_over
        self.is_call = self.name is not None and has_begun and not self.is_wrong

    def _look(self, char: str, at: int) -> None:
        if self._in_string:
            self._look_in_string(char, at)
        elif char == '"':
            self._in_string, self._string_at = True, at
        elif char in "{[":
            self._depth += 1
            if self._depth == 2 and char == "{" and self._key in _ARGUMENTS and self._start is None:
                self._start = at
        elif char in "}]":
            if self._depth == 1:
                self._end_value(at)
            self._depth -= 1
            if self._depth == 1 and self._start is not None and self._end is None:
                self._end = at + 1
            self.is_over = self._depth == 0
        elif self._depth == 1 and char == ":" and self._key is not None:
            self._value_at = at + 1
        elif self._depth == 1 and char == ",":
            self._end_value(at)

    def _look_in_string(self, char: str, at: int) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._in_string = False
            if self._depth == 1 and self._key is None:
                self._key = _loads(self.raw[self._string_at : at + 1])
                if not self.is_call and self._names is not None and self._key not in _KEYS:
                    self.is_wrong = True

    def _end_value(self, at: int) -> None:
        if self._value_at is not None and not self.is_call:
            value = self.raw[self._value_at : at].strip()
            if self._key == "name":
                self.name = _loads(value)
                self.is_wrong = self.name is None
            elif self._key in _ARGUMENTS and self._start is None:
                self._odd_arguments = _loads(value) or ("{}" if value == "null" else value)
        self._key = self._value_at = None


def _loads(text: str) -> str | None:
    """Return the value of a JSON string, or None if it is not one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, str) else None
