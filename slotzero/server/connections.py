"""Open connections of the HTTP server: a time limit for each, and a limit to their number.

`Connection` stands between a socket and uvicorn's protocol, which parses HTTP, and does not look
inside. `Tracked`, around the application, tells it when a request begins and ends, through the
state of the request's scope. Connections that are idle, or never send the whole head of a request,
are closed here; GateMiddleware ends those that never send the whole body.

The rules: a connection that serves a request is never closed by a limit. When more than `limit` are
open, the connection that has been idle longest is closed. Requests are refused before they occupy
all `limit` connections, so that a refused client still gets a connection, and a reply saying why.
"""

import asyncio
import json
import logging
import resource
from collections.abc import Callable, Mapping
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from slotzero.server.settings import ServerSettings
from slotzero.server.status import HTTP, error_body

STATE = "slotzero_connection"  # key in a scope's state
MAX_BURST = 128  # connections accepted at once, before any of them is counted
_RESERVED_FILES = 40  # engines, pipes, files of the page, and what libraries open
_BODY = json.dumps(error_body(HTTP[408], "the head of the request did not arrive in time")).encode()
_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_BODY), _BODY)
)
_log = logging.getLogger("slotzero.server.connections")


def default_limits() -> tuple[int, int]:
    """Return how many connections the limit of open files (`ulimit -n`) allows, and how many more
    may be accepted at once: asyncio accepts a burst before its first connection is counted."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files == resource.RLIM_INFINITY:
        num_files = 1 << 20
    available = max(8, num_files - _RESERVED_FILES)
    burst = min(MAX_BURST, available // 4)
    return available - 2 * burst, burst  # a second burst may come before the first is closed


class Tracked:
    """An ASGI application whose connections know when they serve a request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection | None = scope.get("state", {}).get(STATE)
        if connection is None or scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        connection.begin()
        try:
            await self._app(scope, receive, send)
        finally:
            connection.end()


class Connections:
    """All open connections."""

    def __init__(self, limit: int, settings: ServerSettings) -> None:
        self.limit = limit
        self.receive_timeout = settings.receive_timeout
        self.keep_alive_timeout = settings.keep_alive_timeout
        self._idle: dict[Connection, None] = {}  # the longest idle first
        self._busy: set[Connection] = set()

    @property
    def num_open(self) -> int:
        return len(self._idle) + len(self._busy)

    @property
    def is_full(self) -> bool:
        """Whether too many connections serve a request."""
        return len(self._busy) > self.limit - max(1, self.limit // 8)

    def protocol(self, make_inner: Callable[..., asyncio.Protocol]) -> Callable[..., "Connection"]:
        """Return a protocol class for uvicorn that wraps one of uvicorn's."""

        def make(*, app_state: Mapping[str, Any], **options: Any) -> Connection:
            connection = Connection(self)
            connection.inner = make_inner(app_state={**app_state, STATE: connection}, **options)
            return connection

        return make

    def is_idle(self, connection: "Connection") -> bool:
        return connection in self._idle

    def opened(self, connection: "Connection") -> None:
        self._idle[connection] = None
        if self.num_open > self.limit:
            _log.warning(
                "%d connections are open, the limit: closing the one that is idle longest "
                "(raise --max-connections or ulimit -n)",
                self.limit,
            )
            next(iter(self._idle)).abort()

    def began(self, connection: "Connection") -> None:
        """Note that a connection serves a request."""
        self.closed(connection)
        self._busy.add(connection)

    def ended(self, connection: "Connection") -> None:
        """Note that a connection no longer serves a request."""
        if connection in self._busy:
            self._busy.discard(connection)
            self._idle[connection] = None

    def closed(self, connection: "Connection") -> None:
        self._busy.discard(connection)
        self._idle.pop(connection, None)


class Connection(asyncio.Protocol):
    inner: asyncio.Protocol

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_begun = False  # to send the head of a request
        self._num_requests = 0  # being served: a pipelined one begins before the previous call ends

    # The application

    def begin(self) -> None:
        """Note that the head of a request has been read."""
        self._num_requests += 1
        self._set_timer(None)
        self._connections.began(self)

    def end(self) -> None:
        """Note that the answer to one request was sent; without others the connection is idle."""
        self._num_requests -= 1
        if self._num_requests > 0:
            return
        self._connections.ended(self)
        self._has_begun = False
        self._set_timer(self._connections.keep_alive_timeout)

    def abort(self) -> None:
        self._connections.closed(self)
        if self._transport is not None:
            self._transport.abort()

    # The transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.inner.connection_made(transport)
        self._set_timer(self._connections.receive_timeout)
        self._connections.opened(self)

    def data_received(self, data: bytes) -> None:
        if not self._has_begun and self._connections.is_idle(self):
            self._has_begun = True
            self._set_timer(self._connections.receive_timeout)
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        return self.inner.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self._set_timer(None)
        self._transport = None
        self._connections.closed(self)
        self.inner.connection_lost(error)

    def pause_writing(self) -> None:
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        self.inner.resume_writing()

    def _set_timer(self, seconds: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if seconds is not None and self._transport is not None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        self._timer = None
        if self._transport is not None and not self._transport.is_closing():
            if self._has_begun:
                self._transport.write(_TOO_SLOW)
            self._transport.close()
