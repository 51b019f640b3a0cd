"""The JSON types that a tool's schema allows for parameters that a format writes without types.

This module knows schemas, not formats. A schema that says nothing of types allows all.

The rule: text is read as another value than a string only if the schema allows that value's type.
"""

import ast
import json
from collections.abc import Mapping
from typing import Any, NoReturn

ALL = frozenset(("string", "number", "integer", "boolean", "null", "array", "object"))
CONSTANTS: Mapping[str, str] = {
    "true": "true", "True": "true", "false": "false", "False": "false", "null": "null",
    "None": "null",
}  # fmt: skip
"""JSON's constants, by their names in JSON and in Python."""
_MAX_DEPTH = 16  # of references and unions
_MAX_PYTHON_LEN = 1 << 16


class ParameterTypes:
    """The types of each parameter of one function."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root = schema or {}
        found = resolved(self._root, self._root).get("properties")
        self._properties: Mapping[str, Any] = found if isinstance(found, Mapping) else {}

    def of(self, name: str) -> frozenset[str]:
        return types_of(self._properties.get(name, True), self._root)


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the types of the values that a schema allows, or more than these."""
    return _types_of(schema, root, {}, 0)


def _types_of(
    schema: Any, root: Mapping[str, Any], known: dict[str, frozenset[str]], depth: int
) -> frozenset[str]:
    """Do so; `known` has the types at each reference, so that each is followed once."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ALL
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in known:
            known[reference] = ALL  # where it refers to itself
            known[reference] = _types_of(_pointed(reference, root), root, known, depth + 1)
        return known[reference]
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,)) & ALL or ALL
    if isinstance(named, list):
        return frozenset(name for name in named if isinstance(name, str)) & ALL or ALL
    if "const" in schema:
        return frozenset((type_of(schema["const"]),))
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"])) or ALL
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            parts = [_types_of(part, root, known, depth + 1) for part in schema[key]]
            return frozenset().union(*parts) or ALL
    return ALL


def listed_values(schema: Any, root: Mapping[str, Any]) -> list[Any] | None:
    """Return all values that a schema allows, each once, if it lists them."""
    return _listed_values(schema, root, {}, 0)


def _listed_values(
    schema: Any, root: Mapping[str, Any], known: dict[str, list[Any] | None], depth: int
) -> list[Any] | None:
    """Do so; `known` has the values at each reference, so that each is followed once."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return None
    if "$ref" in schema:
        reference = str(schema["$ref"])
        if reference not in known:
            known[reference] = None  # where it refers to itself
            known[reference] = _listed_values(_pointed(reference, root), root, known, depth + 1)
        return known[reference]
    if "const" in schema:
        return [schema["const"]]
    if schema.get("type") == "null":
        return [None]
    if isinstance(choices := schema.get("enum"), list):
        return choices
    branches = schema.get("anyOf", schema.get("oneOf"))
    if not isinstance(branches, list):
        return None
    found: dict[str, Any] = {}  # by their JSON
    for branch in branches:
        values = _listed_values(branch, root, known, depth + 1)
        if values is None:
            return None
        found.update((json.dumps(one), one) for one in values)
    return list(found.values())


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Follow a schema's local references."""
    for _ in range(_MAX_DEPTH):
        if "$ref" not in schema:
            break
        schema = _pointed(str(schema["$ref"]), root)
    return schema


def _pointed(reference: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the schema at a local reference, or one that allows everything."""
    if not reference.startswith("#"):
        return {}
    found: Any = root
    for part in reference[1:].strip("/").split("/"):
        key = part.replace("~1", "/").replace("~0", "~")
        if not key:
            continue
        if not isinstance(found, Mapping):
            return {}
        found = found.get(key)
    return found if isinstance(found, Mapping) else {}


def type_of(value: Any) -> str:
    """Return the JSON type of a value."""
    if value is None:
        return "null"
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    return kinds.get(type(value), "object")


def json_of(text: str, types: frozenset[str]) -> str:
    """Return text from between two tags as JSON: of one of these types if it can be, else a
    string."""
    word = text.strip()
    word = CONSTANTS.get(word, word)
    try:
        value = strict_json(word)
    except (ValueError, RecursionError):
        return _python_json(word, types) or json.dumps(text, ensure_ascii=False)
    kinds = {type_of(value)}
    if kinds == {"integer"} or (isinstance(value, float) and value.is_integer()):
        kinds |= {"integer", "number"}
    return word if kinds & types else json.dumps(text, ensure_ascii=False)


def _python_json(word: str, types: frozenset[str]) -> str | None:
    """Return a list or an object that a model has written as Python writes it."""
    if "string" in types or word[:1] not in ("[", "{") or len(word) > _MAX_PYTHON_LEN:
        return None
    try:
        return json.dumps(ast.literal_eval(word), ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def strict_json(text: str) -> Any:
    """Parse JSON; raise ValueError for NaN and infinities too, which Python accepts."""
    return json.loads(text, parse_constant=_no_number)


def json_object(text: str) -> dict[str, Any] | None:
    """Parse a JSON object, or return None if the text is none."""
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
