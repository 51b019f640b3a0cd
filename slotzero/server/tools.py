"""Tools in a chat: the model's template writes them into the prompt, and calls are parsed from the
answer.

This module knows requests and templates; tool_calls.py parses. A tool_choice that forces a call is
enforced by a grammar: the answer can only be that call's JSON.

The rule: tools are refused if the model's template cannot show them or its calls cannot be parsed.
If the model is free to call, its arguments are not constrained, `strict` or not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urljoin

from slotzero.errors import RequestError
from slotzero.server.conversation import Message, NamedTool, Tool
from slotzero.server.protocol import ChatRequest
from slotzero.server.tool_calls import FORCED, HERMES, LLAMA, CallFormat, CallParser
from slotzero.text.chat_template import reserved_variable, template_message

FORMATS: Mapping[str, CallFormat] = {"hermes": HERMES, "llama": LLAMA}


@dataclass(frozen=True)
class ToolPlan:
    """How a request's tools affect its prompt and its answer."""

    tools: list[dict[str, Any]] | None = None
    """The tools for the template."""
    form: CallFormat | None = None
    names: frozenset[str] = frozenset()
    schema: dict[str, Any] | None = None
    """JSON schema of the answer, if a call is forced."""
    is_single: bool = False
    """Whether the answer ends with its first call."""

    def parser(self) -> CallParser | None:
        if self.form is None:
            return None
        return CallParser(self.form, self.names, is_single=self.is_single)


def choose_format(setting: str, template: str | None) -> CallFormat | str:
    """Return the format of this model's tool calls, according to its template, or why tools are
    refused."""
    if setting == "none":
        return "tools: disabled on this server (--tool-call-parser none)"
    if template is None or "tools" not in template:
        return (
            "tools: this model's chat template does not support them; serve a model with a "
            "template that does, or give one with --chat-template"
        )
    if setting != "auto":
        return FORMATS[setting]
    if HERMES.opening in template:
        return HERMES
    if LLAMA.opening in template or '"parameters"' in template:
        return LLAMA
    return (
        "tools: the format of tool calls cannot be derived from this model's chat template; "
        f"serve it with --tool-call-parser {' or '.join(FORMATS)}"
    )


def plan_tools(body: ChatRequest, form: CallFormat | str) -> ToolPlan:
    """Return the plan for a request. `form`: the result of choose_format."""
    if not body.tools or body.tool_choice == "none":
        return ToolPlan()
    if isinstance(form, str):
        raise RequestError(form, "tools")
    forced = _forced_tools(body.tools, body.tool_choice)
    return ToolPlan(
        tools=[tool.model_dump(exclude_unset=True) for tool in body.tools],
        form=form if forced is None else FORCED,
        names=frozenset(tool.function.name for tool in body.tools),
        schema=None if forced is None else call_schema(forced),
        is_single=body.parallel_tool_calls is False or forced is not None,
    )


def _forced_tools(tools: Sequence[Tool], choice: str | NamedTool | None) -> list[Tool] | None:
    """Return the tools of which one must be called; None if the model is free to call or not."""
    if isinstance(choice, NamedTool):
        named = [tool for tool in tools if tool.function.name == choice.function.name]
        if not named:
            name = choice.function.name[:64]
            raise RequestError(f"tool_choice: {name!r} is not one of the tools", "tool_choice")
        return named
    return list(tools) if choice == "required" else None


def call_schema(tools: Sequence[Tool]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of these tools.

    Each tool's parameters are a schema resource with its own `$id`, to which `#` in their `$ref`s
    refers, so that two tools may have definitions of the same name.
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
        parameters = tool.function.parameters or {"type": "object"}
        where, own = f"tools: {tool.function.name}: parameters.$id", parameters.get("$id", "")
        if not isinstance(own, str):
            raise RequestError(f"{where} must be a string", "tools")
        name = urljoin(f"http://tool-{i}.invalid/", own)
        if name in schemas:
            raise RequestError(f"{where}: another tool has {own!r} too; use unique ids", "tools")
        # without $schema: before draft 2019-09, an $id beside a $ref would be ignored
        schemas[name] = {"$id": name} | {
            key: value for key, value in parameters.items() if key not in ("$id", "$schema")
        }
    return list(schemas.values())


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages for chat templates: text is one string, arguments are objects."""
    return [_template_message(i, message) for i, message in enumerate(messages)]


def _template_message(place: int, message: Message) -> dict[str, Any]:
    where = f"messages[{place}]"
    if message.tool_calls and message.role != "assistant":
        raise RequestError(
            f"{where}.tool_calls: only a message of role assistant has them", f"{where}.tool_calls"
        )
    if (message.tool_call_id is None) == (message.role == "tool"):
        raise RequestError(
            f"{where}.tool_call_id: required for role tool, and only allowed there",
            f"{where}.tool_call_id",
        )
    fields = message.model_dump(exclude={"annotations", "provider_specific_fields"})
    return template_message(place, fields)


def template_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = reserved_variable(variables or {})
    if taken is not None:
        raise RequestError(
            f"chat_template_kwargs: {taken!r} is set by the server", "chat_template_kwargs"
        )
    return dict(variables or {})
