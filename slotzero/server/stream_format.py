"""The shapes in which the APIs send events and errors: OpenAI's, Anthropic's and Ollama's.

This module knows the shapes, not what is sent. The rule: every error has the shape of the API of
its path, whichever part of the server refuses the request.
"""

import json
from abc import ABC, abstractmethod
from typing import Any, final

from slotzero.server.status import HttpStatus, error_body

_ANTHROPIC_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class Shape(ABC):
    """How one API writes events and errors."""

    media_type: str
    done: bytes
    """What ends a stream."""

    @abstractmethod
    def event(self, data: bytes, name: str = "") -> bytes:
        """Return one event of a stream."""

    @abstractmethod
    def error(self, status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
        """Return the body of an error reply."""

    @abstractmethod
    def stream_error(self, status: HttpStatus, message: str, param: str | None) -> bytes:
        """Return the event of an error within a stream."""


@final
class OpenAiShape(Shape):
    media_type = "text/event-stream"
    done = b"data: [DONE]\n\n"

    def event(self, data: bytes, name: str = "") -> bytes:
        return b"data: " + data + b"\n\n"

    def error(self, status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
        return error_body(status, message, param)

    def stream_error(self, status: HttpStatus, message: str, param: str | None) -> bytes:
        return self.event(json_bytes(self.error(status, message, param)))


@final
class NamedEvents(Shape):
    """OpenAI's Responses: named events, and the same errors as all of OpenAI's routes."""

    media_type = "text/event-stream"
    done = b""

    def event(self, data: bytes, name: str = "") -> bytes:
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def error(self, status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
        return error_body(status, message, param)

    def stream_error(self, status: HttpStatus, message: str, param: str | None) -> bytes:
        inner = self.error(status, message, param)["error"]
        body = {
            "type": "error",
            "code": inner["code"] or inner["type"],
            "message": inner["message"],
            "param": param,
            "sequence_number": 0,
        }
        return self.event(json_bytes(body), "error")


@final
class AnthropicShape(Shape):
    media_type = "text/event-stream"
    done = b""

    def event(self, data: bytes, name: str = "") -> bytes:
        return b"event: " + name.encode() + b"\ndata: " + data + b"\n\n"

    def error(self, status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
        text = error_body(status, message, param)["error"]["message"]
        kind = _ANTHROPIC_KINDS.get(status.code, "api_error")
        if status.code in (405, 408):
            kind = "invalid_request_error"
        return {"type": "error", "error": {"type": kind, "message": text}}

    def stream_error(self, status: HttpStatus, message: str, param: str | None) -> bytes:
        return self.event(json_bytes(self.error(status, message, param)), "error")


@final
class OllamaShape(Shape):
    media_type = "application/x-ndjson"
    done = b""

    def event(self, data: bytes, name: str = "") -> bytes:
        return data + b"\n"

    def error(self, status: HttpStatus, message: str, param: str | None) -> dict[str, Any]:
        return {"error": error_body(status, message, param)["error"]["message"]}

    def stream_error(self, status: HttpStatus, message: str, param: str | None) -> bytes:
        return self.event(json_bytes(self.error(status, message, param)))


OPENAI, RESPONSES, ANTHROPIC, OLLAMA = (
    OpenAiShape(),
    NamedEvents(),
    AnthropicShape(),
    OllamaShape(),
)


def shape_of(path: str) -> Shape:
    """Return the shape of the API to which a path belongs."""
    if path == "/v1/messages" or path.startswith("/v1/messages/"):
        return ANTHROPIC
    return OLLAMA if path.startswith("/api/") else OPENAI


def json_bytes(body: Any) -> bytes:
    """Encode as ASCII JSON, since a message may quote invalid Unicode."""
    return json.dumps(body).encode()
