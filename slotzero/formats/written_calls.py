"""Calls as text in a model's format: for prompts that Slotzero writes itself, and for tests.

It reads the same description as the parser. The rule: parsing what is written here gives the same
calls, unless a string contains the marker that ends it, which no format can escape.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slotzero.formats.tool_format import (
    JsonArguments,
    LiteralArguments,
    NamedCall,
    TagArguments,
    ToolFormat,
)


class WrittenCall(NamedTuple):
    name: str
    arguments: Mapping[str, Any]


def written_calls(form: ToolFormat, calls: Sequence[WrittenCall]) -> str:
    """Return the calls as a model writes them."""
    texts = [written_call(form, i, call) for i, call in enumerate(calls)]
    if not form.has_many:
        return form.separator.join(form.opening + text + form.closing for text in texts)
    inner = form.separator.join(texts)
    if form.is_list:
        inner = f"[{inner}]"
    if form.is_bare:
        return inner
    return form.opening + inner + form.closing


def written_call(form: ToolFormat, index: int, call: WrittenCall) -> str:
    syntax = form.call
    if not isinstance(syntax, NamedCall):
        name, arguments = json.dumps(call.name), _json(call.arguments)
        return f'{{"name": {name}, "{syntax.key}": {arguments}}}'
    suffix = syntax.name_suffix.format(index=index)
    head = f"{syntax.opening}{syntax.name_prefix}{call.name}{suffix}{syntax.after_name}"
    return head + _arguments(syntax, call.arguments) + syntax.closing


def _arguments(syntax: NamedCall, arguments: Mapping[str, Any]) -> str:
    match syntax.arguments:
        case JsonArguments():
            return _json(arguments)
        case TagArguments() as tags:
            return "".join(
                f"{tags.opening}{name}{tags.middle}{_tagged(value)}{tags.closing}"
                for name, value in arguments.items()
            )
        case LiteralArguments() as literals:
            pairs = [
                f"{name}{literals.separator}{_literal(literals, value)}"
                for name, value in arguments.items()
            ]
            comma = ", " if literals.is_python else ","
            return literals.opening + comma.join(pairs) + literals.closing


def _tagged(value: Any) -> str:
    return value if isinstance(value, str) else _json(value)


def _literal(syntax: LiteralArguments, value: Any) -> str:
    comma = ", " if syntax.is_python else ","
    if isinstance(value, str):
        quote = syntax.quotes[0]
        if syntax.is_python:
            return repr(value)
        return f"{quote.mark}{value}{quote.mark}"
    if isinstance(value, Mapping):
        pairs = [f"{_key(syntax, k)}:{_literal(syntax, v)}" for k, v in value.items()]
        return "{" + comma.join(pairs) + "}"
    if isinstance(value, list):
        return "[" + comma.join(_literal(syntax, item) for item in value) + "]"
    if syntax.is_python and (value is None or isinstance(value, bool)):
        return str(value)
    return _json(value)


def _key(syntax: LiteralArguments, key: str) -> str:
    return repr(key) if syntax.is_python else key


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
