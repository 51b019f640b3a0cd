"""Requests of OpenAI's Responses API, and the conversation that one becomes.

This module knows neither the model nor stored responses: the messages of an earlier response are
given to it. The rule is that of protocol.py: a field works, or it is refused by name unless its
value requests what happens anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from slotzero.errors import RequestError
from slotzero.server.chat_messages import RequestModel, ToolName, check_types
from slotzero.server.conversation import Conversation, Structure, TemplateOptions, ToolUse
from slotzero.server.protocol import MAX_MESSAGES, MAX_TOOLS, Effort, refuse_values
from slotzero.server.tools import (
    joined_system,
    template_call,
    template_variables,
    tool_spec,
    tool_use,
    with_reasoning,
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "context_management": (),
    "conversation": (),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "priority",
)  # fmt: skip


PartType = Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]


class ResponsePart(RequestModel):
    type: PartType
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[ResponsePart]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: ToolName
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[ResponsePart]
    id: str | None = None
    status: str | None = None


class ReasoningItem(RequestModel):
    type: Literal["reasoning"]
    summary: list[ResponsePart] = Field(default_factory=list)
    content: list[ResponsePart] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None


AnyItem = MessageItem | CallItem | ResultItem | ReasoningItem
Item = Annotated[AnyItem, Field(discriminator="type")]
_ITEM_TYPES = [get_args(one.model_fields["type"].annotation)[0] for one in get_args(AnyItem)]


def _checked_items(given: Any) -> Any:
    """Return items with their types: an item without one is a message."""
    if not isinstance(given, list):
        return given
    items = [{"type": "message"} | item if isinstance(item, dict) else item for item in given]
    check_types(items, _ITEM_TYPES, "input")
    for i, item in enumerate(items):
        for name in ("content", "output"):
            parts = item.get(name) if isinstance(item, dict) else None
            check_types(parts, get_args(PartType), f"input[{i}].{name}")
    return items


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(RequestModel):
    type: Literal["function"]
    name: str


class TextFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextOptions(RequestModel):
    format: TextFormat | None = None
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(RequestModel):
    effort: Effort | None = None
    summary: Literal["auto"] | None = None
    generate_summary: Literal["auto"] | None = None


class ResponseStreamOptions(RequestModel):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(RequestModel):
    input: Annotated[
        str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)], BeforeValidator(_checked_items)
    ] = ""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    # reasoning is sent as it is, so a client that keeps it itself needs no encrypted form
    include: list[Literal["reasoning.encrypted_content"]] | None = None
    # no effect on the answer
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    priority: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # NEUTRAL
    access_programs: Any = None
    background: Any = None
    context_management: Any = None
    conversation: Any = None
    image: Any = None
    max_tool_calls: Any = None
    moderation: Any = None
    prompt: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    top_logprobs: Any = None
    truncation: Any = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        refuse_values(self, NEUTRAL)
        if not self.input and self.previous_response_id is None:
            raise RequestError("input: missing or empty", "input")
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise RequestError("tool_choice: allowed only with tools", "tool_choice")
        return self


def input_messages(body: ResponsesRequest) -> list[dict[str, Any]]:
    """Return the input for chat templates. What the assistant wrote in a row is one message."""
    if isinstance(body.input, str):
        return [{"role": "user", "content": body.input}] if body.input else []
    messages: list[dict[str, Any]] = []
    thought = ""
    for i, item in enumerate(body.input):
        match item:
            case ReasoningItem():
                thought += _text(item.content or item.summary)
            case MessageItem(role="assistant"):
                made = {"role": "assistant", "content": _text(item.content)}
                messages.append(with_reasoning(made, thought))
                thought = ""
            case CallItem():
                if thought or not messages or messages[-1]["role"] != "assistant":
                    messages.append(with_reasoning({"role": "assistant", "content": ""}, thought))
                    thought = ""
                call = template_call(
                    f"input[{i}].arguments", item.call_id, item.name, item.arguments
                )
                last = messages[-1]
                messages[-1] = last | {"tool_calls": [*last.get("tool_calls", ()), call]}
            case ResultItem():
                messages.append(
                    {
                        "role": "tool",
                        "tool_call_id": item.call_id,
                        "content": _text(item.output),
                    }
                )
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _text(item.content)})
    return messages


def responses_conversation(
    body: ResponsesRequest, messages: Sequence[dict[str, Any]]
) -> Conversation:
    """`messages`: those of earlier responses, and the input."""
    system = [] if body.instructions is None else [body.instructions]
    return Conversation(
        messages=joined_system(system, messages),
        sampling=body.given(_SAMPLING) | {"max_tokens": body.max_output_tokens},
        tools=_tools(body),
        template=TemplateOptions(
            variables=template_variables(body.chat_template_kwargs),
            effort=None if body.reasoning is None else body.reasoning.effort,
        ),
        structure=_structure(body),
        names={
            "messages": "input",
            "effort": "reasoning.effort",
            "max_tokens": "max_output_tokens",
        },
    )


def _tools(body: ResponsesRequest) -> ToolUse:
    specs = [
        tool_spec(
            tool.model_dump(exclude_unset=True, exclude={"type"}),
            tool.strict,
            f"tools[{i}].parameters",
        )
        for i, tool in enumerate(body.tools or ())
    ]
    choice, is_parallel = body.tool_choice, body.parallel_tool_calls
    if isinstance(choice, ChosenFunction):
        return tool_use(specs, name=choice.name, is_parallel=is_parallel)
    return tool_use(specs, choice, is_parallel=is_parallel)


def _structure(body: ResponsesRequest) -> Structure | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Structure("text.format", {"json_object": True})
    if form.schema_ is None:
        raise RequestError("text.format.schema: missing", "text.format.schema")
    return Structure("text.format", {"json_schema": form.schema_})


def _text(content: str | Sequence[ResponsePart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)
