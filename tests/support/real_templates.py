"""Check of the formats against real chat templates, which models bring and we do not distribute.

    python tests/support/real_templates.py FOLDER

FOLDER has templates as *.jinja files, such as models/templates in the source of llama.cpp. Each one
renders a conversation with reasoning and two calls; what it writes is parsed in the format that
follows from it. Prints one line per template.
"""

import sys
from pathlib import Path
from typing import Any

from call_texts import as_values, parsed

from slotzero.errors import RequestError
from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.reasoning import Start, reasoning_format_of, start_of
from slotzero.formats.tool_formats import tool_format_of
from slotzero.server.tools import with_reasoning
from slotzero.text.chat_template import read_template, render_chat

ARGUMENTS: dict[str, Any] = {"city": 'Par\'is \n"x"', "days": 3, "sure": True, "tags": ["a", 1]}
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "description": "where"},
        "days": {"type": "integer", "description": "how many"},
        "sure": {"type": "boolean", "description": "whether"},
        "tags": {"type": "array", "description": "which", "items": {"type": "string"}},
    },
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA},
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def checked(template: str) -> str:
    """Return what was found, as one line."""
    form, reasoning = tool_format_of(template), reasoning_format_of(template)
    names = f"{form.name if form else '-':14} {reasoning.name if reasoning else '-':10}"
    if form is None:
        return names
    for calls in ([call("a"), call("b")], [call("a")]):
        ask = [{"role": "user", "content": "Hi"}]
        answer = {"role": "assistant", "content": "", "tool_calls": calls}
        tail = [{"role": "tool", "tool_call_id": "a" * 9, "content": "END", "name": "weather"}]
        try:
            prompt = render(template, ask, True)
            whole = render(template, [*ask, with_reasoning(answer, "I think."), *tail], False)
        except RequestError as error:
            names += f" ({error!s:.60})"
            continue
        text = whole[len(prompt) :] if whole.startswith(prompt) else whole[len(prompt) - 40 :]
        start = Start.AFTER if reasoning is None else start_of(reasoning, prompt)
        written = AnswerFormat(reasoning, start, form, {"weather": SCHEMA})
        found = parsed(written, list(text))
        expected = [("weather", ARGUMENTS)] * len(calls)
        is_right = found.num_whole == len(calls) and as_values(found.calls) == expected
        if not is_right and len(calls) > 1:
            continue
        kind = f"{start.name.lower():6} thought={found.thought[:12]!r:10}"
        return f"{names} {kind} {len(calls)} calls: {'right' if is_right else repr(text)[:300]}"
    return names


def call(name: str) -> dict[str, Any]:
    function = {"name": "weather", "arguments": ARGUMENTS}
    return {"id": f"{name * 9}", "type": "function", "function": function}


def render(template: str, messages: list[Any], begins: bool) -> str:
    variables = {"messages": messages, "tools": [TOOL], "add_generation_prompt": begins}
    return render_chat(template, {**TOKENS, **variables})


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.jinja")):
        print(f"{path.stem[:40]:40} {checked(read_template(str(path)))}")
