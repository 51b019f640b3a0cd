"""Replies in OpenAI's shapes. This module knows their fields, not where the values come from.

The rule: a field that was not set is not sent, and one that was set to None is sent as null.
"""

import base64
import json
import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError

from slotzero import __version__
from slotzero.server.messages import TokenExperts


class ReplyModel(BaseModel):
    def json_bytes(self) -> bytes:
        """Encode as JSON, in ASCII if a value quotes invalid Unicode."""
        try:
            return self.model_dump_json(exclude_unset=True).encode()
        except PydanticSerializationError:
            return json.dumps(self.model_dump(exclude_unset=True)).encode()


class ErrorDetail(ReplyModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(ReplyModel):
    error: ErrorDetail


class CachedTokens(ReplyModel):
    cached_tokens: int


class ReasoningTokens(ReplyModel):
    reasoning_tokens: int


class Usage(ReplyModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens | None = None  # of models that reason


class TopLogprob(ReplyModel):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(ReplyModel):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(ReplyModel):
    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptLogprob(ReplyModel):
    """One value in an entry of vLLM's `prompt_logprobs`, which is keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # null: the first token


class FunctionCall(ReplyModel):
    name: str | None = None
    arguments: str | None = None


class ToolCallReply(ReplyModel):
    index: int | None = None  # in chunks only
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Delta(ReplyModel):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    reasoning: str | None = None  # the same, under the name that newer clients read
    tool_calls: list[ToolCallReply] | None = None


class TokenIds(ReplyModel):
    """Fields of a choice beside OpenAI's."""

    token_ids: list[int] | None = None  # this and the next: with return_token_ids
    prompt_token_ids: list[int] | None = None
    weight_version: str | None = None
    """The version of the weights that computed its last token."""


class EncodedExperts(ReplyModel):
    """vLLM's `routed_experts`, as base64."""

    shape: list[int]
    dtype: str
    data: str

    @classmethod
    def of(cls, experts: TokenExperts) -> "EncodedExperts":
        data = base64.b64encode(experts.data).decode()
        return cls(shape=list(experts.shape), dtype="int16", data=data)


class ChatChoice(TokenIds):
    index: int
    message: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str
    routed_experts: EncodedExperts | None = None


class ChatChunkChoice(TokenIds):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionChoice(TokenIds):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: EncodedExperts | None = None


class Head(ReplyModel):
    """Fields that all replies to one request have in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatReply(Head):
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None  # with return_token_ids


class ChatChunk(Head):
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionReply(Head):
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(ReplyModel):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(ReplyModel):
    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(ReplyModel):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class Empty(ReplyModel):
    """A reply without fields."""


class Prompt(ReplyModel):
    prompt: str


class TokenizerInfo(ReplyModel):
    """Information besides /tokenize with which a client can render prompts itself."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


class Health(ReplyModel):
    status: str
    engines: list[str]
    """The state of each engine."""
    reason: str | None = None
    """Why the engine counts as unresponsive, if no engine is ready because of that."""
    progress: dict[str, Any] | None = None
    """Progress of loading: stage, done and total."""


class Version(ReplyModel):
    version: str


class ServerInfo(ReplyModel):
    version: str
    state: str
    failure: str | None
    """Why no engine is ready, if one is restarting or has failed for good."""
    engines: list[dict[str, Any]]
    """For each engine: state, failure, progress, pools."""
    config: dict[str, Any]
    runners: dict[str, Any]
    """The sizes of each runner, and how each size was recorded."""
    pools: dict[str, Any]
    certification: dict[str, Any]
    formats: dict[str, Any]
    """The formats of tool calls and reasoning, and whether Slotzero's own prompt shows tools."""
    engine: dict[str, Any]
    vllm_config: dict[str, Any]
    """The part of vLLM's configuration that trainers read."""


def head(prefix: str, kind: str, model: str, name: str | None = None) -> dict[str, Any]:
    """Return the fields of Head for one request. `name`: the client's own id."""
    return {
        "id": f"{prefix}-{name or uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"slotzero-{__version__}",
    }
