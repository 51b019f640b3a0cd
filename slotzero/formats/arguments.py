"""Readers of the arguments of one call: they emit JSON as the model writes its own form of it.

This module knows the three ways in which formats write arguments, not the calls around them.

The rule: what was emitted so far is always the beginning of one JSON object. A reader returns True
if the object is complete, and False if the text ended or broke off before that.
"""

import json
import re
from collections.abc import Callable

from slotzero.formats.text_input import Reading, TextInput, overlap, words_of
from slotzero.formats.tool_format import LiteralArguments, Quote, TagArguments
from slotzero.formats.value_types import CONSTANTS, ParameterTypes, json_of

Emit = Callable[[str], None]
MAX_NAME_LEN = 256
_MAX_DEPTH = 100
_PLAIN_JSON = re.compile(r'[^"{}\[\]\\]*')
_WORD = re.compile(r"[^\s,\]})=:'\"<(\[{]+")
_KEY = re.compile(r"[^:=,{}\[\]()\"'<]+")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0"}


def read_json(source: TextInput, emit: Emit) -> Reading[bool]:
    """Read a JSON object and emit it unchanged."""
    depth, in_string = 0, False
    while True:
        plain = _PLAIN_JSON.match(source.text)
        emit(source.take(plain.end() if plain else 0))
        if not source.text:
            if not (yield from source.more()):
                return False
            continue
        char = source.text[0]
        if char == "\\":
            if len(source.text) < 2 and not (yield from source.more()):
                return False
            emit(source.take(2))
            continue
        emit(source.take(1))
        if char == '"':
            in_string = not in_string
        elif not in_string:
            depth += 1 if char in "{[" else -1
            if depth <= 0:
                return True


def read_tags(
    source: TextInput, syntax: TagArguments, end: str, types: ParameterTypes, emit: Emit
) -> Reading[bool]:
    """Read parameters up to the marker `end`, which is read too."""
    emit("{")
    is_first = True
    while True:
        if (yield from source.skip(end)):
            emit("}")
            return True
        if not (yield from source.skip(syntax.opening)):
            return False
        name_end, *others = words_of(syntax.middle)
        name = yield from source.until(name_end, MAX_NAME_LEN)
        if name is None:
            return False
        for word in others:
            if not (yield from source.skip(word)):
                return False
        emit(("" if is_first else ", ") + json.dumps(name.strip(), ensure_ascii=False) + ": ")
        is_first = False
        if not (yield from _tagged_value(source, syntax, types.of(name.strip()), emit)):
            return False


def _tagged_value(
    source: TextInput, syntax: TagArguments, types: frozenset[str], emit: Emit
) -> Reading[bool]:
    """Read a value. The line ends that belong to the tags do not belong to it."""
    closing = syntax.closing.strip()
    if syntax.middle.endswith("\n") and (yield from source.begins("\n")):
        source.take(1)
    line_end = "\n" if syntax.closing.startswith("\n") else ""
    is_string = types == {"string"}
    if is_string:
        emit('"')
    value = ""
    while (at := source.text.find(closing)) < 0:
        held = len(line_end) + overlap(source.text, closing)
        part = source.take(max(0, len(source.text) - held)) if is_string else ""
        emit(json.dumps(part, ensure_ascii=False)[1:-1])
        if not (yield from source.more()):
            source.take(len(source.text))  # the beginning of its end, or a value that is cut off
            return False
    value = source.take(at).removesuffix(line_end) if line_end else source.take(at)
    source.take(len(closing))
    if is_string:
        emit(json.dumps(value, ensure_ascii=False)[1:])
    else:
        emit(json_of(value, types))
    return True


