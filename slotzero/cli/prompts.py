"""Prompts from command-line arguments, a file of lines, or standard input.

This module does not know tokens or models. The rule: a bad prompt does not affect the others. It
becomes a `PromptInput` with its error and its place, which the caller reports.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slotzero.errors import ConfigError

Message = Mapping[str, Any]
STDIN = "-"


@dataclass(frozen=True)
class PromptInput:
    """One prompt: text, a conversation, or an error."""

    place: str  # "questions.txt, line 3"; empty if there is only one
    text: str | None = None
    messages: Sequence[Message] | None = None
    error: str = ""


def from_arguments(texts: Sequence[str]) -> list[PromptInput]:
    if list(texts) == [STDIN]:
        return [_from_text("", _read_stdin())]
    many = len(texts) > 1
    return [
        _from_text(f"prompt {i}" if many else "", text.encode("utf-8", "surrogateescape"))
        for i, text in enumerate(texts, start=1)
    ]


def from_file(name: str) -> list[PromptInput]:
    """Read one prompt per line; in a .jsonl file, one object per line."""
    if name == STDIN:
        return from_stdin()
    try:
        data = Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"--prompt-file {name}: {error.strerror or error}") from None
    return list(_from_lines(data, is_json=name.endswith(".jsonl"), name=name))


def from_stdin() -> list[PromptInput]:
    return list(_from_lines(_read_stdin(), is_json=False, name="standard input"))


def _read_stdin() -> bytes:
    return sys.stdin.buffer.read()


def _from_lines(data: bytes, *, is_json: bool, name: str) -> Iterator[PromptInput]:
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    if lines[-1] == b"":  # the end of the last line, not another line
        lines.pop()
    if not lines:
        raise ConfigError(f"{name} contains no prompt")
    for number, line in enumerate(lines, start=1):
        read = _from_json if is_json else _from_text
        yield read(f"{name}, line {number}", line.removesuffix(b"\r"))


def _from_text(place: str, data: bytes) -> PromptInput:
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        return PromptInput(place, error=f"byte {error.start} is not UTF-8: convert the text")
    if not text.strip():
        return PromptInput(place, text=text, error="the prompt is empty")
    return PromptInput(place, text=text)


def _from_json(place: str, data: bytes) -> PromptInput:
    try:
        entry = json.loads(data)
    except ValueError as error:  # also bytes that are not text
        return PromptInput(place, error=f"not valid JSON ({error})")
    if not isinstance(entry, dict) or len(entry) != 1 or not entry.keys() & {"prompt", "messages"}:
        return PromptInput(place, error='a line must be {"prompt": TEXT} or {"messages": [...]}')
    if "prompt" in entry:
        return _from_json_prompt(place, entry["prompt"])
    messages = entry["messages"]
    if not _is_conversation(messages):
        return PromptInput(
            place, error="messages must be a list of objects, each with role and content"
        )
    return PromptInput(place, messages=messages)


def _from_json_prompt(place: str, prompt: object) -> PromptInput:
    if not isinstance(prompt, str):
        return PromptInput(place, error=f"prompt must be a string, got {json.dumps(prompt)}")
    if not prompt.strip():
        return PromptInput(place, text=prompt, error="the prompt is empty")
    return PromptInput(place, text=prompt)


def _is_conversation(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages)
    )
