"""One tool call's JSON object, read while it is written.

It does not know what surrounds it. It is not a JSON parser: it finds the name, and where the
arguments begin and end; whether they are valid is for whoever gets them.
"""

import json

_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", *_ARGUMENTS)


class CallObject:
    """
    raw[0 : read)          was looked at
    raw[start : end)       the arguments; `end` is None while they grow
    """

    def __init__(self, may_have_other_keys: bool) -> None:
        self._keys = None if may_have_other_keys else _KEYS
        self.raw = ""
        self.name: str | None = None
        self.is_over = False
        self.is_wrong = False
        self.start: int | None = None
        self.end: int | None = None
        self.odd_arguments: str | None = None  # those that are no object
        self._read = 0
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._string_at = 0
        self._key: str | None = None
        self._value_at: int | None = None

    def feed(self, text: str) -> str:
        """-> what follows the object"""
        self.raw += text
        while self._read < len(self.raw) and not self.is_over and not self.is_wrong:
            self._look(self.raw[self._read], self._read)
            self._read += 1
        rest = self.raw[self._read :]
        self.raw = self.raw[: len(self.raw) - len(rest)]
        return rest

    def _look(self, char: str, at: int) -> None:
        if self._in_string:
            self._look_in_string(char, at)
        elif char == '"':
            self._in_string, self._string_at = True, at
        elif char in "{[":
            self._depth += 1
            if self._depth == 2 and char == "{" and self._key in _ARGUMENTS and self.start is None:
                self.start = at
        elif char in "}]":
            if self._depth == 1:
                self._end_value(at)
            self._depth -= 1
            if self._depth == 1 and self.start is not None and self.end is None:
                self.end = at + 1
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
                self.is_wrong = self._keys is not None and self._key not in self._keys

    def _end_value(self, at: int) -> None:
        if self._value_at is not None:
            value = self.raw[self._value_at : at].strip()
            if self._key == "name":
                self.name = _loads(value)
                self.is_wrong = self.name is None
            elif self._key in _ARGUMENTS and self.start is None:
                self.odd_arguments = _loads(value) or ("{}" if value == "null" else value)
        self._key = self._value_at = None


def _loads(text: str) -> str | None:
    """A JSON string, or None."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
