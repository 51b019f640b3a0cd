"""Grammar rules of one tool call, from its format and the tools' schemas.

This module does not know the markers around several calls.

The rule: a schema is enforced whole, or the request is refused. The exceptions are in formats that
write strings without quotes: `format` does not limit them, which JSON schema allows, and where a
parameter may be a string or something else, only the types are enforced, unless all its values are
listed.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from slotzero.errors import RequestError
from slotzero.formats.lark import ANY_TEXT, LarkRules, json_rule, literal, pattern_text
from slotzero.formats.tool_format import (
    JsonArguments,
    LiteralArguments,
    NamedCall,
    ObjectCall,
    TagArguments,
)
from slotzero.formats.value_types import listed_values, resolved, types_of

_ANY_NAME = "/[A-Za-z0-9_.-]+/"
_WHOLE = "slotzero-whole"
_ENDED = re.compile(r"(?<!\\)(\\\\)*\$$")  # a $ that is not escaped
_TOKENS = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|[()|]", re.DOTALL)
_DATA = ("const", "enum", "default", "examples")  # what looks like a reference there is none
Schema = Mapping[str, Any]


class ToolSchema(NamedTuple):
    name: str
    schema: Schema | None
    """None: any arguments."""


class _Value(NamedTuple):
    """A value of a tool's arguments, and the schema in which its references are."""

    schema: Schema
    root: Schema


class CallRules:
    def __init__(
        self, lark: LarkRules, syntax: ObjectCall | NamedCall, tools: Sequence[ToolSchema]
    ) -> None:
        self._lark = lark
        self._syntax = syntax
        self._tools = tools
        self._bodies = [self._arguments(tool.schema) for tool in tools]

    def call(self, after: str = "") -> str:
        """Return the rule of a call of any of the tools, without the marker `after`, with which the
        format's calls begin."""
        calls = [
            self._lark.rule(self._call(tool.name, body, after))
            for tool, body in zip(self._tools, self._bodies, strict=True)
        ]
        return calls[0] if len(calls) == 1 else self._lark.rule(" | ".join(calls))

    def _call(self, name: str, body: str, after: str) -> str:
        syntax, lark = self._syntax, self._lark
        if isinstance(syntax, ObjectCall):
            head = f'{{"name": {literal(name)}, "{syntax.key}": '
            return f'{literal(head)} {body} "}}"'
        opening = syntax.opening.removeprefix(after)
        head = lark.marker(f"{opening}{syntax.name_prefix}{name}")
        suffix = "/:[0-9]{1,3}/ " if syntax.name_suffix else ""
        return f"{head} {suffix}{lark.marker(syntax.after_name)} {body}"

    def _arguments(self, schema: Schema | None) -> str:
        """Return the rule of the arguments, with the marker after them."""
        syntax, lark = self._syntax, self._lark
        schema = {"type": "object"} | dict(schema or {})
        if isinstance(syntax, ObjectCall):
            return lark.rule(json_rule(schema))
        closing = lark.marker(syntax.closing)
        match syntax.arguments:
            case JsonArguments():
                body = lark.rule(json_rule(schema))
            case TagArguments() as tags:
                body = self._tagged(tags, schema)
            case LiteralArguments() as literals:
                body = self._listed(literals, schema)
        return lark.rule(f"{body} {closing}")

    def _tagged(self, tags: TagArguments, schema: Schema) -> str:
        lark = self._lark
        opening, middle = lark.marker(tags.opening), lark.marker(tags.middle)
        properties, required = _properties(schema)
        if properties is None:
            name = f"{opening} {_ANY_NAME} {middle}"
            return lark.rule(f"({name} {lark.until(tags.closing)})*")
        parts = []
        for name, value in properties.items():
            head = lark.marker(f"{tags.opening}{name}{tags.middle}")
            part = lark.rule(f"{head} {self._tagged_value(tags, value)}")
            parts.append(part if name in required else f"{part}?")
        return lark.rule(" ".join(parts) or '""')

    def _tagged_value(self, tags: TagArguments, value: _Value) -> str:
        lark, closing = self._lark, self._lark.marker(tags.closing)
        types = types_of(value.schema, value.root)
        if "string" not in types:
            return f"{lark.rule(json_rule(_alone(value)))} {closing}"
        choices = listed_values(value.schema, value.root)
        if choices is not None:
            texts = [one if isinstance(one, str) else json.dumps(one) for one in choices]
            return f"({' | '.join(map(literal, texts))}) {closing}"
        return lark.until(tags.closing, _string_pattern(value))

    def _listed(self, literals: LiteralArguments, schema: Schema) -> str:
        lark = self._lark
        comma = '", "' if literals.is_python else '","'
        properties, required = _properties(schema)
        if properties is None:
            anything = self._literal(literals, _Value({}, {}))
            pair = lark.rule(f"{_ANY_NAME} {literal(literals.separator)} {anything}")
            inner = f"({pair} ({comma} {pair})*)?"
        else:
            inner = self._pairs(literals, properties, required, comma)
        return lark.rule(f"{literal(literals.opening)} {inner} {literal(literals.closing)}")

    def _pairs(
        self,
        literals: LiteralArguments,
        properties: Mapping[str, _Value],
        required: frozenset[str],
        comma: str,
    ) -> str:
        """Return the rule of these pairs in order, with commas between those that are there."""
        lark = self._lark
        first = later = '""'  # of the pairs from here on: none was written before, or one was
        for name, value in reversed(list(properties.items())):
            head = literal(f"{name}{literals.separator}")
            pair = lark.rule(f"{head} {self._literal(literals, value)}")
            is_optional = name not in required
            first = lark.rule(f"{pair} {later}" + (f" | {first}" if is_optional else ""))
            later = lark.rule(f"{comma} {pair} {later}" + (f" | {later}" if is_optional else ""))
        return first

    def _literal(self, literals: LiteralArguments, value: _Value) -> str:
        lark = self._lark
        types = types_of(value.schema, value.root)
        quote = literals.quotes[0]
        if literals.is_python or "string" not in types:  # JSON's strings are Python's too
            plain = json_rule(_alone(value))
            constants = {"boolean": '"True" | "False"', "null": '"None"'}
            more = [constants[t] for t in sorted(types & set(constants)) if literals.is_python]
            return lark.rule(" | ".join([lark.rule(plain), *more]))
        choices = listed_values(value.schema, value.root)
        if choices is not None:
            marked = [
                f"{quote.mark}{one}{quote.mark}" if isinstance(one, str) else json.dumps(one)
                for one in choices
            ]
            return lark.rule(" | ".join(lark.marker(text) for text in marked))
        string = f"{lark.marker(quote.mark)} {lark.until(quote.mark, _string_pattern(value))}"
        others = types - {"string"}
        if not others:
            return lark.rule(string)
        other = lark.rule(json_rule({"type": sorted(others)}))
        return lark.rule(f"{string} | {other}")


