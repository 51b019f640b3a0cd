"""Messages and tools as clients send them. What they become in a prompt is tools.py's to know."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field


class RequestModel(BaseModel):
    """No conversions, and no fields that are not here."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)


class Function(RequestModel):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(RequestModel):
    type: Literal["function"]
    function: Function


class FunctionName(RequestModel):
    name: str


class NamedTool(RequestModel):
    type: Literal["function"]
    function: FunctionName


class CalledFunction(RequestModel):
    name: str
    arguments: str


class ToolCall(RequestModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients send a streamed call back as it came


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # what our own answers hold, so that they can be sent back as they are
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    # what clients of several providers add to them, where it holds nothing
    reasoning: None = None
    reasoning_content: None = None
    provider_specific_fields: dict[str, None] | None = None  # litellm's
