"""Structured outputs: the structure that an answer must have. Pure data: it compiles no grammar.

The rule: exactly one structure is given, and it is stored as text. Two requests with the same kind
and text share a grammar.
"""

import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from slotzero.errors import RequestError

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar"]
KINDS: tuple[Kind, ...] = ("json_schema", "json_object", "regex", "choice", "grammar")
NAMES = (*KINDS, "json")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """The structure of an answer. Exactly one field is set."""

    json_schema: str | Mapping[str, Any] | None = None
    """The answer is JSON that conforms to this schema, given as a dict or JSON text."""
    json_object: bool | None = None
    """The answer is any JSON object."""
    regex: str | None = None
    """The whole answer matches this regular expression (Rust's syntax: no look-around)."""
    choice: Sequence[str] | None = None
    """The answer is one of these strings."""
    grammar: str | None = None
    """The whole answer follows this grammar: Lark (`start: ...`) or EBNF (`root ::= ...`)."""
    json: str | Mapping[str, Any] | None = None
    """vLLM's name for json_schema; its value is moved there."""

    def __post_init__(self) -> None:
        for name, ok, rule in (
            ("json_object", isinstance(self.json_object, bool | None), "must be true"),
            ("regex", self.regex is None or isinstance(self.regex, str), "must be a string"),
            ("grammar", self.grammar is None or isinstance(self.grammar, str), "must be a string"),
            ("choice", self.choice is None or _is_texts(self.choice), "must be a list of strings"),
            ("choice", self.choice is None or self.choice, "is empty; it needs at least one entry"),
        ):
            if not ok:
                raise _refused(name, getattr(self, name), rule)
        named = [name for name in NAMES if getattr(self, name) not in (None, False)]
        if len(named) != 1:
            got = " and ".join(named) or "none"
            raise structure_error(f"must have exactly one of {', '.join(NAMES)}, got {got}")
        if self.regex is not None:
            _check_unicode("regex", self.regex)
        if self.grammar is not None:
            _check_unicode("grammar", self.grammar)
        if self.choice is not None:
            for i, text in enumerate(self.choice):
                _check_unicode(f"choice[{i}]", text)
            object.__setattr__(self, "choice", tuple(self.choice))
        if named[0] in ("json_schema", "json"):
            text = _schema_text(named[0], getattr(self, named[0]))
            object.__setattr__(self, "json_schema", text)
            object.__setattr__(self, "json", None)

    @property
    def kind(self) -> Kind:
        return next(kind for kind in KINDS if getattr(self, kind) not in (None, False))

    @property
    def text(self) -> str:
        """The schema, regular expression or grammar, or the choices as a JSON list."""
        match self.kind:
            case "json_schema":
                return str(self.json_schema)
            case "json_object":
                return '{"type": "object"}'
            case "regex":
                return str(self.regex)
            case "choice":
                return json.dumps(self.choice)
            case "grammar":
                return str(self.grammar)

    @property
    def is_lark(self) -> bool:
        """Whether the grammar is written in Lark, not in EBNF."""
        return re.search(r"(?m)^[ \t]*(%llguidance\b|start[ \t]*:)", self.grammar or "") is not None


def structured_outputs(given: object) -> StructuredOutputs | None:
    """Convert a request's value: None, StructuredOutputs, or a mapping of its fields."""
    if given is None or isinstance(given, StructuredOutputs):
        return given
    if not isinstance(given, Mapping):
        shown = reprlib.repr(given)
        raise RequestError(
            f"structured_outputs={shown}: must be a dict with one of {', '.join(NAMES)}",
            param="structured_outputs",
        )
    unknown = [name for name in given if name not in NAMES]
    if unknown:
        raise RequestError(
            f"structured_outputs has no field {unknown[0]!r}; its fields are {', '.join(NAMES)}",
            param="structured_outputs",
        )
    return StructuredOutputs(**given)


def structure_error(why: str, kind: Kind | None = None) -> RequestError:
    """Create the error for a structure that cannot be used; `kind` is None for all kinds."""
    label = "structured_outputs" if kind is None else f"structured_outputs: {kind}"
    return RequestError(f"{label}: {why}", param="structured_outputs", label=label)


def _schema_text(name: str, schema: object) -> str:
    """Return a schema as JSON text. The order of its properties, which answers follow, is kept."""
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise _refused(name, schema, "must be a JSON object")
        return json.dumps(parsed, allow_nan=False, default=_plain)
    except (ValueError, TypeError, RecursionError) as error:
        raise _refused(name, schema, f"is not valid JSON ({error})") from None


def _plain(value: object) -> Any:
    if isinstance(value, Mapping):  # json.dumps accepts only dicts by itself
        return dict(value)
    raise TypeError(f"{type(value).__name__} is not a JSON type")


def _is_texts(value: object) -> bool:
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(text, str) for text in value)


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode("utf-8")  # JSON may contain half of a surrogate pair, which is not text
    except UnicodeEncodeError as error:
        kind = name.partition("[")[0]
        raise RequestError(
            f"structured_outputs: {name} has half a surrogate pair at position {error.start}; "
            "send valid Unicode",
            param="structured_outputs",
            label=f"structured_outputs: {kind}",
        ) from None


def _refused(name: str, value: object, rule: str) -> RequestError:
    label = f"structured_outputs: {name}"
    return RequestError(
        f"{label}={reprlib.repr(value)} {rule}", param="structured_outputs", label=label
    )
