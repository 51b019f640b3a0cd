"""A small HTTP client for load: one request a connection, answers line by line, no dependencies.

It speaks to the server that is measured and to nothing else; what it costs is not the server's.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from slotzero.errors import ConfigError

_LINE_LIMIT = 1 << 20


class HttpError(ConfigError):
    """An answer that is a refusal."""

    def __init__(self, name: str, status: int, body: str) -> None:
        super().__init__(f"{name} answers {status}: {_reason(body)}")
        self.status = status


@dataclass(frozen=True)
class Site:
    """Where the server is, and what it asks of everyone. Whatever goes wrong is a ConfigError."""

    host: str
    port: int
    headers: Mapping[str, str]

    @classmethod
    def at(cls, url: str, api_key: str | None) -> "Site":
        parts = urlsplit(url if "//" in url else f"//{url}")
        is_plain = parts.path.rstrip("/") in ("", "/v1") and not parts.query
        if parts.scheme not in ("", "http") or not parts.hostname or not is_plain:
            raise ConfigError(f"--url {url}: give http://HOST:PORT")
        try:
            port = parts.port or 80
        except ValueError:
            raise ConfigError(f"--url {url}: its port is not a number") from None
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        return cls(parts.hostname, port, headers)

    @property
    def name(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    async def get(self, path: str) -> Any:
        return json.loads(await self.text(path))

    async def text(self, path: str) -> str:
        return "\n".join([line async for line in self._exchange("GET", path, b"")])

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Server-sent events, each a JSON value; the last, [DONE], is not one of them. Closing it
        leaves the server."""
        async for line in self._exchange("POST", path, json.dumps(body).encode()):
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line[6:])

    async def _exchange(self, method: str, path: str, body: bytes) -> AsyncIterator[str]:
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port, limit=_LINE_LIMIT)
        except OSError as error:
            raise ConfigError(
                f"no server at {self.name} ({error}): start one with `slotzero serve`"
            ) from error
        try:
            headers = {
                "Host": self.name,
                "Connection": "close",
                "Content-Type": "application/json",
                "Content-Length": str(len(body)),
                **self.headers,
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            writer.write(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)
            await writer.drain()
            async for line in self._answer(reader):
                yield line
        except (OSError, EOFError, LookupError, ValueError) as error:
            raise ConfigError(f"{self.name} does not answer as HTTP does ({error})") from error
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader) -> AsyncIterator[str]:
        status = int((await reader.readuntil()).split()[1])
        chunked = False
        while (header := (await reader.readuntil()).strip().lower()) != b"":
            chunked |= header == b"transfer-encoding: chunked"
        lines = _lines(_chunks(reader) if chunked else _rest(reader))
        if status != 200:
            raise HttpError(self.name, status, "".join([line async for line in lines]))
        async for line in lines:
            yield line


def _reason(body: str) -> str:
    """Of an error in OpenAI's shape, its message."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body[:200]


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int(await reader.readuntil(), 16):
        yield await reader.readexactly(size)
        await reader.readexactly(2)


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while data := await reader.read(1 << 16):
        yield data


async def _lines(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    left = b""
    async for part in parts:
        *whole, left = (left + part).split(b"\n")
        for line in whole:
            yield line.decode().rstrip("\r")
    if left:
        yield left.decode()
