"""Check of the JSON schema of a tool's arguments, before a model sees it.

It names what is wrong by its place. It knows no formats, and not the compiler of grammars, which
refuses more where a schema is enforced.

The rule: only what no draft of JSON schema allows is refused, or what cannot be arguments.
"""

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import unquote

from slotzero.errors import RequestError
from slotzero.formats.value_types import ALL

MAX_DEPTH = 64
_BY_NAME = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties", "not", "if", "then", "else", "contains")


def check_schema(schema: Mapping[str, Any] | None, where: str) -> None:
    """Refuse what cannot be the JSON schema of a function's arguments; None is any arguments."""
    if schema is None:
        return
    if not _depth_is_at_most(schema, MAX_DEPTH):
        raise RequestError(f"{where}: nested over {MAX_DEPTH} deep", where)
    kind = schema.get("type", "object")
    if kind != "object":
        raise _wrong(f"{where}.type", f"must be 'object', got {_shown(kind)}")
    _check(schema, where, schema)


def _check(schema: Any, where: str, root: Mapping[str, Any]) -> None:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, Mapping):
        raise _wrong(where, f"must be a schema, got {_shown(schema)}")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if not (isinstance(kind, str) and kind in ALL):
            what = f"must be one of {', '.join(sorted(ALL))}, got {_shown(kind)}"
            raise _wrong(f"{where}.type", what)
    required = schema.get("required", [])
    if not (isinstance(required, list) and all(isinstance(name, str) for name in required)):
        raise _wrong(f"{where}.required", "must be a list of names")
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/") and not _is_in(root, reference):
        raise _wrong(f"{where}.$ref", f"there is no {reference[:80]} in the schema")
    for place, part in _parts(schema, where):
        _check(part, place, root)


def _parts(schema: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any]]:
    """Yield the schemas in a schema, with their places."""
    for key in _BY_NAME:
        named = schema.get(key, {})
        if not isinstance(named, Mapping):
            raise _wrong(f"{where}.{key}", f"must be an object, got {_shown(named)}")
        yield from ((f"{where}.{key}.{name[:64]}", part) for name, part in named.items())
    for key in _LISTS:
        listed = schema.get(key, [])
        if not isinstance(listed, list):
            raise _wrong(f"{where}.{key}", f"must be a list, got {_shown(listed)}")
        yield from ((f"{where}.{key}[{i}]", part) for i, part in enumerate(listed))
    for key in _SINGLE:
        if key in schema and not isinstance(schema[key], list):  # a list of items is an old draft's
            yield f"{where}.{key}", schema[key]


def _is_in(root: Any, reference: str) -> bool:
    """Return whether there is something at a local reference."""
    for part in unquote(reference).removeprefix("#/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping) and key in root:
            root = root[key]
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return False
    return True


def _depth_is_at_most(value: Any, depth: int) -> bool:
    if not isinstance(value, Mapping | list):
        return True
    inner = value.values() if isinstance(value, Mapping) else value
    return depth > 0 and all(_depth_is_at_most(part, depth - 1) for part in inner)


def _shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where}: {what}", where[:200])
