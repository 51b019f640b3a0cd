"""Messages between the HTTP process and the engine's: msgpack, one frame per message, no pickle.

They contain tokens, not text: the engine's process neither tokenises nor knows stop strings.
"""

import struct
from typing import Any, Literal

import msgspec
from msgspec import Struct

_LENGTH = struct.Struct("<I")
MAX_FRAME = 256 << 20


class Add(Struct, tag="add", array_like=True, frozen=True):
    id: str
    prompt: list[int]
    params: dict[str, Any]
    """The fields of SamplingParams that were set; never n, stop or detokenize."""


class Cancel(Struct, tag="cancel", array_like=True, frozen=True):
    """Cancels a request; ignored if its id is unknown or finished."""

    id: str


RunningAction = Literal["hold", "finish", "abort"]
"""What happens to running requests; see `Engine.update_weights`."""


class ResetPrefixCache(Struct, tag="reset", array_like=True, frozen=True):
    """Makes the engine forget all cached prefixes; running requests keep their pages."""


class Pause(Struct, tag="pause", array_like=True, frozen=True):
    """Makes the engine run no more steps; new requests wait. With "abort", those that wait end
    too."""

    running: RunningAction


class Resume(Struct, tag="resume", array_like=True, frozen=True):
    """Ends a pause."""


class AbortAll(Struct, tag="abort", array_like=True, frozen=True):
    """Ends all requests, with the tokens that they have; also while another action waits."""


class CheckWeights(Struct, tag="check", array_like=True, frozen=True):
    """Refuses an update that does not fit, and changes nothing."""

    path: str | None
    """A folder with a checkpoint, or a .safetensors file; None: the tensors that were staged."""
    is_partial: bool


class UpdateWeights(Struct, tag="update", array_like=True, frozen=True):
    path: str | None
    is_partial: bool
    running: RunningAction
    version: str


class StagePickled(Struct, tag="stage", array_like=True, frozen=True):
    """Keeps tensors for the next update: a pickle of pairs of a name and a tensor."""

    data: bytes


class Sleep(Struct, tag="sleep", array_like=True, frozen=True):
    """Gives memory back: of the KV cache, and at level 2 also of the weights."""

    level: Literal[1, 2]
    running: RunningAction


class WakeUp(Struct, tag="wake", array_like=True, frozen=True):
    """Takes memory again."""

    tags: list[Literal["weights", "kv_cache"]]


class JoinGroup(Struct, tag="join", array_like=True, frozen=True):
    """Joins a broadcast group, whose rank 0 is a trainer."""

    group: str
    host: str
    port: int
    rank: int
    """That of the first engine; the others follow."""
    size: int


class StageBroadcast(Struct, tag="receive", array_like=True, frozen=True):
    """Receives tensors over a group, and keeps them for the next update."""

    group: str
    tensors: list[tuple[str, str, list[int]]]
    """Names, types and shapes, in the order in which they are sent."""
    chunk_bytes: int | None
    """None: they are sent one by one; else packed in chunks of this size."""


class LeaveGroup(Struct, tag="leave", array_like=True, frozen=True):
    """Leaves a broadcast group; ignored if the engine is in none of this name."""

    group: str


class DropStaged(Struct, tag="drop", array_like=True, frozen=True):
    """Forgets the tensors that were kept."""


LongAction = JoinGroup | StageBroadcast
"""Actions that wait for a trainer: steps go on meanwhile."""
Action = (
    ResetPrefixCache
    | Pause
    | Resume
    | AbortAll
    | CheckWeights
    | UpdateWeights
    | StagePickled
    | Sleep
    | WakeUp
    | LeaveGroup
    | DropStaged
    | LongAction
)


class AdminRequest(Struct, tag="admin", array_like=True, frozen=True):
    """An action of an administrator; an AdminReply with the same id follows."""

    id: str
    action: Action


ToEngine = Add | Cancel | AdminRequest


class TokenLogprobs(Struct, array_like=True, frozen=True):
    chosen: float
    top_ids: list[int]
    top_values: list[float]


class TokenExperts(Struct, array_like=True, frozen=True):
    """The experts chosen for each token of prompt and answer but the last."""

    shape: tuple[int, int, int]  # tokens - 1, MoE layers, top_k
    data: bytes  # int16, little-endian


class TokenDelta(Struct, array_like=True, frozen=True):
    """New tokens of one request in a step; the last delta has a finish_reason, or a Refused
    follows."""

    id: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # one per token, or empty
    num_cached: int  # tokens of the prompt that were found in the prefix cache
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[TokenLogprobs] = []
    """Log probabilities of the prompt from its second token on, if requested; sent with the first
    new token."""
    vector: bytes = b""
    """The vector of the prompt, if requested: float32, little-endian. The last delta then has no
    tokens."""
    weight_version: str = ""
    """The version of the weights that computed the newest token."""
    routed_experts: TokenExperts | None = None
    """With the last token, if the engine returns them."""


class Progress(Struct, tag="progress", array_like=True, frozen=True):
    """One committed step."""

    grown: list[TokenDelta]


class Refused(Struct, tag="refused", array_like=True, frozen=True):
    """A request that the engine refuses or aborts."""

    id: str
    error: str  # name of the class in errors.py
    message: str
    param: str | None = None  # these are a RequestError's
    label: str | None = None


class EngineReady(Struct, tag="ready", array_like=True, frozen=True):
    """The engine has loaded and recorded, and now runs requests."""

    info: dict[str, Any]
    """limits, eos_token_ids, vocab_size, sizes (by runner: key, backend, seconds, bytes, failure),
    load_seconds, recording_seconds, versions, sanitize."""


class SpeculationReport(Struct, frozen=True):
    """Statistics of speculative decoding; counters only grow."""

    width: int  # tokens per row in the last step; 1: no drafts
    drafts: int  # rows with drafts
    draft_tokens: int
    accepted_tokens: int
    accepted_per_pos: list[int]
    steps: dict[int, int]  # by width


class Stats(Struct, tag="stats", array_like=True, frozen=True):
    """Recent statistics of the engine; counters only grow."""

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
    failed_sizes: dict[str, str]  # by key: why it runs eagerly
    steps_watched: int
    violations: int
    speculation: SpeculationReport | None = None  # None: speculation is off
    paused: int = 0  # 1: no steps run until an administrator resumes
    asleep: int = 0  # 1: some memory was given back
    bytes_given_back: int = 0


class Loading(Struct, tag="loading", array_like=True, frozen=True):
    """Progress of an engine that is not ready yet."""

    stage: str  # "kernels", "weights" or "recording"
    done: int  # parameters (weights) or sizes (recording)
    total: int  # 0: unknown


class Beat(Struct, tag="beat", array_like=True, frozen=True):
    """Heartbeat of the engine's process."""

    overdue: str = ""  # what has taken too long and still does


class Failed(Struct, tag="failed", array_like=True, frozen=True):
    """The engine cannot start, or a step failed and ended the running requests."""

    error: str
    message: str


class AdminReply(Struct, tag="admin_reply", array_like=True, frozen=True):
    id: str
    error: str = ""
    """Name of the class in errors.py; empty: the action succeeded."""
    message: str = ""


FromEngine = Progress | Refused | EngineReady | Stats | Failed | Loading | Beat | AdminReply

ABORTED = "aborted"
"""The stop_reason of an answer that an administrator ended; its finish_reason is "abort"."""


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
