"""Messages between the engine, the fork server and the workers.

They are pickled. Each worker has its own socket. The socket of the fork server preserves message
boundaries, and its messages have at most MAX_ORDER bytes.
"""

from typing import NamedTuple

from slotzero.sampling.structured import Kind

MAX_ORDER = 1 << 16
COMPILE = 0  # the number of the first request to a worker; answers have numbers from 1 on


# To and from a worker


class GrammarSource(NamedTuple):
    """The first message to a worker."""

    kind: Kind
    text: str


class Follow(NamedTuple):
    """New tokens of an answer; the reply has the mask of the next token."""

    number: int
    tokens: list[int]


class EndAnswer(NamedTuple):
    """An answer has ended. There is no reply."""

    number: int


class Reply(NamedTuple):
    number: int
    """COMPILE, or the answer's number."""
    mask: bytes
    error: str
    """Why there is no mask; empty if there is one."""
    memory: int
    """Bytes that the process has allocated since it was forked."""


# To and from the fork server


class StartWorker(NamedTuple):
    """A request to fork a worker, which gets the socket that is sent with this message."""

    number: int


class Kill(NamedTuple):
    number: int


class Ready(NamedTuple):
    ends: list[int]
    """Tokens that end a sequence."""


class Unusable(NamedTuple):
    """The tokenizer cannot be used, so no grammar can be compiled."""

    reason: str


class NotStarted(NamedTuple):
    """A worker could not be forked: there are too many processes or files, or too little memory."""

    number: int
    reason: str


class WorkerEnded(NamedTuple):
    """A worker has ended."""

    number: int
    exit_code: int
    """Negative: the number of the signal."""
