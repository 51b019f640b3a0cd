"""The settings of the HTTP front door. As in EngineConfig, the field is the flag.

It knows neither the engine nor HTTP, and imports nothing of theirs: `slotzero serve --help` is
fast.
"""

import ipaddress
from dataclasses import dataclass, fields
from typing import Any

from slotzero.errors import ConfigError

TOOL_CALL_PARSERS = ("auto", "hermes", "llama", "none")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    """Where to listen; 0.0.0.0 is every interface of this machine."""
    port: int = 8000
    """0 takes one that is free."""
    served_model_name: tuple[str, ...] = ()
    """Names under which requests find the model, in place of its own: one or more, of which the
    first is the one shown."""
    api_key: tuple[str, ...] = ()
    """A key that opens the server; may be given again. Without any, every request is served."""
    allowed_origins: tuple[str, ...] = ()
    """A web page's origin that may call from a browser (CORS); may be given again, * is all."""
    data_parallel_size: int = 1
    """Engines that serve side by side, each with the whole model and with devices of its own (for
    attention apart within one engine see enable_dp_attention)."""
    max_waiting: int = 512
    """Requests that may wait for their first token; any further one is answered with 429."""
    max_request_bytes: int = 4 << 20
    """Largest body of a request (suffixes K, M, G)."""
    max_connections: int | None = None
    """Connections that may be open. One more closes the longest idle one; while nearly all serve
    requests, a further request is answered with 503 (default: what `ulimit -n` allows)."""
    receive_timeout: float = 30.0
    """Seconds that a client may take to send the head of a request, and then its body; then it is
    answered with 408."""
    keep_alive_timeout: float = 75.0
    """Seconds that a connection may be idle between two requests before it is closed."""
    request_timeout: float | None = None
    """Seconds that an answer may take, waiting included; then it ends with error 504."""
    heartbeat_timeout: float = 30.0
    """Seconds without a sign of life from a ready engine's process until it counts as unresponsive:
    it gets no requests, and without another engine /health answers 503; 0 is no limit."""
    step_timeout: float = 300.0
    """Seconds that one step may take until its engine counts as unresponsive; 0 is no limit."""
    unresponsive_timeout: float = 60.0
    """Seconds that an engine may be unresponsive until its process is killed, which ends the
    requests in it, and started again; 0 is no limit."""
    grace: float = 30.0
    """Seconds that running requests have to finish when the server is asked to end."""
    tool_call_parser: str = "auto"
    """How the model writes tool calls; auto finds it in the chat template, none refuses tools."""
    log_requests: bool = False
    """Write prompts to the log; otherwise nothing that a user wrote is in it."""

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "allowed_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, ok, rule in (
            ("port", 0 <= self.port < 1 << 16, "is between 0 and 65535"),
            ("served_model_name", all(self.served_model_name), "is not empty"),
            ("api_key", all(map(_is_printable, self.api_key)), "is not empty, of visible ASCII"),
            (
                "data_parallel_size",
                isinstance(self.data_parallel_size, int) and self.data_parallel_size >= 1,
                "is a number of engines, at least 1",
            ),
            ("max_waiting", self.max_waiting >= 1, "is at least 1"),
            ("max_request_bytes", self.max_request_bytes >= 1, "is a size in bytes"),
            (
                "max_connections",
                self.max_connections is None or self.max_connections >= 2,
                "is at least 2",
            ),
            ("receive_timeout", self.receive_timeout > 0, "is more than 0 seconds"),
            ("keep_alive_timeout", self.keep_alive_timeout > 0, "is more than 0 seconds"),
            (
                "request_timeout",
                self.request_timeout is None or self.request_timeout > 0,
                "is more than 0 seconds",
            ),
            (
                "heartbeat_timeout",
                self.heartbeat_timeout == 0 or self.heartbeat_timeout >= 2,
                "is at least 2 seconds, or 0",
            ),
            ("step_timeout", self.step_timeout >= 0, "is at least 0 seconds"),
            ("unresponsive_timeout", self.unresponsive_timeout >= 0, "is at least 0 seconds"),
            ("grace", self.grace >= 0, "is at least 0 seconds"),
            (
                "tool_call_parser",
                self.tool_call_parser in TOOL_CALL_PARSERS,
                f"is one of {', '.join(TOOL_CALL_PARSERS)}",
            ),
        ):
            if not ok:
                shown = "..." if name == "api_key" else repr(getattr(self, name))
                raise ConfigError(f"{name} {rule}, got {shown}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def as_json(self) -> dict[str, Any]:
        """For those who ask the server; keys stay here."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return shown | {"api_key": len(self.api_key)}


def _is_printable(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key and bool(key)
