"""A grammar in llguidance's dialect of Lark, built rule by rule: r0, r1 and so on.

This module knows no formats of answers. The rule: text from requests is written only as a quoted
literal, as JSON or as one regular expression, so it cannot add rules of its own.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slotzero.errors import RequestError

MAX_GRAMMAR_LEN = 100_000  # characters
ANY_TEXT = r"/(.|\n)*/"
# JSON allows any amount of white space between tokens, and a weak model can generate it endlessly.
JSON_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"


class LarkRules:
    def __init__(self, special: Callable[[str], Sequence[str | int]]) -> None:
        self._special = special
        self._rules: list[str] = []
        self._num_chars = 0

    def text(self, start: str) -> str:
        """Return the grammar whose start rule is this."""
        return "\n".join([f"start: {start}", *self._rules])

    def rule(self, body: str, suffix: str = "") -> str:
        """Add a rule, and return its name. What it matches ends with the first `suffix`, if any."""
        name = f"r{len(self._rules)}"
        attribute = f"[suffix={literal(suffix)}]" if suffix else ""
        self._rules.append(f"{name}{attribute}: {body}")
        self._num_chars += len(self._rules[-1])
        if self._num_chars > MAX_GRAMMAR_LEN:
            raise RequestError(
                f"the schemas of tools and answer need a grammar of more than {MAX_GRAMMAR_LEN} "
                "characters: send fewer or smaller ones, or do not enforce them"
            )
        return name

    def marker(self, text: str) -> str:
        """Return the expression of a marker."""
        pieces = self._special(text) if text else []
        return " ".join(map(_piece, pieces))

    def until(self, marker: str, pattern: str = ANY_TEXT) -> str:
        """Return the expression of text of this pattern up to a marker, and of the marker."""
        first, *rest = self._special(marker)
        if isinstance(first, int):
            found = self.rule(f"{pattern} <[{first}]>")
        else:
            found = self.rule(pattern, suffix=first)
        return " ".join([found, *map(_piece, rest)])


def _piece(piece: str | int) -> str:
    return f"<[{piece}]>" if isinstance(piece, int) else literal(piece)


def literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def json_rule(schema: Mapping[str, Any]) -> str:
    """Return the expression of JSON that conforms to a schema."""
    # without $schema: before draft 2019-09, an $id beside a $ref would be ignored
    plain = {key: value for key, value in schema.items() if key != "$schema"}
    return f"%json {json.dumps(plain | {'x-guidance': {'whitespace_pattern': JSON_SPACE}})}"


def pattern_text(pattern: str) -> str:
    """Return a regular expression as Lark writes it."""
    escaped, is_escaped = "", False
    for char in pattern:
        escaped += "\\/" if char == "/" and not is_escaped else char
        is_escaped = char == "\\" and not is_escaped
    return "/" + escaped.replace("\n", "\\n") + "/"
