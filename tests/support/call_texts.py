"""Random tool calls, and the calls that a parser finds in a text."""

import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from hypothesis import strategies as st

from slotzero.formats.answer_parser import AnswerFormat, AnswerParser
from slotzero.formats.events import Argued, Called, Said, Thought
from slotzero.formats.tool_format import LiteralArguments, NamedCall, TagArguments, ToolFormat
from slotzero.formats.value_types import type_of
from slotzero.formats.written_calls import WrittenCall

_PLAIN = st.text("abcxyz_", min_size=1, max_size=8)
_TEXTS = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ['"', "'", "\\", "\\n", "\n", "\n\n x \n", "</", "<tool_call>", "{", "]", "é😀", "null",
         "3", "true", " ", "", '"}', "\\u00e9", "a=b, c", "```"]
    ),
)  # fmt: skip


class Parsed(NamedTuple):
    said: str
    thought: str
    calls: list[tuple[str, str]]
    """Names and arguments."""
    num_done: int
    num_whole: int


def pieces_of(text: str, cuts: Sequence[int]) -> list[str]:
    return [text[a:b] for a, b in pairwise([0, *sorted(cuts), len(text)])]


def parsed(form: AnswerFormat, pieces: Sequence[str]) -> Parsed:
    parser = AnswerParser(form)
    said, thought, calls = "", "", []
    for events in (*(parser.push(piece) for piece in pieces), parser.close()):
        for event in events:
            match event:
                case Said(text):
                    said += text
                case Thought(text):
                    thought += text
                case Called(index, _, name):
                    assert index == len(calls)
                    calls.append((name, ""))
                case Argued(index, text):
                    assert index == len(calls) - 1
                    calls[index] = (calls[index][0], calls[index][1] + text)
    assert parser.num_calls == len(calls)
    return Parsed(said, thought, calls, parser.num_done, parser.num_whole)


def values(texts: st.SearchStrategy[str], keys: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    floats = st.floats(allow_nan=False, allow_infinity=False)
    plain = st.one_of(st.none(), st.booleans(), st.integers(), floats, texts)
    return st.recursive(
        plain,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3), st.dictionaries(keys, inner, max_size=3)
        ),
        max_leaves=6,
    )


def calls_in(form: ToolFormat) -> st.SearchStrategy[list[WrittenCall]]:
    """Return random calls that this format can write."""
    syntax = form.call.arguments if isinstance(form.call, NamedCall) else None
    texts, keys = _TEXTS, _TEXTS
    if isinstance(syntax, TagArguments):
        closing = syntax.closing.strip()
        texts = _TEXTS.filter(lambda text: closing not in text)
    elif isinstance(syntax, LiteralArguments):
        keys = _PLAIN
        if not syntax.is_python:
            texts = _TEXTS.filter(lambda text: not set(text) & set(syntax.quotes[0].mark))
    arguments = st.dictionaries(_PLAIN, values(texts, keys), max_size=3)
    calls = st.builds(WrittenCall, st.sampled_from(["f", "get_time", "a-b"]), arguments)
    return st.lists(calls, min_size=1, max_size=3)


def tools_for(calls: Sequence[WrittenCall]) -> dict[str, Any]:
    """Return schemas that tell strings from other values. Calls of one function share them, so a
    parameter has all types that it has in any call."""
    types: dict[str, dict[str, set[str]]] = {}
    for call in calls:
        for name, value in call.arguments.items():
            types.setdefault(call.name, {}).setdefault(name, set()).add(type_of(value))
    return {
        call.name: {
            "type": "object",
            "properties": {
                name: {"type": sorted(kinds)} for name, kinds in types.get(call.name, {}).items()
            },
        }
        for call in calls
    }


def is_ambiguous(calls: Sequence[WrittenCall]) -> bool:
    """Return whether a parameter is a string in one call and something else in another, which a
    format without quotes cannot tell apart."""
    schemas = tools_for(calls)
    kinds = [set(p["type"]) for s in schemas.values() for p in s["properties"].values()]
    return any("string" in types and len(types) > 1 for types in kinds)


def as_values(calls: Sequence[tuple[str, str]]) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]
