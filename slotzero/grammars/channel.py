"""Messages between the engine and a worker: length-prefixed pickles over a socket.

The engine's end never blocks. Data that the kernel does not accept at once stays in an outbox until
the selector reports that the socket is writable. The worker's end blocks; the engine always reads
its replies, so there is no deadlock.
"""

import pickle
import selectors
import socket
import struct
from typing import Any, BinaryIO, final

_LENGTH = struct.Struct("!I")
_READ_BYTES = 1 << 18


def frame(message: object) -> bytes:
    data = pickle.dumps(message)
    return _LENGTH.pack(len(data)) + data


def read(stream: BinaryIO) -> Any:
    """Wait for the next message; raise EOFError if the other end is closed."""
    header = stream.read(_LENGTH.size)
    if len(header) < _LENGTH.size:
        raise EOFError
    (length,) = _LENGTH.unpack(header)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return pickle.loads(data)


@final
class Channel:
    """The engine's end of a connection to a worker.

    It is registered with the selector under `data`. Call `flush` when it is writable, and `receive`
    when it is readable.
    """

    def __init__(self, end: socket.socket, selector: selectors.BaseSelector, data: object) -> None:
        end.setblocking(False)
        self.is_open = True
        """Whether the other end may still send messages."""
        self._socket, self._selector, self._data = end, selector, data
        self._inbox, self._outbox = bytearray(), bytearray()
        self._events = selectors.EVENT_READ
        selector.register(end, self._events, data)

    def send(self, message: object) -> None:
        self._outbox += frame(message)
        self.flush()

    def flush(self) -> None:
        """Send as much of the outbox as the kernel accepts."""
        try:
            while self._outbox:
                del self._outbox[: self._socket.send(self._outbox)]
        except BlockingIOError:
            pass
        except OSError:  # the other end is closed
            self._outbox.clear()
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._outbox else 0)
        if events != self._events:
            self._events = events
            self._selector.modify(self._socket, events, self._data)

    def receive(self) -> list[Any]:
        """Return all messages that have arrived."""
        self._fill()
        messages, start = [], 0
        while start + _LENGTH.size <= len(self._inbox):
            (length,) = _LENGTH.unpack_from(self._inbox, start)
            end = start + _LENGTH.size + length
            if end > len(self._inbox):
                break
            messages.append(pickle.loads(self._inbox[start + _LENGTH.size : end]))
            start = end
        del self._inbox[:start]
        return messages

    def close(self) -> None:
        self.is_open = False
        self._selector.unregister(self._socket)
        self._socket.close()

    def _fill(self) -> None:
        try:
            while data := self._socket.recv(_READ_BYTES):
                self._inbox += data
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        self.is_open = False
