"""What clients are told, in OpenAI's shapes. It knows fields, not where their values come from.

The rule: a field that was not set is not sent, and one that was set to None is sent as null.
"""

import time
import uuid
from typing import Any, Literal

from pydantic import BaseModel

from slotzero import __version__


class Told(BaseModel):
    def json_bytes(self) -> bytes:
        return self.model_dump_json(exclude_unset=True).encode()


class ErrorDetail(Told):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Told):
    error: ErrorDetail


class CachedTokens(Told):
    cached_tokens: int


class Usage(Told):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class TopLogprob(Told):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Told):
    content: list[TokenLogprob]
    refusal: None


class CompletionLogprobs(Told):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class FunctionCall(Told):
    name: str | None = None
    arguments: str | None = None


class ToolCallReply(Told):
    index: int | None = None  # in chunks only
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Delta(Told):
    role: Literal["assistant"] = "assistant"
    content: str | None = None
    refusal: None = None
    tool_calls: list[ToolCallReply] | None = None


class ChatChoice(Told):
    index: int
    message: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str


class ChatChunkChoice(Told):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class CompletionChoice(Told):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None


class Head(Told):
    """What every reply to one request repeats."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str


class ChatReply(Head):
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Head):
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class CompletionReply(Head):
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(Told):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int | None


class ModelList(Told):
    object: Literal["list"]
    data: list[ModelCard]


class Tokens(Told):
    count: int
    max_model_len: int | None
    tokens: list[int]


class Prompt(Told):
    prompt: str


class TokenizerInfo(Told):
    """What a client needs beside /tokenize to write prompts itself."""

    chat_template: str | None
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


class Health(Told):
    status: str
    engines: list[str]
    """The state of each."""
    reason: str | None = None
    """Why no engine is ready, if that is because one does not respond."""
    progress: dict[str, Any] | None = None
    """How far loading is: stage, done and total."""


class Version(Told):
    version: str


class ServerInfo(Told):
    version: str
    state: str
    failure: str | None
    """Why no engine is ready, if one is started again or will not be."""
    engines: list[dict[str, Any]]
    """Of each: state, failure, progress, pools."""
    config: dict[str, Any]
    runners: dict[str, Any]
    """The sizes of each, and how each was recorded."""
    pools: dict[str, Any]
    certification: dict[str, Any]
    engine: dict[str, Any]


def head(prefix: str, kind: str, model: str) -> dict[str, Any]:
    """The fields of Head, for one request."""
    return {
        "id": f"{prefix}-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": f"slotzero-{__version__}",
    }
