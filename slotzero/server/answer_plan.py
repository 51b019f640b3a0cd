"""From a conversation to its prompt, the format of its answers, and the requests for them.

This module knows the served model's template and formats, not HTTP or any API. Reasoning and calls
are read from the answer by the format; what the client enforces becomes one grammar of the whole
answer, after the reasoning.

The rule: whatever can be refused before the engine sees it is refused here, under the client's name
of the field.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from slotzero.errors import RequestError
from slotzero.formats.answer_grammar import AnswerRules, answer_grammar
from slotzero.formats.answer_parser import AnswerFormat
from slotzero.formats.reasoning import ReasoningStart, start_of
from slotzero.formats.tool_prompt import with_tool_prompt
from slotzero.server.answers import GenerationRequest
from slotzero.server.app_state import AppState
from slotzero.server.conversation import ANY, Conversation, ToolSpec
from slotzero.server.generation_requests import about, generation_requests, without_words
from slotzero.text.chat_template import variables_of

_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class AnswerPlan:
    """The requests for the answers to one conversation, and how to read these answers."""

    requests: list[GenerationRequest]
    form: AnswerFormat
    prompt: str
    has_reasoning: bool
    """Whether the model can reason, so that replies count its reasoning."""


async def plan_answer(state: AppState, conversation: Conversation) -> AnswerPlan:
    specs = _usable_tools(state, conversation)
    field = conversation.name_of("messages")
    for message in conversation.messages:
        state.check_text(message["content"], field)
    variables = _variables(state, conversation)

    def encode() -> tuple[str, list[int]]:
        text = _render(state, conversation, specs, variables)
        state.check_text(text, field)
        return text, state.tokenizer.encode(text, add_special_tokens=False)

    with about(field):
        text, tokens = await asyncio.to_thread(encode)
    limit = conversation.template.max_prompt_tokens
    if limit is not None:
        tokens = tokens[-limit:]
    state.check_tokens(tokens, field)
    form = _format(state, conversation, specs, text)
    structure, name = _structure(state, conversation, specs, form)
    given = {**state.sampling, **conversation.sampling}
    given |= without_words(given, conversation.bad_words, state.tokenizer)
    if form.has_markers:
        given["skip_special_tokens"] = False  # markers may be special tokens
    names = {"prompt": field, **conversation.names, "structured_outputs": name}
    requests = [
        replace(request, shows_end=conversation.scores_all)
        for request in generation_requests(given, [tokens], [""], conversation.n, structure, names)
    ]
    return AnswerPlan(requests, form, text, state.reasoning is not None)


def rendered(state: AppState, conversation: Conversation) -> str:
    """Return the prompt of a conversation that is not to be answered."""
    specs = _usable_tools(state, conversation)
    return _render(state, conversation, specs, _variables(state, conversation))


def _usable_tools(state: AppState, conversation: Conversation) -> list[ToolSpec]:
    """Return the tools that the model may call."""
    use = conversation.tools
    if not use.specs or use.choice == "none":
        return []
    if state.tools.form is None:
        field = conversation.name_of("tools")
        raise RequestError(f"{field}: {state.tools.refusal}", field)
    return list(use.specs)


def _variables(state: AppState, conversation: Conversation) -> dict[str, Any]:
    """Return the template's variables; what the request sets itself wins."""
    effort = conversation.template.effort
    switches = {} if effort is None else _switches(state, effort, conversation)
    return {**switches, **conversation.template.variables}


def _switches(state: AppState, effort: str, conversation: Conversation) -> dict[str, Any]:
    template = conversation.template.template or state.tokenizer.chat_template or ""
    known = variables_of(template)
    made: dict[str, Any] = {name: effort != "none" for name in _SWITCHES if name in known}
    if "reasoning_effort" in known and effort not in ("none", ANY):
        made["reasoning_effort"] = effort
    is_so_anyway = effort == (ANY if state.reasoning is not None else "none")
    if not made and not is_so_anyway:
        field = conversation.name_of("effort")
        what = "does not reason" if state.reasoning is None else "cannot switch its reasoning"
        raise RequestError(
            f"{field}: this model {what}, according to its chat template; leave it out", field
        )
    return made


def _render(
    state: AppState,
    conversation: Conversation,
    specs: list[ToolSpec],
    variables: Mapping[str, Any],
) -> str:
    shown = [dict(spec.shown) for spec in specs]
    messages: list[dict[str, Any]] = list(conversation.messages)
    options = conversation.template
    if state.tools.is_builtin and state.tools.form is not None:
        messages, shown = with_tool_prompt(messages, shown, state.tools.form), []
    tokenizer = state.tokenizer
    used = options.template or (tokenizer.tool_template if shown else tokenizer.chat_template)
    if "documents" in variables and "documents" not in variables_of(used or ""):
        raise RequestError(
            "documents: this model's chat template does not show them; put them into a message",
            "documents",
        )
    return state.tokenizer.apply_chat_template(
        messages,
        tools=shown or None,
        add_generation_prompt=options.add_generation_prompt,
        continue_final_message=options.continue_final_message,
        template=options.template,
        **variables,
    )


def _format(
    state: AppState, conversation: Conversation, specs: list[ToolSpec], prompt: str
) -> AnswerFormat:
    reasoning, start = state.reasoning, ReasoningStart.AFTER
    if reasoning is not None and not conversation.template.continue_final_message:
        start = start_of(reasoning, prompt)
    use = conversation.tools
    return AnswerFormat(
        reasoning=reasoning,
        start=start,
        calls=state.tools.form if specs else None,
        tools={spec.name: spec.schema for spec in specs},
        is_single=bool(specs) and (not use.is_parallel or use.choice == "named"),
    )


def _structure(
    state: AppState, conversation: Conversation, specs: list[ToolSpec], form: AnswerFormat
) -> tuple[dict[str, Any] | None, str]:
    """Return the structure of the whole answer, and the client's field that asks for it."""
    use, wanted = conversation.tools, conversation.structure
    is_forced = bool(specs) and use.choice in ("required", "named")
    has_strict = any(spec.is_strict for spec in specs)
    name = wanted.field if wanted is not None else conversation.name_of("tools")
    if wanted is not None and is_forced:
        raise RequestError(
            f"{name}: not supported while tool_choice forces a call; send tool_choice=auto", name
        )
    if not (is_forced or has_strict or wanted is not None):
        return None, name
    if wanted is not None and not specs and not form.has_reasoning:
        return dict(wanted.params), name
    allowed = [spec for spec in specs if use.choice != "named" or spec.name == use.name]
    enforces = is_forced or has_strict
    rules = AnswerRules(
        tools={spec.name: spec.schema if is_forced or spec.is_strict else None for spec in allowed},
        is_forced=is_forced,
        structure=None if wanted is None else wanted.parsed(),
    )
    with about(name):
        text = answer_grammar(form, rules, state.tokenizer.special_pieces)
    return {"grammar": text}, conversation.name_of("tools") if enforces else name