class LiteralReader:
    """Reads named values as Python or Gemma write them."""

    def __init__(self, source: TextInput, syntax: LiteralArguments, emit: Emit) -> None:
        self._source = source
        self._syntax = syntax
        self._emit = emit

    def read(self) -> Reading[bool]:
        source, syntax = self._source, self._syntax
        if not (yield from source.skip(syntax.opening)):
            return False
        self._emit("{")
        return (yield from self._object(syntax.closing, syntax.separator, "}", 0))

    def _object(self, closing: str, separator: str, end: str, depth: int) -> Reading[bool]:
        """Read what follows an opening bracket, whose JSON was emitted."""
        is_first = True
        while True:
            if (yield from self._source.skip(closing)):
                self._emit(end)
                return True
            if not is_first:
                if not (yield from self._source.skip(",")):
                    return False
                if (yield from self._source.skip(closing)):  # Python allows a comma at the end
                    self._emit(end)
                    return True
                self._emit(", ")
            is_first = False
            if separator and not (yield from self._key(separator)):
                return False
            if not (yield from self._value(depth + 1)):
                return False

    def _key(self, separator: str) -> Reading[bool]:
        quote = yield from self._quote()
        if quote is not None:
            if not (yield from self._string(quote)):
                return False
            name = ""
        else:
            name = (yield from self._source.word(_KEY, MAX_NAME_LEN)).strip()
            if not name:
                return False
        if not (yield from self._source.skip(separator)):
            return False
        self._emit(f"{json.dumps(name, ensure_ascii=False) if name else ''}: ")
        return True

    def _value(self, depth: int) -> Reading[bool]:
        if depth > _MAX_DEPTH:
            return False
        quote = yield from self._quote()
        if quote is not None:
            return (yield from self._string(quote))
        brackets = {"[": ("]", "", "[", "]"), "{": ("}", ":", "{", "}")}
        if self._syntax.is_python:
            brackets["("] = (")", "", "[", "]")
        if (found := brackets.get(self._source.text[:1])) is not None:
            self._source.take(1)
            closing, separator, start, end = found
            self._emit(start)
            return (yield from self._object(closing, separator, end, depth))
        word = yield from self._source.word(_WORD, MAX_NAME_LEN)
        if word not in CONSTANTS and not _NUMBER.fullmatch(word):
            return False
        self._emit(CONSTANTS.get(word, word))
        return True

    def _quote(self) -> Reading[Quote | None]:
        """Return the quote of the string that comes next, and read it."""
        yield from self._source.space()
        for quote in self._syntax.quotes:
            if (yield from self._source.begins(quote.mark)):
                self._source.take(len(quote.mark))
                return quote
        return None

    def _string(self, quote: Quote) -> Reading[bool]:
        self._emit('"')
        source = self._source
        while True:
            at = source.text.find(quote.mark)
            escape = source.text.find("\\") if quote.has_escapes else -1
            if escape >= 0 and (at < 0 or escape < at):
                self._plain(source.take(escape))
                if not (yield from self._escape()):
                    return False
            elif at >= 0:
                self._plain(source.take(at))
                source.take(len(quote.mark))
                self._emit('"')
                return True
            else:
                held = overlap(source.text, quote.mark)
                self._plain(source.take(len(source.text) - held))
                if not (yield from source.more()):
                    source.take(held)  # the beginning of its end
                    return False

    def _plain(self, text: str) -> None:
        self._emit(json.dumps(text, ensure_ascii=False)[1:-1])

    def _escape(self) -> Reading[bool]:
        source = self._source
        while len(source.text) < 2:
            if not (yield from source.more()):
                return False
        kind = source.text[1]
        num = {"x": 2, "u": 4, "U": 8}.get(kind, 0)
        while len(source.text) < 2 + num:
            if not (yield from source.more()):
                return False
        digits = source.take(2 + num)[2:]
        if not num:
            self._plain(_ESCAPES.get(kind, "" if kind == "\n" else _other_escape(kind)))
            return True
        try:
            code = int(digits, 16)
            # half of a surrogate pair stays an escape: the other half follows
            self._emit(f"\\u{code:04x}" if code < 1 << 16 else json.dumps(chr(code))[1:-1])
        except ValueError:
            self._plain(f"\\{kind}{digits}")
        return True


def _other_escape(kind: str) -> str:
    return kind if kind in "\\'\"/" else f"\\{kind}"
