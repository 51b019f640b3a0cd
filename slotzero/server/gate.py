"""Middleware for every request: request id, connection limit, API key, body size and timeout, and
one log line.

It is plain ASGI and knows no routes. The rules: a client's request id is used only if it is
harmless in logs and headers; keys are compared in constant time; nothing that a user wrote is
logged; an error has the shape of the path's API; the traceback of an unexpected one is logged.
"""

import asyncio
import base64
import binascii
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slotzero.server.connections import Connections
from slotzero.server.events import ClientGone
from slotzero.server.settings import ServerSettings
from slotzero.server.status import BUG, HTTP, RETRY_SECONDS, HttpStatus
from slotzero.server.stream_format import json_bytes, shape_of

log = logging.getLogger("slotzero.server")
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
OPEN_PATHS = (
    "/",
    "/favicon.ico",
    "/health",
    "/ping",
)  # public; probes send no key
WATCHED_PATHS = ("/health", "/ping", "/metrics")  # answered even at the connection limit
CLIENT_GONE = 499  # as nginx logs it; never sent
MAX_DISCARD = 64 << 20  # a refused body is read up to here, so that the client reads the reply


class GateMiddleware:
    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        refused: Callable[[int], None],
        connections: Connections,
        is_closing: Callable[[], bool],
        admin_paths: Collection[str] = (),
    ) -> None:
        """`refused` is called with the status of every refused request. While `is_closing`, clients
        are asked to close their connections. `admin_paths` are paths for administrators."""
        self._app = app
        self._refused = refused
        self._connections = connections
        self._is_closing = is_closing
        self._max_bytes = settings.max_request_bytes
        self._receive_timeout = settings.receive_timeout
        self._admin_paths = frozenset(admin_paths)
        keys, admin_keys = (
            [_digest(key) for key in given] for given in (settings.api_key, settings.admin_api_key)
        )
        self._keys = keys and keys + admin_keys
        self._admin_keys = admin_keys or keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        passage = RequestScope(scope, send, self._refused, self._is_closing)
        try:
            await self._pass(scope, self._in_time(receive), passage)
        except ClientGone:
            passage.status = CLIENT_GONE
        except HTTPException as error:  # the body of a refused request did not arrive
            await passage.refuse(HTTP[error.status_code], error.detail, error.headers)
        except Exception:
            log.exception("request %s failed", passage.request_id)
            if passage.status == 0:
                await passage.refuse(BUG, "internal error; the server's log has the details")
        finally:
            passage.log()

    async def _pass(self, scope: Scope, receive: Receive, passage: "RequestScope") -> None:
        headers = Headers(scope=scope)
        if self._connections.is_full and scope["path"] not in WATCHED_PATHS:
            await _discard(receive, self._max_bytes)
            full = f"all {self._connections.limit} connections are in use: try again later"
            closing = {"Retry-After": str(RETRY_SECONDS), "Connection": "close"}
            await passage.refuse(HTTP[503], full, closing)
            return
        if scope["path"] not in OPEN_PATHS and (why := self._locked(scope, headers)):
            await _discard(receive, self._max_bytes)
            await passage.refuse(HTTP[401], why, {"WWW-Authenticate": "Bearer"})
            return
        length = headers.get("content-length", "0")
        if length.isascii() and length.isdigit() and int(length[:20]) > self._max_bytes:
            await _discard(receive, MAX_DISCARD if int(length[:20]) <= MAX_DISCARD else 0)
            await passage.refuse(HTTP[413], self._too_large, {"Connection": "close"})
            return
        await self._app(scope, self._limited(receive), passage.send)

    @property
    def _too_large(self) -> str:
        return f"the request body is larger than {self._max_bytes} bytes"

    def _locked(self, scope: Scope, headers: Headers) -> str | None:
        """Return why the API key is not accepted, or None."""
        is_admin = scope["path"] in self._admin_paths
        keys = self._admin_keys if is_admin else self._keys
        if not keys:
            # a page in a browser on this machine; images of a page have no origin
            if is_admin and (
                "origin" in headers or headers.get("sec-fetch-site", "none") != "none"
            ):
                return "web pages cannot use this route without --admin-api-key"
            return None
        key = _key(headers)
        if not key:
            return "no API key: send the header Authorization: Bearer KEY (or X-Api-Key: KEY)"
        digest = _digest(key.strip())
        matches = [hmac.compare_digest(digest, known) for known in keys]  # always all of them
        return None if any(matches) else f"invalid {'admin ' * is_admin}API key"

    def _in_time(self, receive: Receive) -> Receive:
        """Limit the time until the whole body has arrived; after that only the disconnect can
        follow."""
        until: float | None = time.monotonic() + self._receive_timeout

        async def in_time() -> Message:
            nonlocal until
            left = None if until is None else until - time.monotonic()
            try:
                async with asyncio.timeout(left):
                    message = await receive()
            except TimeoutError:
                why = f"the request body did not arrive within {self._receive_timeout:g} s"
                raise HTTPException(408, why, {"Connection": "close"}) from None
            if not message.get("more_body"):
                until = None
            return message

        return in_time

    def _limited(self, receive: Receive) -> Receive:
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > self._max_bytes:
                if message.get("more_body"):
                    await _discard(receive, MAX_DISCARD)
                raise HTTPException(413, self._too_large)
            return message

        return limited


class RequestScope:
    """One request in the middleware: its id, its status and its log line."""

    def __init__(
        self,
        scope: Scope,
        send: Send,
        refused: Callable[[int], None],
        is_closing: Callable[[], bool],
    ) -> None:
        self._refused = refused
        self._is_closing = is_closing
        sent_id = Headers(scope=scope).get("x-request-id", "")
        self.request_id = sent_id if REQUEST_ID.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = self.request_id
        self.status = 0
        self._what = (
            f"{scope['method']} {scope['path'][:100]!r}"  # quoted: a path may hold a newline
        )
        self._shape = shape_of(scope["path"])
        self._send = send
        self._began = time.monotonic()

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = MutableHeaders(scope=message)
            headers["X-Request-Id"] = self.request_id
            if self._is_closing():
                headers["Connection"] = "close"
        await self._send(message)

    async def refuse(
        self, status: HttpStatus, message: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self._refused(status.code)
        body = json_bytes(self._shape.error(status, message, None))
        lines = {"content-type": "application/json", "content-length": str(len(body))}
        raw = [(k.lower().encode(), v.encode()) for k, v in (lines | dict(headers or {})).items()]
        await self.send({"type": "http.response.start", "status": status.code, "headers": raw})
        await self.send({"type": "http.response.body", "body": body})

    def log(self) -> None:
        took = 1000 * (time.monotonic() - self._began)
        log.info("%s %s %s %.0f ms", self.request_id, self._what, self.status or "-", took)


def _key(headers: Headers) -> str:
    """Return the key: a bearer token, the password of a client that has only a URL for it
    (http://user:KEY@host), or Anthropic's header."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value:
        return value
    if scheme.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode("latin-1").partition(":")[2]
        except binascii.Error:
            return ""
    return headers.get("x-api-key", "")


async def _discard(receive: Receive, max_bytes: int) -> None:
    num_bytes = 0
    while num_bytes < max_bytes:
        message = await receive()
        num_bytes += len(message.get("body", b""))
        if not message.get("more_body"):
            break


def _digest(key: str) -> bytes:
    """Return a digest of fixed length; HTTP headers are decoded as latin-1."""
    return hashlib.sha256(key.encode("latin-1", "replace")).digest()
