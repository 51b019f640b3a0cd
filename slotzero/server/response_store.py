"""Responses that clients may retrieve or continue: in memory, or in an SQLite file.

This module knows neither requests nor answers, only JSON objects by id.

The rule: storage is bounded. When it is full, the oldest responses are dropped, and a request that
names one of them is refused.
"""

import asyncio
import json
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple, final

from slotzero.errors import ConfigError

MAX_MEMORY = 64 << 20  # characters of JSON


class StoredResponse(NamedTuple):
    reply: dict[str, Any]
    """The response object."""
    items: list[dict[str, Any]]
    """The input of its request."""
    messages: list[dict[str, Any]]
    """The conversation up to its end, as chat templates expect it, without instructions."""


class ResponseStore(ABC):
    def __init__(self, max_responses: int) -> None:
        self._max_responses = max_responses

    async def put(self, name: str, stored: StoredResponse) -> None:
        if self._max_responses:
            await asyncio.to_thread(self._put, name, json.dumps(stored))

    async def get(self, name: str) -> StoredResponse | None:
        text = await asyncio.to_thread(self._get, name)
        return None if text is None else StoredResponse(*json.loads(text))

    async def delete(self, name: str) -> bool:
        """Delete a response; return False if it is not stored."""
        return await asyncio.to_thread(self._delete, name)

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _put(self, name: str, text: str) -> None: ...

    @abstractmethod
    def _get(self, name: str) -> str | None: ...

    @abstractmethod
    def _delete(self, name: str) -> bool: ...


@final
class MemoryStore(ResponseStore):
    def __init__(self, max_responses: int) -> None:
        super().__init__(max_responses)
        self._texts: OrderedDict[str, str] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def close(self) -> None:
        self._texts.clear()

    def _put(self, name: str, text: str) -> None:
        with self._lock:
            self._texts[name] = text
            self._num_chars += len(text)
            while self._num_chars > MAX_MEMORY or len(self._texts) > self._max_responses:
                _, oldest = self._texts.popitem(last=False)
                self._num_chars -= len(oldest)

    def _get(self, name: str) -> str | None:
        return self._texts.get(name)

    def _delete(self, name: str) -> bool:
        with self._lock:
            text = self._texts.pop(name, None)
            self._num_chars -= len(text or "")
            return text is not None


@final
class FileStore(ResponseStore):
    """Keeps responses when the server restarts."""

    def __init__(self, path: Path, max_responses: int) -> None:
        super().__init__(max_responses)
        self._lock = threading.Lock()
        try:
            self._file = sqlite3.connect(path, check_same_thread=False)
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS responses "
                "(place INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE, body TEXT)"
            )
            self._file.commit()
        except sqlite3.Error as error:
            raise ConfigError(f"response_store: {str(path)!r} cannot be used: {error}") from None

    def close(self) -> None:
        with self._lock:
            self._file.close()

    def _put(self, name: str, text: str) -> None:
        with self._lock, self._file:
            self._file.execute("INSERT INTO responses (name, body) VALUES (?, ?)", (name, text))
            self._file.execute(
                "DELETE FROM responses WHERE place <= "
                "(SELECT place FROM responses ORDER BY place DESC LIMIT 1 OFFSET ?)",
                (self._max_responses,),
            )

    def _get(self, name: str) -> str | None:
        with self._lock:
            found = self._file.execute("SELECT body FROM responses WHERE name = ?", (name,))
            row = found.fetchone()
        return None if row is None else str(row[0])

    def _delete(self, name: str) -> bool:
        with self._lock, self._file:
            return self._file.execute("DELETE FROM responses WHERE name = ?", (name,)).rowcount > 0


def response_store(path: str | None, max_responses: int) -> ResponseStore:
    if path is None:
        return MemoryStore(max_responses)
    return FileStore(Path(path).expanduser(), max_responses)
