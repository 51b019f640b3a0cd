"""HTTP statuses and OpenAI's error body; ERROR_OUTCOMES in errors.py is the table they come from.

The rule: an error of ours has the status of its class or of the nearest class above it; anything
else is a bug, and its 500 says nothing of what was inside.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from slotzero import errors
from slotzero.errors import (
    OverloadedError,
    RequestError,
    RequestRefusedError,
    SlotzeroError,
    outcome_of,
)

MAX_MESSAGE_LEN = 600


class FieldError(RequestError):
    """A request that is wrong in one field, which it names."""

    def __init__(self, param: str | None, message: str) -> None:
        super().__init__(message, param)


class Status(NamedTuple):
    code: int
    kind: str
    """OpenAI's `type`."""
    reason: str | None = None
    """OpenAI's `code`."""


INVALID = "invalid_request_error"
BUG = Status(*outcome_of(SlotzeroError)[1:])
HTTP: Mapping[int, Status] = {
    400: Status(400, INVALID),
    401: Status(401, INVALID, "invalid_api_key"),
    404: Status(404, INVALID, "not_found"),
    405: Status(405, INVALID, "method_not_allowed"),
    408: Status(408, INVALID, "receive_timeout"),
    413: Status(413, INVALID, "request_too_large"),
    503: Status(503, "service_unavailable_error", "too_many_connections"),
}
"""What is refused before it reaches a route."""
RETRY_SECONDS = 1  # where nobody knows better


def status_of(error: Exception) -> Status:
    kind: type = type(error)
    if isinstance(error, RequestRefusedError):
        kind = getattr(errors, error.error, SlotzeroError)
    return Status(*outcome_of(kind)[1:])


def error_body(status: Status, message: str, param: str | None = None) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE_LEN:
        message = f"{message[:MAX_MESSAGE_LEN]}..."
    return {
        "error": {"message": message, "type": status.kind, "param": param, "code": status.reason}
    }


def error_reply(error: Exception) -> tuple[Status, dict[str, Any]]:
    status = status_of(error)
    if status == BUG:
        return status, error_body(status, "the server failed; its log says where")
    param = error.param if isinstance(error, RequestError | RequestRefusedError) else None
    return status, error_body(status, str(error), param)


def retry_after(error: Exception) -> dict[str, str]:
    """The header that tells a client when to come again."""
    if status_of(error).code not in (429, 503):
        return {}
    seconds = error.retry_after if isinstance(error, OverloadedError) else RETRY_SECONDS
    return {"Retry-After": str(max(1, round(seconds)))}
