"""The shapes in which the APIs send events and errors: OpenAI's, Anthropic's and Ollama's.

This module knows the shapes, not what is sent. The rule: every error has the shape of the API of
its path, whichever part of the server refuses the request.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from slotzero.server.status import HttpStatus, error_body

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


@final
@dataclass(frozen=True)
class WireFormat:
    """How one API writes events and errors."""

    media_type: str
    written: Callable[[bytes, str], bytes]
    """Writes an event of a stream, from its data and its name."""
    error: Callable[[HttpStatus, str, str | None], dict[str, Any]]
    """Makes the body of an error, from its status, message and field."""
    done: bytes = b""
    """What ends a stream."""
    has_numbers: bool = False
    """Whether every event of a stream has its number."""

    def event(self, data: bytes, name: str = "") -> bytes:
        """Return one event of a stream."""
        return self.written(data, name)

    def stream_error(
        self, status: HttpStatus, message: str, param: str | None, num_sent: int
    ) -> bytes:
        """Return the event of an error within a stream, after `num_sent` events."""
        body = self.error(status, message, param)
        if self.has_numbers:
            body["sequence_number"] = num_sent
        return self.event(json_bytes(body), "error")


def _data_event(data: bytes, name: str) -> bytes:
    return b"data: " + data + b"\n\n"


def _named_event(data: bytes, name: str) -> bytes:
    return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"


def _line(data: bytes, name: str) -> bytes:
    return data + b"\n"


def _responses_error(status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
    inner = error_body(status, message, param)["error"]
    code = inner["code"] or inner["type"]
    return {"type": "error", "code": code, "message": inner["message"], "param": param}


def _anthropic_error(status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
    text = error_body(status, message, param)["error"]["message"]
    kind = _ANTHROPIC_KINDS.get(status.code, "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def _ollama_error(status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
    return {"error": error_body(status, message, param)["error"]["message"]}


_EVENTS = "text/event-stream"
OPENAI = WireFormat(_EVENTS, _data_event, error_body, done=b"data: [DONE]\n\n")
RESPONSES = WireFormat(_EVENTS, _named_event, _responses_error, has_numbers=True)
"""The streams of OpenAI's Responses; whole replies of its routes have the shape OPENAI."""
ANTHROPIC = WireFormat(_EVENTS, _named_event, _anthropic_error)
OLLAMA = WireFormat("application/x-ndjson", _line, _ollama_error)


def shape_of(path: str) -> WireFormat:
    """Return the shape of the API to which a path belongs."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ANTHROPIC
    return OLLAMA if path.startswith("/api/") else OPENAI


def json_bytes(body: Any) -> bytes:
    """Encode as ASCII JSON, since a message may quote invalid Unicode."""
    return json.dumps(body).encode()
