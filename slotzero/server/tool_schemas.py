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
MAX_VISITS = 1000
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
    if not _Ends(schema).has_end(schema, ("#",)):
        what = "what it requires contains itself again, without end; make one property optional"
        raise _wrong(where, what)


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
    if isinstance(reference, str) and reference.startswith("#/") and _at(root, reference) is None:
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


class _Ends:
    """Search for a finite value of a schema, through everything that it requires.

    It gives up after MAX_VISITS parts, and then takes the schema for a finite one.
    """

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._num_visits = 0
        self._found: dict[str, Any] = {}  # by reference

    def has_end(self, schema: Any, within: tuple[str, ...]) -> bool:
        """`within`: the references, or empty strings, that lead to this schema."""
        self._num_visits += 1
        is_known = isinstance(schema, Mapping) and len(within) <= MAX_DEPTH
        if not is_known or self._num_visits > MAX_VISITS:
            return True
        needed = _list_in(schema, "allOf")
        named = schema.get("properties")
        if schema.get("type") == "object" and isinstance(named, Mapping):
            required = {one for one in _list_in(schema, "required") if isinstance(one, str)}
            needed = [*needed, *(part for name, part in named.items() if name in required)]
        choices = [parts for key in ("anyOf", "oneOf") if (parts := _list_in(schema, key))]
        inner = (*within, "")
        return (
            self._reference_has_end(schema.get("$ref"), within)
            and all(self.has_end(part, inner) for part in needed)
            and all(any(self.has_end(part, inner) for part in parts) for parts in choices)
        )

    def _reference_has_end(self, reference: Any, within: tuple[str, ...]) -> bool:
        if not isinstance(reference, str) or not (reference + "/").startswith("#/"):
            return True
        if reference in within:
            return False
        if reference not in self._found:
            self._found[reference] = _at(self._root, reference)
        return self.has_end(self._found[reference], (*within, reference))


def _list_in(schema: Mapping[str, Any], key: str) -> list[Any]:
    """Return a list in a schema that a reference may have found in a place that is unchecked."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _at(root: Any, reference: str) -> Any:
    """Return what is at a local reference, or None."""
    if reference == "#":
        return root
    for part in unquote(reference).removeprefix("#/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, Mapping) and key in root:
            root = root[key]
        elif isinstance(root, list) and key.isdecimal() and int(key) < len(root):
            root = root[int(key)]
        else:
            return None
    return root


def _depth_is_at_most(value: Any, depth: int) -> bool:
    if not isinstance(value, Mapping | list):
        return True
    inner = value.values() if isinstance(value, Mapping) else value
    return depth > 0 and all(_depth_is_at_most(part, depth - 1) for part in inner)


def _shown(value: Any) -> str:
    return repr(value)[:40] if isinstance(value, str | int | float) else type(value).__name__


def _wrong(where: str, what: str) -> RequestError:
    return RequestError(f"{where}: {what}", where[:200])
