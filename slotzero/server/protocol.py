"""Request models: OpenAI's requests, and the fields that vLLM adds to them.

This module does not know the engine or the model. It has every field of OpenAI's. A field works, or
it is in NEUTRAL: accepted if its value requests what happens anyway, else refused by name. An
unknown field is refused too.
"""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from slotzero.errors import RequestError
from slotzero.sampling.params import MAX_LOGIT_BIAS
from slotzero.server.chat_messages import Message, NamedTool, RequestModel, Tool, check_types
from slotzero.text.chat_template import NOT_BOTH

MAX_ANSWERS = 128
MAX_MESSAGES = 2048  # this and the next are OpenAI's
MAX_TOOLS = 128
MAX_STOPS = 16
MAX_STOP_LEN = 256
MAX_BAD_WORDS = 64

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": (),
    "functions": (),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
_INSTEAD = {
    "functions": "send tools",
    "function_call": "send tool_choice",
    "best_of": "send n, and choose from the answers",
}


# fail_fast: a long list of another type would give an error for every item
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
Texts = Annotated[list[str], Field(fail_fast=True)]
Tokens = Annotated[list[int], Field(fail_fast=True)]


class JsonSchema(RequestModel):
    name: str
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(RequestModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructureFields(RequestModel):
    """Constraint on the answer: exactly one of these."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: counts so far, in every chunk
    include_obfuscation: Literal[False] | None = None


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LEN)]


def _check_stops(stop: str | list[str] | None) -> str | list[str] | None:
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS:
        raise RequestError(f"stop: {len(stops)} strings, at most {MAX_STOPS}", "stop")
    if any(not 1 <= len(text) <= MAX_STOP_LEN for text in stops):
        raise RequestError(f"stop: each string must have 1 to {MAX_STOP_LEN} characters", "stop")
    return stop


def _refuse_media(messages: Any) -> Any:
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            check_types(message.get("content"), ("text",), f"messages[{i}].content")
    return messages


Messages = Annotated[list[Message], Field(max_length=MAX_MESSAGES), BeforeValidator(_refuse_media)]


def _token_ids(bias: dict[str, float]) -> dict[str, float]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise RequestError(f"logit_bias: {key[:20]!r} is not a token id", "logit_bias")
    return bias


class GenerationFields(RequestModel):
    """Fields that chat completions and completions have in common."""

    model: str | None = None  # the server has one model
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    seed: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: (
        Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIAS), AfterValidator(_token_ids)]
        | None
    ) = None
    stop: Annotated[str | list[str] | None, AfterValidator(_check_stops)] = None
    max_tokens: int | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[str], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=1)] | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    request_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")] | None = None
    structured_outputs: StructureFields | None = None
    # its older names
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    priority: int | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _refuse(self) -> Self:
        all_answers = (*NEUTRAL["best_of"], self.n)  # all n answers are returned
        refuse_values(self, {**NEUTRAL, "best_of": all_answers})
        if self.prompt_logprobs is not None and self.stream:
            raise RequestError(
                "prompt_logprobs: not allowed with stream=true; leave out one of them",
                "prompt_logprobs",
            )
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options: allowed only with stream=true", "stream_options")
        return self


class ChatRequest(GenerationFields):
    messages: Annotated[Messages, Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    # no effect on the answer
    metadata: dict[str, str] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # vLLM's
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    documents: list[dict[str, Any]] | None = None
    include_reasoning: bool = True
    # NEUTRAL
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            raise RequestError(
                "max_tokens: differs from max_completion_tokens; send one", "max_tokens"
            )
        if self.top_logprobs is not None and not self.logprobs:
            raise RequestError("top_logprobs: allowed only with logprobs=true", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise RequestError("tool_choice: allowed only with tools", "tool_choice")
        _check_ending(self)
        return self


class CompletionRequest(GenerationFields):
    prompt: str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    # NEUTRAL
    best_of: Any = None
    suffix: Any = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise RequestError("max_tokens: 0 is allowed only with echo=true", "max_tokens")
        return self


class TokenizeRequest(RequestModel):
    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.prompt is None) == (not self.messages):
            raise RequestError("prompt: send either prompt or messages", "prompt")
        _check_ending(self)
        return self


class DetokenizeRequest(RequestModel):
    model: str | None = None
    tokens: Tokens


def refuse_values(body: RequestModel, neutral: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse every field of `neutral` that has another value than those that change nothing."""
    for name, allowed in neutral.items():
        value = getattr(body, name, None)
        if value is not None and not _is_one_of(value, allowed):
            raise RequestError(_refusal(name, allowed), name)


def _check_ending(body: ChatRequest | TokenizeRequest) -> None:
    if body.continue_final_message and body.add_generation_prompt:
        name = "continue_final_message"
        raise RequestError(f"{name}: {NOT_BOTH}", name)


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(one) and value == one for one in allowed)  # 0 is not False


def _refusal(name: str, allowed: tuple[Any, ...]) -> str:
    remedy = _INSTEAD.get(name) or "leave it out"
    if allowed and name not in _INSTEAD:
        remedy += f" or send {json.dumps(allowed[0])}"
    return f"{name}: not supported; {remedy}"
