"""From errors to what HTTP says of them: one table, and OpenAI's error body.

    408 is for a client that is slow to send. Here the engine was slow to answer, and this process
    is its gateway: 504.

The rule: an error of ours has its status by its class or the nearest class above it; anything else
is a bug, and its 500 says nothing of what was inside.
"""

import re
from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from slotzero import errors
from slotzero.errors import (
    EngineDiedError,
    EngineUnavailableError,
    OverloadedError,
    RequestError,
    RequestRefusedError,
    SlotzeroError,
)
from slotzero.sampling.params import SamplingParams

MAX_MESSAGE_LEN = 600
_NAMED = {"prompt", "structured_outputs"} | {field.name for field in fields(SamplingParams)}


class FieldError(RequestError):
    """A request that is wrong in one field, which it names."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextError(FieldError):
    """A prompt that is longer than the context."""


class UnknownModelError(FieldError):
    """A name that is not served."""


class DeadlineError(SlotzeroError):
    """The answer took longer than --request-timeout."""


class HttpStatus(NamedTuple):
    code: int
    kind: str
    """OpenAI's `type`."""
    reason: str | None = None
    """OpenAI's `code`."""


INVALID = "invalid_request_error"
BUG = HttpStatus(500, "internal_error", "internal_error")
TABLE: Mapping[type[SlotzeroError], HttpStatus] = {
    SlotzeroError: BUG,
    errors.InvalidInputError: HttpStatus(400, INVALID),
    RequestError: HttpStatus(400, INVALID),
    ContextError: HttpStatus(400, INVALID, "context_length_exceeded"),
    UnknownModelError: HttpStatus(404, INVALID, "model_not_found"),
    errors.ConfigError: BUG,  # a setting of ours, which no request can mend
    errors.ModelError: BUG,
    errors.TokenizerMissingError: HttpStatus(400, INVALID),
    errors.CapacityError: HttpStatus(503, "service_unavailable_error", "capacity"),
    errors.ContractError: BUG,
    errors.RecordingError: BUG,
    errors.PoolError: BUG,
    OverloadedError: HttpStatus(429, "rate_limit_error", "rate_limit_exceeded"),
    EngineUnavailableError: HttpStatus(503, "service_unavailable_error", "engine_unavailable"),
    EngineDiedError: HttpStatus(503, "service_unavailable_error", "engine_died"),
    DeadlineError: HttpStatus(504, "timeout_error", "request_timeout"),
}
HTTP: Mapping[int, HttpStatus] = {
    400: HttpStatus(400, INVALID),
    401: HttpStatus(401, INVALID, "invalid_api_key"),
    404: HttpStatus(404, INVALID, "not_found"),
    405: HttpStatus(405, INVALID, "method_not_allowed"),
    408: HttpStatus(408, INVALID, "receive_timeout"),
    413: HttpStatus(413, INVALID, "request_too_large"),
    503: HttpStatus(503, "service_unavailable_error", "too_many_connections"),
}
"""What is refused before it reaches a route."""
RETRY_SECONDS = 1  # where nobody knows better


def status_of(error: Exception) -> HttpStatus:
    kind: type = type(error)
    if isinstance(error, RequestRefusedError):
        kind = getattr(errors, error.error, SlotzeroError)
    return next((TABLE[base] for base in kind.__mro__ if base in TABLE), BUG)


def error_body(status: HttpStatus, message: str, param: str | None = None) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE_LEN:
        message = f"{message[:MAX_MESSAGE_LEN]}..."
    return {
        "error": {"message": message, "type": status.kind, "param": param, "code": status.reason}
    }


def error_reply(error: Exception) -> tuple[HttpStatus, dict[str, Any]]:
    status = status_of(error)
    if status is BUG:
        return status, error_body(status, "the server failed; its log says where")
    message = error.message if isinstance(error, RequestRefusedError) else str(error)
    return status, error_body(status, message, param_of(error, message))


def retry_after(error: Exception) -> dict[str, str]:
    """The header that tells a client when to come again."""
    if status_of(error).code not in (429, 503):
        return {}
    seconds = error.retry_after if isinstance(error, OverloadedError) else RETRY_SECONDS
    return {"Retry-After": str(max(1, round(seconds)))}


def param_of(error: Exception, message: str) -> str | None:
    """The field that is wrong: known, or the name that a message of ours begins with."""
    if isinstance(error, FieldError):
        return error.param
    found = re.match(r"(?:the )?([a-z_]+)\b", message)
    return found[1] if found and found[1] in _NAMED else None
