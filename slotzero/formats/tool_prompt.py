"""Slotzero's own prompt for tools, for models whose chat template does not show them.

This module knows messages in the form that templates expect. The tools and the way to call them are
added to the system message, earlier calls are written into the assistant's text, and results come
from the user.

The rule: the prompt of a conversation begins with that of the conversation so far, so that the
prefix cache finds it.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from slotzero.formats.tool_format import ToolFormat
from slotzero.formats.written_calls import WrittenCall, written_calls

_EXAMPLE = WrittenCall("function_name", {"argument_name": "value"})


def with_tool_prompt(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[dict[str, Any]]:
    """Return messages that a template without tools can render."""
    shown = [_shown(message, form) for message in messages]
    if not tools:
        return shown
    text = tool_prompt(tools, form)
    if shown and shown[0]["role"] == "system":
        shown[0] = {**shown[0], "content": f"{shown[0]['content']}\n\n{text}"}
        return shown
    return [{"role": "system", "content": text}, *shown]


def tool_prompt(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions. Each line describes one, with a JSON schema of its "
        f"arguments:\n{listed}\n\nTo call a function, write only this, with its name and "
        f"arguments:\n{written_calls(form, [_EXAMPLE])}\n\nThe results are then sent to you. If no "
        "function helps, answer without one."
    )


def _shown(message: Mapping[str, Any], form: ToolFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    functions = [call["function"] for call in calls]
    text = written_calls(form, [WrittenCall(f["name"], f["arguments"]) for f in functions])
    content = f"{message['content']}\n{text}" if message["content"] else text
    return {"role": "assistant", "content": content}
