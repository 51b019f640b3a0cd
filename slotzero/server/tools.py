"""Tools in a chat: written into the prompt by the model's template, read back from its answer.

It knows requests and templates; the reading itself is in tool_calls.py. A choice that forces a call
is kept by grammar: the answer can only be that call's JSON.

The rule: tools that this model could not be told of, or whose calls could not be read, are refused.
Where the model is free to call, its arguments are what it writes, `strict` or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from slotzero.server.conversation import Message, NamedTool, Tool
from slotzero.server.protocol import ChatRequest
from slotzero.server.status import FieldError
from slotzero.server.tool_calls import FORCED, HERMES, LLAMA, CallFormat, CallParser
from slotzero.text.chat_template import MessageError, template_message, variable_of_ours

FORMATS: Mapping[str, CallFormat] = {"hermes": HERMES, "llama": LLAMA}


@dataclass(frozen=True)
class ToolPlan:
    """What a request's tools mean for its prompt and its answer."""

    tools: list[dict[str, Any]] | None = None
    """For the template."""
    form: CallFormat | None = None
    names: frozenset[str] = frozenset()
    schema: dict[str, Any] | None = None
    """What the answer must be, if a call is forced."""
    is_single: bool = False
    """Whether the answer ends with its first call."""

    def parser(self) -> CallParser | None:
        if self.form is None:
            return None
        return CallParser(self.form, self.names, is_single=self.is_single)


def choose_format(setting: str, template: str | None) -> CallFormat | str:
    """The format in which this model writes calls, from the template that taught it; or why tools
    are refused."""
    if setting == "none":
        return "tools: switched off on this server (--tool-call-parser none)"
    if template is None or "tools" not in template:
        return (
            "tools: this model has no chat template that shows them, whatever --tool-call-parser "
            "says; serve a model that has one, or give --chat-template"
        )
    if setting != "auto":
        return FORMATS[setting]
    if HERMES.opening in template:
        return HERMES
    if LLAMA.opening in template or '"parameters"' in template:
        return LLAMA
    return (
        "tools: this model's chat template shows them, but the form of a call is not found in it; "
        f"serve it with --tool-call-parser {' or '.join(FORMATS)}"
    )


def plan_tools(body: ChatRequest, form: CallFormat | str) -> ToolPlan:
    """`form`: of choose_format."""
    if not body.tools or body.tool_choice == "none":
        return ToolPlan()
    if isinstance(form, str):
        raise FieldError("tools", form)
    wanted = _wanted(body.tools, body.tool_choice)
    return ToolPlan(
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools],
        form=form if wanted is None else FORCED,
        names=frozenset(tool.function.name for tool in body.tools),
        schema=None if wanted is None else call_schema(wanted),
        is_single=body.parallel_tool_calls is False or wanted is not None,
    )


def _wanted(tools: Sequence[Tool], choice: str | NamedTool | None) -> list[Tool] | None:
    """The tools of which one must be called; None: the model is free."""
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            name = choice.function.name[:64]
            raise FieldError("tool_choice", f"tool_choice: {name!r} is none of the tools")
        return named
    return list(tools) if choice == "required" else None


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """JSON schema of one call of any of these.

    Each tool's parameters stay a schema resource of their own, with its own `$id`: that is what
    `#` means in their `$ref`s, so definitions of equal names in two tools are kept apart.
    """
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": schema,
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool, schema in zip(tools, _arguments_schemas(tools), strict=True)
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def _arguments_schemas(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    schemas: dict[str, dict[str, Any]] = {}
    for i, tool in enumerate(tools):
        given = tool.function.parameters or {"type": "object"}
        where, own = f"tools: {tool.function.name}: parameters.$id", given.get("$id", "")
        if not isinstance(own, str):
            raise FieldError("tools", f"{where} must be text")
        name = urljoin(f"http://tool-{i}.invalid/", own)
        if name in schemas:
            raise FieldError("tools", f"{where}: another tool has {own!r}; give each its own")
        # without $schema: before draft 2019-09, an $id beside a $ref would be ignored
        schemas[name] = {"$id": name} | {
            key: value for key, value in given.items() if key not in ("$id", "$schema")
        }
    return list(schemas.values())


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """As chat templates know them: text is one string, arguments are objects."""
    return [_template_message(i, message) for i, message in enumerate(messages)]


def _template_message(place: int, message: Message) -> dict[str, Any]:
    where = f"messages[{place}]"
    if message.tool_calls and message.role != "assistant":
        raise FieldError(f"{where}.tool_calls", f"{where}.tool_calls: only an assistant calls")
    if (message.tool_call_id is None) == (message.role == "tool"):
        raise FieldError(
            f"{where}.tool_call_id", f"{where}.tool_call_id: a tool has one, nobody else does"
        )
    given = message.model_dump(exclude={"annotations", "provider_specific_fields"})
    try:
        return template_message(place, given)
    except MessageError as error:
        raise FieldError(error.param, str(error)) from None


def template_variables(given: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = variable_of_ours(given or {})
    if taken is not None:
        raise FieldError("chat_template_kwargs", f"chat_template_kwargs: {taken!r} is ours to set")
    return dict(given or {})
