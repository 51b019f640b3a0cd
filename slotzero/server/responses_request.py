"""Requests of OpenAI's Responses API, and the conversation that one becomes.

This module knows neither the model nor stored responses: the messages of an earlier response are
given to it. The rule is that of protocol.py: a field works, or it is refused by name unless its
value requests what happens anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from slotzero.errors import RequestError
from slotzero.server.chat_messages import RequestModel
from slotzero.server.conversation import (
    Conversation,
    Structure,
    TemplateOptions,
    ToolSpec,
    ToolUse,
)
from slotzero.server.protocol import MAX_MESSAGES, MAX_TOOLS, Effort, refuse_values
from slotzero.server.tools import (
    check_choice,
    check_names,
    check_schema,
    joined_system,
    template_call,
    template_variables,
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
_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal")
_ITEMS = ("message", "function_call", "function_call_output", "reasoning")
_SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty",
)  # fmt: skip


class Part(RequestModel):
    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text", "refusal"]
    text: str = ""
    refusal: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


class MessageItem(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[Part]
    id: str | None = None
    status: str | None = None
    phase: str | None = None


class CallItem(RequestModel):
    type: Literal["function_call"]
    call_id: str
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    arguments: str
    id: str | None = None
    status: str | None = None


class ResultItem(RequestModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[Part]
    id: str | None = None
    status: str | None = None


class ReasoningItem(RequestModel):
    type: Literal["reasoning"]
    summary: list[Part] = Field(default_factory=list)
    content: list[Part] | None = None
    id: str | None = None
    status: str | None = None
    encrypted_content: str | None = None


def _kind(item: Any) -> str:
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind or "message"


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[ResultItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def _refuse_kinds(given: Any) -> Any:
    """Refuse items and parts of other types by name, before the union of all types fails."""
    for i, item in enumerate(given if isinstance(given, list) else ()):
        if not isinstance(item, dict):
            continue
        if _kind(item) not in _ITEMS:
            where = f"input[{i}].type"
            raise RequestError(f"{where}: {str(_kind(item))[:40]!r} is not supported", where)
        for name in ("content", "output"):
            parts = item.get(name)
            for j, part in enumerate(parts if isinstance(parts, list) else ()):
                kind = part.get("type") if isinstance(part, dict) else None
                if isinstance(kind, str) and kind not in _PARTS:
                    where = f"input[{i}].{name}[{j}].type"
                    what = f"{kind[:40]!r} is not supported, only text is"
                    raise RequestError(f"{where}: {what}", where)
    return given


class FunctionTool(RequestModel):
    type: Literal["function"]
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
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


class StreamOptions(RequestModel):
    include_obfuscation: Literal[False] | None = None


class ResponsesRequest(RequestModel):
    input: Annotated[
        str | Annotated[list[Item], Field(max_length=MAX_MESSAGES)], BeforeValidator(_refuse_kinds)
    ] = ""
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
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
    given = {name: value for name in _SAMPLING if (value := getattr(body, name)) is not None}
    return Conversation(
        messages=joined_system(system, messages),
        sampling=given | {"max_tokens": body.max_output_tokens},
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
    specs = []
    for i, tool in enumerate(body.tools or ()):
        check_schema(tool.parameters, f"tools[{i}].parameters")
        function = tool.model_dump(exclude_unset=True, exclude={"type"})
        shown = {"type": "function", "function": function}
        specs.append(ToolSpec(tool.name, tool.parameters, bool(tool.strict), shown))
    check_names([spec.name for spec in specs], "tools")
    is_parallel = body.parallel_tool_calls is not False
    if isinstance(body.tool_choice, ChosenFunction):
        check_choice(body.tool_choice.name, specs, "tool_choice")
        return ToolUse(specs, "named", body.tool_choice.name, is_parallel)
    return ToolUse(specs, body.tool_choice or "auto", "", is_parallel)


def _structure(body: ResponsesRequest) -> Structure | None:
    form = None if body.text is None else body.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return Structure("text.format", {"json_object": True})
    if form.schema_ is None:
        raise RequestError("text.format.schema: missing", "text.format.schema")
    return Structure("text.format", {"json_schema": form.schema_})


def _text(content: str | Sequence[Part]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text or part.refusal or "" for part in content)
