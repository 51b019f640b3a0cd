"""HTTP statuses and OpenAI's error body; ERROR_OUTCOMES in errors.py is the table they come from.

The timeout of an answer is 504, as this process is the engine's gateway; 408 is for a client that
is slow to send.

The rule: a SlotzeroError's status is that of its class or of the nearest base class in the table;
any other exception is a bug, and its 500 discloses nothing.
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


class HttpStatus(NamedTuple):
    code: int
    kind: str
    """OpenAI's `type`."""
    reason: str | None = None
    """OpenAI's `code`."""


INVALID = "invalid_request_error"
BUG = HttpStatus(*outcome_of(SlotzeroError)[1:])
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
    return HttpStatus(*outcome_of(kind)[1:])


def error_body(status: HttpStatus, message: str, param: str | None = None) -> dict[str, Any]:
    if len(message) > MAX_MESSAGE_LEN:
        message = f"{message[:MAX_MESSAGE_LEN]}..."
    return {
        "error": {"message": message, "type": status.kind, "param": param, "code": status.reason}
    }


def error_parts(error: Exception) -> tuple[HttpStatus, str, str | None]:
    """Return the status, the message and the wrong field of an error reply."""
    status = status_of(error)
    if status == BUG:
        return BUG, "internal error; the server's log has the details", None
    param = error.param if isinstance(error, RequestError | RequestRefusedError) else None
    return status, str(error), param


def retry_after(error: Exception) -> dict[str, str]:
    """Return the header that tells a client when to retry."""
    if status_of(error).code not in (429, 503):
        return {}
    seconds = error.retry_after if isinstance(error, OverloadedError) else RETRY_SECONDS
    return {"Retry-After": str(max(1, round(seconds)))}
