"""Authenticated TCP connections between processes on several machines.

Messages are unpickled, which can run any code. So nothing is read before both ends have proved that
they know the key, by a digest of the other end's challenge. Later messages are neither encrypted
nor signed: the network between the machines must be private.

The rules: a silent client does not block other clients for long, and a machine that disappears is
noticed within a minute.
"""

import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from slotzero.errors import ConfigError

KEY = "SLOTZERO_KEY"
MIN_KEY_LEN = 16
HANDSHAKE = 5.0  # seconds in which a client must prove that it knows the key
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 4))


def given_key() -> bytes:
    """Return the key from the environment."""
    key = os.environ.get(KEY, "")
    if len(key) < MIN_KEY_LEN:
        raise ConfigError(
            f"{KEY} must be a secret of at least {MIN_KEY_LEN} characters, got {len(key)}: set it "
            "to the same value on every node, for example the output of openssl rand -hex 16"
        )
    return key.encode()


def accept(listener: socket.socket, key: bytes, seconds: float) -> Connection | None:
    """Accept a client that knows the key; return None if there is none within this time."""
    listener.settimeout(seconds)
    try:
        end, _ = listener.accept()
    except TimeoutError:
        return None
    line = _line(end, HANDSHAKE)
    try:
        deliver_challenge(line, key)
        answer_challenge(line, key)
    except (AuthenticationError, EOFError, OSError):
        line.close()
        return None
    wait_at_most(line, 0)
    return line


def connect(host: str, port: int, key: bytes, seconds: float = 6 * HANDSHAKE) -> Connection:
    """Connect to a listener; raise OSError if it does not reply."""
    line = _line(socket.create_connection((host, port), timeout=seconds), seconds)
    try:
        answer_challenge(line, key)
        deliver_challenge(line, key)
    except AuthenticationError:
        line.close()
        raise ConfigError(
            f"{KEY} differs at {host}:{port}: set it to the same value on every node"
        ) from None
    except EOFError:
        line.close()
        raise ConnectionResetError(f"{host}:{port} closed the connection") from None
    except BaseException:
        line.close()
        raise
    wait_at_most(line, 0)
    return line


def _line(end: socket.socket, seconds: float) -> Connection:
    end.setblocking(True)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # each step is one small message
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
    for option, value in _KEEPALIVE:
        end.setsockopt(socket.IPPROTO_TCP, option, value)
    line = Connection(end.detach())
    wait_at_most(line, seconds)
    return line


def wait_at_most(
    line: Connection,
    seconds: float,
    doing: Sequence[int] = (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO),
) -> None:
    """Set the timeout of reads and writes, or of the one in `doing`; 0 means no timeout."""
    length = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(line.fileno())) as end:
        end.setblocking(True)  # by default Python would make the original socket non-blocking too
        for option in doing:
            end.setsockopt(socket.SOL_SOCKET, option, length)
