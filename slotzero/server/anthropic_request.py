"""Requests of Anthropic's Messages API, and the conversation that one becomes.

This module does not know the model. The rule is that of protocol.py: a field works, or it is
refused by name unless its value requests what happens anyway.

`cache_control` has no effect, since every prefix is cached, and a `signature` of a thinking block
is not checked. A thinking budget is not enforced: max_tokens limits reasoning and answer together.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BeforeValidator, Field, model_validator

from slotzero.errors import RequestError
from slotzero.server.chat_messages import RequestModel, ToolName, check_types
from slotzero.server.conversation import ANY, Conversation, Structure, TemplateOptions, ToolUse
from slotzero.server.protocol import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, StopString, refuse_values
from slotzero.server.tools import (
    joined_system,
    template_call,
    tool_spec,
    tool_use,
    with_reasoning,
)

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": (),
    "inference_geo": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
}
BlockType = Literal["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str
    citations: None = None
    cache_control: dict[str, Any] | None = None


class ContentBlock(RequestModel):
    """A block of any type; which fields it has follows from the type."""

    type: BlockType
    text: str | None = None
    id: str | None = None
    name: ToolName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[TextBlock] | None = None
    is_error: bool | None = None
    thinking: str | None = None
    signature: str | None = None
    data: str | None = None
    citations: None = None
    caller: dict[str, Any] | None = None
    cache_control: dict[str, Any] | None = None


class TurnMessage(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(RequestModel):
    type: Literal["custom"] | None = None
    name: ToolName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = None
    eager_input_streaming: bool | None = None  # arguments are always streamed as they grow


class ToolChoice(RequestModel):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(RequestModel):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: Literal["summarized"] | None = None


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


def _check_system(given: Any) -> Any:
    check_types(given, ("text",), "system")
    return given


def _check_messages(given: Any) -> Any:
    for i, message in enumerate(given if isinstance(given, list) else ()):
        content = message.get("content") if isinstance(message, dict) else None
        check_types(content, get_args(BlockType), f"messages[{i}].content")
        for j, block in enumerate(content if isinstance(content, list) else ()):
            if isinstance(block, dict):  # a tool result has content of its own
                check_types(block.get("content"), ("text",), f"messages[{i}].content[{j}].content")
    return given


class CountRequest(RequestModel):
    """The fields that say what the prompt is."""

    model: str | None = None
    messages: Annotated[
        list[TurnMessage],
        Field(min_length=1, max_length=MAX_MESSAGES),
        BeforeValidator(_check_messages),
    ]
    system: Annotated[str | list[TextBlock] | None, BeforeValidator(_check_system)] = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    cache_control: dict[str, Any] | None = None
    # NEUTRAL
    container: Any = None
    context_management: Any = None
    inference_geo: Any = None
    mcp_servers: Any = None
    service_tier: Any = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        refuse_values(self, NEUTRAL)
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (
            self.tool_choice.name is not None
        ):
            raise RequestError("tool_choice.name: required with type tool", "tool_choice.name")
        return self


class MessagesRequest(CountRequest):
    max_tokens: Annotated[int, Field(ge=1)]
    metadata: dict[str, Any] | None = None  # no effect on the answer
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None


def messages_conversation(body: CountRequest) -> Conversation:
    given: dict[str, Any] = {}
    if isinstance(body, MessagesRequest):
        given = body.given(("max_tokens", "temperature", "top_k", "top_p"))
        if body.stop_sequences:
            given["stop"] = body.stop_sequences
    system = [] if body.system is None else [_text(body.system)]
    messages = [made for i, turn in enumerate(body.messages) for made in _messages(i, turn)]
    is_prefilled = messages[-1]["role"] == "assistant"
    return Conversation(
        messages=joined_system(system, messages),
        sampling=given,
        tools=_tools(body),
        template=TemplateOptions(
            effort=_effort(body),
            # the answer continues a last message of the assistant
            add_generation_prompt=not is_prefilled,
            continue_final_message=is_prefilled,
        ),
        structure=_structure(body),
        names={"stop": "stop_sequences", "effort": _effort_field(body)},
    )


def _effort(body: CountRequest) -> str | None:
    if body.thinking is not None and body.thinking.type == "disabled":
        return "none"
    effort = None if body.output_config is None else body.output_config.effort
    if effort is None:
        is_on = body.thinking is not None and body.thinking.type == "enabled"
        return ANY if is_on else None
    return {"max": "high", "xhigh": "high"}.get(effort, effort)


def _effort_field(body: CountRequest) -> str:
    has_effort = body.output_config is not None and body.output_config.effort is not None
    return "output_config.effort" if has_effort else "thinking"


def _structure(body: CountRequest) -> Structure | None:
    if body.output_config is not None and body.output_config.format is not None:
        schema = body.output_config.format.schema_
        return Structure("output_config.format", {"json_schema": schema})
    if body.output_format is not None:
        return Structure("output_format", {"json_schema": body.output_format.schema_})
    return None


def _tools(body: CountRequest) -> ToolUse:
    specs = []
    for i, tool in enumerate(body.tools or ()):
        function = tool.given(("name", "description")) | {"parameters": tool.input_schema}
        specs.append(tool_spec(function, tool.strict, f"tools[{i}].input_schema"))
    choice = body.tool_choice or ToolChoice(type="auto")
    return tool_use(
        specs,
        "required" if choice.type == "any" else choice.type,
        choice.name,
        is_parallel=not choice.disable_parallel_tool_use,
        name_field="tool_choice.name",
    )


def _messages(place: int, turn: TurnMessage) -> list[dict[str, Any]]:
    """Return a turn as messages for chat templates: every tool result is a message."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    texts, thought, calls, results = [], "", [], []
    for i, block in enumerate(turn.content):
        where = f"messages[{place}].content[{i}]"
        match block.type:
            case "text":
                texts.append(_needed(block.text, f"{where}.text"))
            case "thinking":
                thought += _needed(block.thinking, f"{where}.thinking")
            case "tool_use":
                call_id = _needed(block.id, f"{where}.id")
                name = _needed(block.name, f"{where}.name")
                calls.append(template_call(f"{where}.input", call_id, name, block.input or {}))
            case "tool_result":
                call_id = _needed(block.tool_use_id, f"{where}.tool_use_id")
                content = _text(block.content or "")
                if block.is_error:
                    content = f"Error: {content}"
                results.append({"role": "tool", "tool_call_id": call_id, "content": content})
    if (calls or thought) and turn.role != "assistant":
        where = f"messages[{place}].content"
        raise RequestError(f"{where}: only the assistant thinks and uses tools", where)
    if results and turn.role != "user":
        where = f"messages[{place}].content"
        raise RequestError(f"{where}: only the user has tool results", where)
    if results and not texts:
        return results
    made: dict[str, Any] = {"role": turn.role, "content": "\n".join(texts)}
    if calls:
        made["tool_calls"] = calls
    return [*results, with_reasoning(made, thought)]


def _needed(value: str | None, where: str) -> str:
    if value is None:
        raise RequestError(f"{where}: missing", where)
    return value


def _text(content: str | Sequence[TextBlock]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content)
