"""What crosses between the HTTP process and the engine's: msgpack, one frame a message, no pickle.

Tokens cross, not text: the engine's process neither tokenises nor knows stop strings.
"""

import struct
from typing import Any

import msgspec
from msgspec import Struct

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20


class Add(Struct, tag="add", array_like=True, frozen=True):
    id: str
    prompt: list[int]
    params: dict[str, Any]
    """Fields of SamplingParams, those that were given; never n, stop or detokenize."""


class Cancel(Struct, tag="cancel", array_like=True, frozen=True):
    """Of an id that is unknown or done, nothing happens."""

    id: str


ToEngine = Add | Cancel


class TokenLogprobs(Struct, array_like=True, frozen=True):
    chosen: float
    top_ids: list[int]
    top_values: list[float]


class TokenDelta(Struct, array_like=True, frozen=True):
    """What one request gained in a step; the last one has a finish_reason, or a Refused follows."""

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one a token, or none at all
    num_cached: int  # tokens of the prompt that were found in the prefix cache
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Progress(Struct, tag="progress", array_like=True, frozen=True):
    """One committed step."""

    grown: list[TokenDelta]


class Refused(Struct, tag="refused", array_like=True, frozen=True):
    """A request that the engine will not run, or not to its end."""

    id: str
    error: str  # the class, in errors.py
    message: str
    param: str | None = None  # these are a RequestError's
    label: str | None = None


class Ready(Struct, tag="ready", array_like=True, frozen=True):
    """Loaded and recorded; from here on requests are run."""

    info: dict[str, Any]
    """limits, eos_token_ids, vocab_size, sizes (by runner: key, backend, seconds, bytes, failure),
    load_seconds, recording_seconds, versions, sanitize."""


class Speculation(Struct, frozen=True):
    """Of speculative decoding; counters only grow."""

    width: int  # tokens of a row of the last step; 1: no drafts
    drafts: int  # rows of steps that had some
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: list[int]
    steps: dict[int, int]  # by width


class Stats(Struct, tag="stats", array_like=True, frozen=True):
    """The engine a moment ago; counters only grow."""

    running: int
    waiting: int
    slots: int
    pages_used: int
    pages_cached: int
    pages: int
    prompt_tokens: int
    generated_tokens: int
    prefix_asked_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    steps: int
    replays: dict[str, int]  # by key, as "decode[8]"
    eager: dict[str, int]  # by reason
    real_tokens: dict[str, int]  # by runner
    padded_tokens: dict[str, int]
    failed_sizes: dict[str, str]  # key: why it runs eagerly
    steps_watched: int
    violations: int
    speculation: Speculation | None = None  # None: it is off


class Loading(Struct, tag="loading", array_like=True, frozen=True):
    """How far the engine is before it is ready."""

    stage: str  # "kernels", "weights" or "recording"
    done: int  # parameters of weights, sizes of recording
    total: int  # 0: not known


class Beat(Struct, tag="beat", array_like=True, frozen=True):
    """The engine's process is alive."""

    busy: float  # seconds since its loop began a turn; 0 while it loads


class Failed(Struct, tag="failed", array_like=True, frozen=True):
    """The engine cannot start, or a step failed and took the running requests with it."""

    error: str
    message: str


FromEngine = Progress | Refused | Ready | Stats | Failed | Loading | Beat


def frame(message: ToEngine | FromEngine) -> bytes:
    body = msgspec.msgpack.encode(message)
    return _LENGTH.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into messages."""

    def __init__(self, kinds: Any) -> None:
        """`kinds` is ToEngine or FromEngine."""
        self._decoder = msgspec.msgpack.Decoder(kinds)
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        self._bytes += data
        messages = []
        while len(self._bytes) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._bytes)
            if length > MAX_FRAME:
                raise ValueError(f"a frame of {length} bytes: at most {MAX_FRAME}")
            end = _LENGTH.size + length
            if len(self._bytes) < end:
                break
            messages.append(
                self._decoder.decode(memoryview(self._bytes)[_LENGTH.size : end].tobytes())
            )
            del self._bytes[:end]
        return messages
