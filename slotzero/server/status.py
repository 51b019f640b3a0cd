"""From errors to HTTP replies: one table of statuses, and OpenAI's error body.

The timeout of an answer is 504, as this process is the engine's gateway; 408 is for a client that
is slow to send.

The rule: a SlotzeroError's status is that of its class or of the nearest base class in the table;
any other exception is a bug, and its 500 discloses nothing.
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
    """A request with one wrong field, which the error names."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message)
        self.param = param


class ContextError(FieldError):
    """A prompt that is longer than the context."""


class UnknownModelError(FieldError):
    """A model name that is not served."""


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
    errors.ConfigError: BUG,  # a server setting, which no request can correct
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
"""Statuses of requests that are refused before they reach a route."""
RETRY_SECONDS = 1  # default


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
        return status, error_body(status, "internal error; the server's log has the details")
    message = error.message if isinstance(error, RequestRefusedError) else str(error)
    return status, error_body(status, message, param_of(error, message))


def retry_after(error: Exception) -> dict[str, str]:
    """Return the header that tells a client when to retry."""
    if status_of(error).code not in (429, 503):
        return {}
    seconds = error.retry_after if isinstance(error, OverloadedError) else RETRY_SECONDS
    return {"Retry-After": str(max(1, round(seconds)))}


def param_of(error: Exception, message: str) -> str | None:
    """Return the wrong field: that of a FieldError, or the name that the message begins with."""
    if isinstance(error, FieldError):
        return error.param
    found = re.match(r"(?:the )?([a-z_]+)\b", message)
    return found[1] if found and found[1] in _NAMED else None
