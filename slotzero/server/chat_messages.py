"""Messages and tools as clients of chat completions send them.

conversation.py has what becomes of them, and answer_plan.py how they are written into a prompt.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from slotzero.errors import RequestError


class RequestModel(BaseModel):
    """Base of all request models: no type conversions, and no unknown fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, frozen=True)

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Return those of these fields that are not None."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}


def check_types(parts: Any, allowed: Sequence[str], where: str) -> None:
    """Refuse a part of another type by its name, before a union of all types fails."""
    for i, part in enumerate(parts if isinstance(parts, list) else ()):
        if isinstance(part, dict) and part.get("type", allowed[0]) not in allowed:
            kind, field = str(part["type"])[:40], f"{where}[{i}].type"
            rule = f"only {', '.join(allowed)} {'is' if len(allowed) == 1 else 'are'}"
            raise RequestError(f"{field}: {kind!r} is not supported, {rule}", field)


ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class Function(RequestModel):
    name: ToolName
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
    parsed_arguments: Any = None  # openai's helpers add it: the arguments once more


class ToolCall(RequestModel):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = None  # some clients send a streamed call back unchanged


class TextPart(RequestModel):
    type: Literal["text"]
    text: str


def _check_provider_fields(fields: dict[str, Any]) -> dict[str, Any]:
    for name, value in fields.items():
        if value is not None and name not in ("reasoning", "reasoning_content"):
            raise ValueError(f"{name[:40]!r} is not supported")
    return fields


ProviderFields = Annotated[dict[str, Any], AfterValidator(_check_provider_fields)]
"""litellm's: empty, or once more the reasoning."""


class Message(RequestModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # fields of this server's answers, so that clients can send them back unchanged
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None  # the same, under another name
    parsed: Any = None  # openai's helpers add it: the content once more
    provider_specific_fields: ProviderFields | None = None
