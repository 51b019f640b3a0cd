"""Requests of Ollama's chat and generate routes, and the conversation that one becomes.

This module does not know the model. `keep_alive` and the options that size a model have no effect:
the server has one model, which stays loaded.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from slotzero.errors import RequestError
from slotzero.server.chat_messages import RequestModel, Tool
from slotzero.server.conversation import ANY, Conversation, Structure, TemplateOptions
from slotzero.server.protocol import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS, StopString
from slotzero.server.tools import function_tools, joined_system, template_call, with_reasoning

_OPTIONS: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "seed": "seed",
    "stop": "stop",
    "repeat_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
}


class Options(RequestModel):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    num_predict: int | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    # no effect
    num_ctx: int | None = None
    num_batch: int | None = None
    num_gpu: int | None = None
    num_thread: int | None = None
    num_keep: int | None = None
    use_mmap: bool | None = None


class OllamaFunction(RequestModel):
    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: int | None = None


class OllamaCall(RequestModel):
    function: OllamaFunction
    id: str | None = None


class OllamaMessage(RequestModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    thinking: str | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Annotated[list[Any], Field(max_length=0)] | None = None


class _Fields(RequestModel):
    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Literal["low", "medium", "high"] | None = None
    keep_alive: int | float | str | None = None


class OllamaChatRequest(_Fields):
    messages: Annotated[list[OllamaMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None


class OllamaGenerateRequest(_Fields):
    prompt: str
    system: str | None = None


def ollama_conversation(body: OllamaChatRequest | OllamaGenerateRequest) -> Conversation:
    if isinstance(body, OllamaChatRequest):
        messages = [_message(i, message) for i, message in enumerate(body.messages)]
        tools, field = body.tools, "messages"
    else:
        messages = [{"role": "user", "content": body.prompt}]
        if body.system is not None:
            messages.insert(0, {"role": "system", "content": body.system})
        tools, field = None, "prompt"
    return Conversation(
        messages=joined_system([], messages),
        sampling=_sampling(body.options or Options()),
        tools=function_tools(tools),
        template=TemplateOptions(effort=_effort(body.think)),
        structure=_structure(body.format),
        names={
            "messages": field,
            "effort": "think",
            "max_tokens": "options.num_predict",
            **{ours: f"options.{theirs}" for theirs, ours in _OPTIONS.items()},
        },
    )


def _message(place: int, message: OllamaMessage) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        made["tool_calls"] = [
            template_call(
                f"messages[{place}].tool_calls[{i}]",
                call.id or f"call_{place}_{i}",
                call.function.name,
                call.function.arguments,
            )
            for i, call in enumerate(message.tool_calls)
        ]
    if message.role == "tool":
        made["tool_call_id"] = message.tool_call_id or f"call_{place}"
        made["name"] = message.tool_name or "tool"
    return with_reasoning(made, message.thinking)


def _sampling(options: Options) -> dict[str, Any]:
    given = {_OPTIONS[name]: value for name, value in options.given(_OPTIONS).items()}
    limit = options.num_predict
    return given | {"max_tokens": None if limit is None or limit < 0 else limit}


def _effort(think: bool | str | None) -> str | None:
    if isinstance(think, bool):
        return ANY if think else "none"
    return think


def _structure(form: str | dict[str, Any] | None) -> Structure | None:
    if isinstance(form, dict):
        return Structure("format", {"json_schema": form})
    if form == "json":
        return Structure("format", {"json_object": True})
    if form:
        raise RequestError('format: must be "json" or a JSON schema', "format")
    return None
