"""A small HTTP client for load tests: it keeps connections alive and reads replies line by line.

It has no dependencies and connects only to the measured server; its own cost is small. The rule: a
connection carries one request at a time, and is reused only after its reply was read to the end, as
other clients do.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from slotzero.errors import ConfigError

_LINE_LIMIT = 1 << 20
_NOT_HTTP = (OSError, EOFError, LookupError, ValueError)

Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class HttpError(ConfigError):
    """A reply with an error status."""

    def __init__(self, name: str, status: int, body: str) -> None:
        super().__init__(f"{name} answered {status}: {_reason(body)}")
        self.status = status


@dataclass(frozen=True)
class Site:
    """The server's address, and headers for all requests. Every failure is a ConfigError.

    A site belongs to one event loop, and must be closed there."""

    host: str
    port: int
    headers: Mapping[str, str]
    _idle: list[Connection] = field(default_factory=list, init=False, compare=False, repr=False)

    @classmethod
    def at(cls, url: str, api_key: str | None) -> "Site":
        parts = urlsplit(url if "//" in url else f"//{url}")
        is_plain = parts.path.rstrip("/") in ("", "/v1") and not parts.query
        if parts.scheme not in ("", "http") or not parts.hostname or not is_plain:
            raise ConfigError(f"--url {url}: give http://HOST:PORT")
        try:
            port = parts.port or 80
        except ValueError:
            raise ConfigError(f"--url {url}: the port is not a number") from None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(parts.hostname, port, headers)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    async def get(self, path: str) -> Any:
        return json.loads(await self.text(path))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        lines = self._exchange("POST", path, json.dumps(body).encode())
        return json.loads("\n".join([line async for line in lines]))

    async def text(self, path: str) -> str:
        return "\n".join([line async for line in self._exchange("GET", path, b"")])

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Yield server-sent events as JSON values, without the final [DONE]. Closing the generator
        disconnects."""
        async with aclosing(self._exchange("POST", path, json.dumps(body).encode())) as lines:
            async for line in lines:
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield json.loads(line[6:])

    async def aclose(self) -> None:
        """Close the connections that are kept alive."""
        while self._idle:
            _, writer = self._idle.pop()
            writer.close()

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncGenerator[str, None]:
        answer, connection = await self._ask(self._request(method, path, body))
        is_reusable = False
        try:
            lines = answer.lines(connection[0])
            if answer.status != 200:
                text = "".join([line async for line in lines])
                is_reusable = answer.keeps_alive
                raise HttpError(self.name, answer.status, text)
            async for line in lines:
                yield line
            is_reusable = answer.keeps_alive
        except _NOT_HTTP as error:
            raise self._odd(error) from error
        finally:
            if is_reusable:
                self._idle.append(connection)
            else:
                connection[1].close()

    def _request(self, method: str, path: str, body: bytes) -> bytes:
        headers = {
            "Host": self.name,
            "Content-Type": "application/json",
            "Content-Length": str(len(body)),
            **self.headers,
        }
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body

    async def _ask(self, request: bytes) -> tuple["_HttpAnswer", Connection]:
        """Send the request and return the head of the reply. If the server closes an idle
        connection just as it is reused, the request is sent over a new one."""
        while True:
            idle = self._take_idle()
            connection = idle or await self._connect()
            try:
                return await _head(connection, request), connection
            except BaseException as error:
                connection[1].close()
                if idle and isinstance(error, OSError | EOFError):
                    continue
                if isinstance(error, _NOT_HTTP):
                    raise self._odd(error) from error
                raise

    def _take_idle(self) -> Connection | None:
        while self._idle:
            reader, writer = self._idle.pop()
            if not (reader.at_eof() or writer.is_closing()):
                return reader, writer
            writer.close()
        return None

    async def _connect(self) -> Connection:
        try:
            return await asyncio.open_connection(self.host, self.port, limit=_LINE_LIMIT)
        except OSError as error:
            raise ConfigError(
                f"no server at {self.name} ({error}): start one with `slotzero serve`"
            ) from error

    def _odd(self, error: BaseException) -> ConfigError:
        return ConfigError(f"{self.name} does not answer with valid HTTP ({error})")


@dataclass(frozen=True)
class _HttpAnswer:
    """The head of a reply."""

    status: int
    is_chunked: bool
    length: int | None
    keeps_alive: bool

    def lines(self, reader: asyncio.StreamReader) -> AsyncIterator[str]:
        if self.is_chunked:
            return _lines(_chunks(reader))
        return _lines(_rest(reader) if self.length is None else _exactly(reader, self.length))


async def _head(connection: Connection, request: bytes) -> _HttpAnswer:
    reader, writer = connection
    writer.write(request)
    await writer.drain()
    version, status, *_ = (await reader.readuntil()).split()
    headers = {}
    while line := (await reader.readuntil()).strip().lower().decode():
        name, _, value = line.partition(":")
        headers[name.strip()] = value.strip()
    is_chunked = headers.get("transfer-encoding") == "chunked"
    length = None if "content-length" not in headers else int(headers["content-length"])
    is_framed = is_chunked or length is not None
    keeps_alive = version == b"HTTP/1.1" and headers.get("connection") != "close" and is_framed
    return _HttpAnswer(int(status), is_chunked, length, keeps_alive)


def _reason(body: str) -> str:
    """Return the message of an error in OpenAI's shape."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)
    while (await reader.readuntil()).strip():  # trailers, until an empty line
        pass


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(1 << 16):
        yield data


async def _exactly(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    yield await reader.readexactly(length)


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    left = b""
    async for part in parts:
        *whole, left = (left + part).split(b"\n")
        for line in whole:
            yield line.decode().rstrip("\r")
    if left:
        yield left.decode()