def _properties(schema: Schema) -> tuple[dict[str, _Value] | None, frozenset[str]]:
    """Return the parameters, or None if a tool does not name them, and the required ones."""
    found = resolved(schema, schema)
    properties = found.get("properties")
    if not isinstance(properties, Mapping):
        return None, frozenset()
    required = found.get("required")
    return (
        {
            name: _Value(value if isinstance(value, Mapping) else {}, schema)
            for name, value in properties.items()
        },
        frozenset(name for name in required if isinstance(name, str))
        if isinstance(required, list)
        else frozenset(),
    )


def _alone(value: _Value) -> dict[str, Any]:
    """Return a parameter's schema with the definitions that it may refer to. The whole schema, to
    which it may refer as well, becomes one of them."""
    if '"$ref"' not in json.dumps(value.schema):
        return dict(value.schema)
    definitions = {key: value.root[key] for key in ("$defs", "definitions") if key in value.root}
    whole = {key: part for key, part in value.root.items() if key not in definitions}
    made: dict[str, Any] = _moved({**definitions, **value.schema})
    if _WHOLE in json.dumps(made):
        made["$defs"] = {**made.get("$defs", {}), _WHOLE: _moved(whole)}
    return made


def _moved(part: Any) -> Any:
    """Return a part of a schema with references to the whole schema at its new place."""
    if isinstance(part, list):
        return [_moved(one) for one in part]
    if not isinstance(part, Mapping):
        return part
    made = {key: inner if key in _DATA else _moved(inner) for key, inner in part.items()}
    target = str(made.get("$ref", ""))
    is_local = target == "#" or target.startswith("#/")
    if is_local and not target.startswith(("#/$defs/", "#/definitions/")):
        made["$ref"] = f"#/$defs/{_WHOLE}{target[1:]}"
    return made


def _has_alternatives(pattern: str) -> bool:
    """Return whether a regular expression has alternatives outside its groups."""
    depth = 0
    for token in _TOKENS.findall(pattern):
        depth += (token == "(") - (token == ")")
        if token == "|" and depth == 0:
            return True
    return False


def _string_pattern(value: _Value) -> str:
    schema = resolved(value.schema, value.root)
    pattern, least, most = (schema.get(key) for key in ("pattern", "minLength", "maxLength"))
    has_length = isinstance(least, int) or isinstance(most, int)
    if isinstance(pattern, str):
        is_begun, is_ended = pattern.startswith("^"), _ENDED.search(pattern) is not None
        if has_length or ((is_begun or is_ended) and _has_alternatives(pattern)):
            raise RequestError(
                f"pattern={pattern!r}: this tool format cannot enforce a pattern beside a length, "
                "or alternatives of which one is anchored; write ^(...)$ alone"
            )
        begin, end = ("" if is_there else r"(.|\n)*" for is_there in (is_begun, is_ended))
        inner = pattern[is_begun : len(pattern) - is_ended]
        return pattern_text(f"{begin}({inner}){end}")
    if has_length:
        return rf"/(.|\n){{{least or 0},{'' if most is None else most}}}/"
    return ANY_TEXT
