"""Tools of all APIs, and messages for chat templates: from the client's form to ours.

This module knows chat's request models. The rule: a tool whose schema cannot be one is refused
here, even where nothing enforces it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slotzero.errors import RequestError
from slotzero.server.chat_messages import Message, NamedTool, Tool
from slotzero.server.conversation import ToolSpec, ToolUse
from slotzero.server.tool_schemas import check_schema
from slotzero.text.chat_template import reserved_variable, template_message


def function_tools(
    tools: Sequence[Tool] | None,
    choice: str | NamedTool | None = None,
    is_parallel: bool | None = None,
) -> ToolUse:
    """Return the tools in the form of chat completions."""
    specs = [
        tool_spec(
            tool.function.model_dump(exclude_unset=True),
            tool.function.strict,
            f"tools[{i}].function.parameters",
        )
        for i, tool in enumerate(tools or ())
    ]
    if isinstance(choice, NamedTool):
        return tool_use(specs, name=choice.function.name, is_parallel=is_parallel)
    return tool_use(specs, choice, is_parallel=is_parallel)


def tool_spec(function: dict[str, Any], is_strict: bool | None, where: str) -> ToolSpec:
    """`function`: as chat templates expect it. `where`: the client's field of its schema."""
    schema = function.get("parameters")
    check_schema(schema, where)
    shown = {"type": "function", "function": function}
    return ToolSpec(function["name"], schema, bool(is_strict), shown)


def tool_use(
    specs: Sequence[ToolSpec],
    choice: str | None = None,
    name: str | None = None,
    *,
    is_parallel: bool | None,
    name_field: str = "tool_choice",
) -> ToolUse:
    """`name`: the tool that must be called. `name_field`: the client's field of it."""
    names = [spec.name for spec in specs]
    doubled = next((name for i, name in enumerate(names) if name in names[:i]), None)
    if doubled is not None:
        raise RequestError(f"tools: two tools have the name {doubled!r}", "tools")
    if name is not None and name not in names:
        raise RequestError(f"{name_field}: {name[:64]!r} is not one of the tools", name_field)
    kind = (choice or "auto") if name is None else "named"
    return ToolUse(specs, kind, name or "", is_parallel is not False)


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
    reasoning = message.reasoning_content or message.reasoning
    if reasoning and message.role != "assistant":
        name = f"{where}.{'reasoning_content' if message.reasoning_content else 'reasoning'}"
        raise RequestError(f"{name}: only a message of role assistant has it", name)
    fields = message.model_dump(
        exclude={
            "annotations",
            "parsed",
            "provider_specific_fields",
            "reasoning",
            "reasoning_content",
        }
    )
    return with_reasoning(template_message(place, fields), reasoning)


def with_reasoning(message: dict[str, Any], reasoning: str | None) -> dict[str, Any]:
    """Return a message with its reasoning, under all names that templates use for it."""
    if not reasoning:
        return message
    made = message | {"reasoning_content": reasoning, "reasoning": reasoning}
    if not (message.get("tool_calls") and message["content"]):  # gpt-oss's template refuses that
        made["thinking"] = reasoning
    return made


def template_call(where: str, call_id: str, name: str, arguments: Any) -> dict[str, Any]:
    """Return an earlier call for chat templates. `arguments`: an object, or its JSON."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}: must be a JSON object, or its text", where)
    function = {"name": name, "arguments": dict(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def joined_system(texts: Sequence[str], messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages of which at most the first is a system message: these texts, and the system
    messages that begin the conversation. Many templates accept no other."""
    rest = list(messages)
    system = list(texts)
    while rest and rest[0]["role"] == "system":
        system.append(rest.pop(0)["content"])
    if system:
        rest.insert(0, {"role": "system", "content": "\n\n".join(system)})
    return rest


def template_variables(variables: Mapping[str, Any] | None) -> dict[str, Any]:
    taken = reserved_variable(variables or {})
    if taken is not None:
        raise RequestError(
            f"chat_template_kwargs: {taken!r} is set by the server", "chat_template_kwargs"
        )
    return dict(variables or {})
