"""Chat templates: Jinja programs, provided by models, that format a conversation as text.

This module does not know tokens. A template is untrusted code, so it runs in an immutable sandbox,
extended as in Hugging Face: `raise_exception`, `tojson`, `strftime_now`, `break` and `continue` in
loops, and `{% generation %}` blocks (which mark text for training and are ignored).

The rule: any failure of a template is an error of one request, never of the server.
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from slotzero.errors import ConfigError, RequestError

RESERVED = (
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "tokenize",
    "template", "self",
)  # fmt: skip
NOT_BOTH = (
    "cannot be used with add_generation_prompt, which begins a new message: set that to false"
)


def template_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message in the form that templates expect.

    The content is one string, and the arguments of tool calls are objects.
    """
    where = f"messages[{index}]"
    made = {name: value for name, value in message.items() if value is not None}
    role, content, calls = made.get("role"), made.get("content"), made.get("tool_calls")
    if not isinstance(role, str):
        raise _message_error(f"{where}.role", f"must be a string such as 'user', got {role!r}")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [_part_text(f"{where}.content[{i}]", part) for i, part in enumerate(content)]
        content = "\n".join(parts)
    if content is None and not (role == "assistant" and calls):
        raise _message_error(f"{where}.content", "is missing")
    if not isinstance(content or "", str):
        raise _message_error(f"{where}.content", "must be a string or a list of parts")
    if calls:
        made["tool_calls"] = [
            _template_call(f"{where}.tool_calls[{i}].function", call)
            for i, call in enumerate(calls)
        ]
    made["role"] = "system" if role == "developer" else role
    return made | {"content": content or ""}


def _message_error(field: str, what: str) -> RequestError:
    return RequestError(f"{field}: {what}", param=field)


def _part_text(where: str, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise _message_error(where, f"type {kind!r} is not supported, only text is")
    text: str = part["text"]
    return text


def _template_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _message_error(where, "must have a name and arguments")
    arguments = function.get("arguments") or "{}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise _message_error(f"{where}.arguments", "must be a JSON object, or its text")
    named = {"name": function["name"], "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": named}


def reserved_variable(given: Mapping[str, Any]) -> str | None:
    """Return the first of a client's template variables that clients may not set, or None."""
    return next((name for name in given if name in RESERVED), None)


def read_template(given: str, setting: str = "chat_template") -> str:
    """Return the template given by --chat-template or another setting: a path, or the template
    itself.

    A template contains braces or line ends, a path does not.
    """
    text = given
    if not any(char in given for char in "{}\n"):
        try:
            text = Path(given).expanduser().read_text(encoding="utf-8")
        except OSError as error:
            why = error.strerror or error
            raise ConfigError(f"{setting}: {given[:200]!r} cannot be read: {why}") from None
        except UnicodeDecodeError:
            raise ConfigError(f"{setting}: {given[:200]!r} is not UTF-8 text") from None
    try:
        _compiled(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"{setting}: line {error.lineno} is not valid Jinja: {error.message}"
        ) from None
    return text


def render_chat(template: str, variables: Mapping[str, Any]) -> str:
    """Render a conversation as text; raise RequestError if the template fails."""
    try:
        return _compiled(template).render(variables)
    except Exception as error:  # a template can raise anything, from TypeError to RecursionError
        raise _template_error(error) from None


def variables_of(template: str) -> frozenset[str]:
    """Return the names that a template reads and does not always set itself; raise RequestError if
    it is not valid Jinja."""
    try:
        return _variables_of(template)
    except Exception as error:
        raise _template_error(error) from None


def _template_error(error: Exception) -> RequestError:
    reason = " ".join(str(error).split()) or type(error).__name__
    return RequestError(f"the model's chat template rejects these messages: {reason}")


def render_unfinished(template: str, variables: Mapping[str, Any]) -> str:
    """Render a conversation up to the end of its last message, for the model to continue it."""
    *earlier, last = variables["messages"]
    if last.get("tool_calls"):
        raise RequestError(
            "continue_final_message: the last message ends with tool_calls, and only text can be "
            "continued"
        )
    mark = f"the-end-{secrets.token_hex(8)}"
    marked = {**last, "content": f"{last['content']}{mark} "}
    text = render_chat(template, {**variables, "messages": [*earlier, marked]})
    before, found, after = text.rpartition(mark)
    if not found:
        raise RequestError("continue_final_message: the chat template omits the last message")
    # A template that trims messages has removed the space after the mark. Without the mark, it
    # would have trimmed the text before it.
    return before if after.startswith(" ") else before.rstrip()


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


@lru_cache(maxsize=16)
def _variables_of(template: str) -> frozenset[str]:
    return frozenset(meta.find_undeclared_variables(_environment().parse(template)))


def _environment() -> jinja2.Environment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=["jinja2.ext.loopcontrols", _GenerationBlock],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Convert to JSON, without the HTML escapes of Jinja's own filter.

    Models have not seen such escapes in training.
    """
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)
