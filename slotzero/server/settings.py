"""The settings of the HTTP server. As in EngineConfig, each field is a flag.

This module knows neither the engine nor HTTP and imports nothing of them, only the names of
formats, so that `slotzero serve --help` is fast.
"""

import ipaddress
from dataclasses import dataclass, fields
from typing import Any

from slotzero.errors import ConfigError
from slotzero.formats.reasoning import REASONING_NAMES
from slotzero.formats.tool_formats import TOOL_FORMAT_NAMES

TOOL_CALL_PARSERS = ("auto", *TOOL_FORMAT_NAMES, "none")
REASONING_PARSERS = ("auto", *REASONING_NAMES, "none")


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 means every interface of this machine."""
    port: int = 8000
    """Port to listen on; 0 chooses a free one."""
    served_model_name: tuple[str, ...] = ()
    """One or more names of the model in the API, in place of its own; replies show the first."""
    api_key: tuple[str, ...] = ()
    """API key that clients must send; may be repeated. Without any, every request is accepted."""
    enable_admin: bool = False
    """Enable the routes that pause generation and replace weights, for trainers. They require a key
    unless the server listens on a loopback address only."""
    admin_api_key: tuple[str, ...] = ()
    """API key for these routes, instead of --api-key; may be repeated. All other routes accept it
    too."""
    allowed_origins: tuple[str, ...] = ()
    """Origin of web pages that may call the server from a browser (CORS); may be repeated, * allows
    all."""
    data_parallel_size: int = 1
    """Number of engines that serve in parallel, each with the whole model and its own devices (for
    DP attention within one engine see enable_dp_attention)."""
    max_waiting: int = 512
    """Maximum number of requests that wait for their first token; further ones get status 429."""
    max_request_bytes: int = 4 << 20
    """Largest request body in bytes (suffixes K, M, G)."""
    max_connections: int | None = None
    """Maximum number of open connections. One more closes the connection that has been idle
    longest; while nearly all serve requests, further requests get status 503 (default: what
    `ulimit -n` allows)."""
    receive_timeout: float = 30.0
    """Seconds for a client to send the headers of a request, and again for its body; after that it
    gets status 408."""
    keep_alive_timeout: float = 75.0
    """Seconds that a connection may be idle between two requests before it is closed."""
    request_timeout: float | None = None
    """Seconds that an answer may take, including the time in the queue; after that it ends with
    error 504 (default: no limit)."""
    heartbeat_timeout: float = 30.0
    """Seconds without a heartbeat after which a ready engine counts as unresponsive: it gets no
    requests, and if no other engine is ready /health answers 503; 0 means no limit."""
    unresponsive_timeout: float = 60.0
    """Seconds after which the process of an unresponsive engine is killed and restarted, which ends
    its requests; 0 means no limit."""
    grace: float = 30.0
    """Seconds that running requests have to finish when the server shuts down."""
    tool_call_parser: str = "auto"
    """Format of the model's tool calls; auto derives it from the chat template, none refuses
    tools. If the template does not show tools, Slotzero's own prompt does, in this format (auto:
    hermes)."""
    reasoning_parser: str = "auto"
    """Format of the model's reasoning; auto derives it from the chat template, none leaves it in
    the text."""
    trust_request_chat_template: bool = False
    """Accept the field chat_template of requests: templates are programs, run in a sandbox."""
    response_store: str | None = None
    """SQLite file that keeps the responses of /v1/responses (default: in memory)."""
    max_stored_responses: int = 1000
    """Most responses of /v1/responses that are kept, so that later ones can continue them; the
    oldest are dropped. 0 stores none."""
    log_requests: bool = False
    """Write prompts to the log; without it the log contains nothing that users wrote."""

    def __post_init__(self) -> None:
        for name in ("served_model_name", "api_key", "admin_api_key", "allowed_origins"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, ok, rule in (
            ("port", 0 <= self.port < 1 << 16, "must be between 0 and 65535"),
            ("served_model_name", all(self.served_model_name), "must not be empty"),
            (
                "api_key",
                all(map(_is_printable, self.api_key)),
                "must be visible ASCII characters, at least one",
            ),
            (
                "admin_api_key",
                all(map(_is_printable, self.admin_api_key)),
                "must be visible ASCII characters, at least one",
            ),
            (
                "admin_api_key",
                self.enable_admin or not self.admin_api_key,
                "has no effect without enable_admin",
            ),
            (
                "enable_admin",
                not self.enable_admin or self.is_local or self.admin_api_key or self.api_key,
                f"needs admin_api_key or api_key, as others can reach {self.host}",
            ),
            (
                "data_parallel_size",
                isinstance(self.data_parallel_size, int) and self.data_parallel_size >= 1,
                "must be a number of engines, at least 1",
            ),
            ("max_waiting", self.max_waiting >= 1, "must be at least 1"),
            ("max_request_bytes", self.max_request_bytes >= 1, "must be at least 1 byte"),
            (
                "max_connections",
                self.max_connections is None or self.max_connections >= 2,
                "must be at least 2",
            ),
            ("receive_timeout", self.receive_timeout > 0, "must be more than 0 seconds"),
            ("keep_alive_timeout", self.keep_alive_timeout > 0, "must be more than 0 seconds"),
            (
                "request_timeout",
                self.request_timeout is None or self.request_timeout > 0,
                "must be more than 0 seconds",
            ),
            (
                "heartbeat_timeout",
                self.heartbeat_timeout == 0 or self.heartbeat_timeout >= 2,
                "must be at least 2 seconds, or 0",
            ),
            ("unresponsive_timeout", self.unresponsive_timeout >= 0, "must be at least 0 seconds"),
            ("max_stored_responses", self.max_stored_responses >= 0, "must be at least 0"),
            ("grace", self.grace >= 0, "must be at least 0 seconds"),
            (
                "tool_call_parser",
                self.tool_call_parser in TOOL_CALL_PARSERS,
                f"must be one of {', '.join(TOOL_CALL_PARSERS)}",
            ),
            (
                "reasoning_parser",
                self.reasoning_parser in REASONING_PARSERS,
                f"must be one of {', '.join(REASONING_PARSERS)}",
            ),
        ):
            if not ok:
                shown = "..." if "api_key" in name else repr(getattr(self, name))
                raise ConfigError(f"{name} {rule}, got {shown}")

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the server."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def as_json(self) -> dict[str, Any]:
        """Return the settings for /server_info, with only the numbers of API keys."""
        shown = {field.name: getattr(self, field.name) for field in fields(self)}
        return shown | {"api_key": len(self.api_key), "admin_api_key": len(self.admin_api_key)}


def _is_printable(key: str) -> bool:
    return key.isascii() and key.isprintable() and " " not in key and bool(key)
