"""Grammars of whole answers, in llguidance's Lark: reasoning, then calls, a structure, or text.

This module knows formats and schemas; it compiles nothing. It reads the same descriptions as the
parser. JSON is enforced by the schema of the tool. Where a format writes values in its own way,
strings are enforced in that way, and all other values as JSON, which the parser accepts there.

The rule: what a grammar allows, the parser reads as calls of these tools with these arguments.
Markers that are special tokens are written as such, since text cannot match them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slotzero.errors import RequestError
from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.call_grammar import CallRules, ToolSchema
from slotzero.formats.lark import ANY_TEXT, LarkRules, json_rule, pattern_text
from slotzero.formats.reasoning import ReasoningStart
from slotzero.formats.tool_format import NamedCall, ToolFormat
from slotzero.sampling.structured import StructuredOutputs

SpecialPieces = Callable[[str], Sequence[str | int]]
"""Splits text into plain text and the ids of special tokens."""


@dataclass(frozen=True)
class AnswerRules:
    """What an answer must be."""

    tools: Mapping[str, Mapping[str, Any] | None]
    """The tools that may be called, with the schemas that their arguments must have, if any."""
    is_forced: bool
    """Whether the answer must be calls."""
    structure: StructuredOutputs | None = None
    """What an answer that does not call must be; None: any text."""


def answer_grammar(form: AnswerFormat, rules: AnswerRules, special: SpecialPieces) -> str:
    """Return the grammar of an answer in this format."""
    lark = LarkRules(special)
    answer = _answer(lark, form, rules)
    thought = _thought(lark, form)
    return lark.text(f"{thought} {answer}" if thought else answer)


def _thought(lark: LarkRules, form: AnswerFormat) -> str:
    """Return the rule of the reasoning before the answer."""
    reasoning = form.reasoning
    if reasoning is None or form.start is ReasoningStart.AFTER:
        return ""
    closing = lark.until(reasoning.closing.strip()) + r" /[ \n]{0,4}/"
    if form.start is ReasoningStart.WITHIN:
        return lark.rule(closing)
    opened = lark.rule(f"{lark.marker(reasoning.opening.strip())} {closing}")
    return f"{opened}?"


def _answer(lark: LarkRules, form: AnswerFormat, rules: AnswerRules) -> str:
    structure = "" if rules.structure is None else _structure(lark, form, rules.structure)
    if form.calls is None or not rules.tools:
        return structure
    tools = [ToolSchema(name, schema) for name, schema in rules.tools.items()]
    sections = SectionRules(lark, form.calls, tools, form.is_single)
    if rules.is_forced:
        return sections.whole()
    opening = "" if form.reasoning is None else form.reasoning.answer_opening
    if structure:
        return lark.rule(f"{sections.whole()} | {structure}")
    if opening:
        return lark.rule(f"{sections.whole()} | {lark.marker(opening)} {ANY_TEXT}")
    return sections.within_text()


def _structure(lark: LarkRules, form: AnswerFormat, structure: StructuredOutputs) -> str:
    opening = ""
    if form.reasoning is not None and form.reasoning.answer_opening:
        opening = lark.marker(form.reasoning.answer_opening) + " "
    match structure.kind:
        case "json_schema" | "json_object":
            body = json_rule(json.loads(structure.text))
        case "regex":
            body = pattern_text(structure.text)
        case "choice":
            body = " | ".join(json.dumps(text) for text in json.loads(structure.text))
        case "grammar":
            if not structure.is_lark:
                raise RequestError(
                    "structured_outputs: grammar: only Lark can follow reasoning or stand beside "
                    "tools; write it in Lark (start: ...), or switch these off",
                    "structured_outputs",
                )
            body = f"%lark {{\n{structure.text}\n}}"
    return lark.rule(f"{opening}{lark.rule(body)}")


class SectionRules:
    """Rules of calls with the markers around them."""

    def __init__(
        self, lark: LarkRules, form: ToolFormat, tools: Sequence[ToolSchema], is_single: bool
    ) -> None:
        self._lark = lark
        self._form = form
        self._is_single = is_single
        self._calls = CallRules(lark, form.call, tools)

    def whole(self) -> str:
        """Return the rule of an answer that is calls alone."""
        form, lark = self._form, self._lark
        if form.is_bare:
            return lark.rule(self._inner(self._calls.call()))
        section = lark.rule(f"{lark.marker(form.opening)} {self._rest(self._calls.call())}")
        return section if form.has_many or self._is_single else self._repeated(section)

    def within_text(self) -> str:
        """Return the rule of text with calls in it; without calls, it is any text."""
        form, lark = self._form, self._lark
        start = form.start.strip()
        found = lark.until(start)
        if isinstance(form.call, NamedCall) and not form.opening:
            first = self._calls.call(after=start)
            section = lark.rule(f"{found} {self._rest(first)}")
        else:
            opening = lark.marker(form.opening.removeprefix(start))
            section = lark.rule(f"{found} {opening} {self._rest(self._calls.call())}")
        text = f"{section}* {ANY_TEXT}"
        if not form.is_bare:
            return lark.rule(text)
        # an answer that begins like a call must be one
        return lark.rule(rf"{self._inner(self._calls.call())} | /([^\[{{\s](.|\n)*)?/")

    def _rest(self, first: str) -> str:
        """Return what follows the opening marker."""
        inner = first if not self._form.has_many else self._inner(first)
        return f"{inner} {self._lark.marker(self._form.closing)}"

    def _inner(self, first: str) -> str:
        form = self._form
        calls = first if self._is_single else self._repeated(first)
        return f'"[" {calls} "]"' if form.is_list else calls

    def _repeated(self, first: str) -> str:
        form = self._form
        again = self._calls.call() if form.has_many else first
        return f"{first} ({self._lark.marker(form.separator)} {again})*"
