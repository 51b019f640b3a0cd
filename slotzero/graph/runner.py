"""The one class that records and replays; six runners are six specs.

It knows keys, sizes and checks. What flows through a pass is in its spec's function.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from slotzero.errors import ContractError, RecordingError
from slotzero.graph.backend import (
    Backend,
    EagerBackend,
    OncePieces,
    Pieces,
    PlainPieces,
    Recording,
)
from slotzero.graph.ladder import Ladder, NoCaptureSize
from slotzero.graph.observer import Observer
from slotzero.graph.proof import flaw
from slotzero.graph.registry import Entry, Fingerprint, Kind, Registry

TIMED_REPLAYS = 4  # back to back, as steps are launched: what a launch costs the host is hidden


@dataclass(frozen=True)
class GraphKey:
    """Which recording: planning picks it and running uses it, so they cannot disagree."""

    runner: str
    tokens: int
    rows: int

    @property
    def width(self) -> int:
        """Tokens of each row, where all have as many."""
        return self.tokens // self.rows

    def __str__(self) -> str:
        shape = f"{self.rows}" if self.rows == self.tokens else f"{self.tokens}t x {self.rows}r"
        return f"{self.runner}[{shape}]"


@dataclass(frozen=True)
class RunnerSpec:
    name: str
    ladder: Ladder  # over tokens; over rows where every row has `width` of them
    rows: Ladder | None  # over rows, where a row may hold any number of tokens
    published: tuple[str, ...]  # one value a row each; the first says who runs, by slot
    function: Callable[[GraphKey, Pieces], None]
    writes: tuple[str, ...]
    """Its derived tensors and outputs; those of other runners are none of its business."""
    width: int = 1
    follows: Mapping[str, str] = field(default_factory=dict)
    """Of tables, where this runner writes what it has chosen: the tensor that it chose from."""
    ahead: int = 0
    """Places behind the newest token of a slot that it may write."""


@dataclass(frozen=True)
class Record:
    """How one size came to be: its time and memory, or why it runs eagerly."""

    key: GraphKey
    backend: str
    seconds: float
    num_bytes: int
    failure: str = ""


@dataclass
class Counts:
    """What was run, for the benchmark and the metrics."""

    sizes: Counter[GraphKey] = field(default_factory=Counter)  # replays of each
    eager: Counter[str] = field(default_factory=Counter)  # by reason
    real_tokens: int = 0
    padded_tokens: int = 0

    @property
    def replays(self) -> int:
        return self.sizes.total()


class Runner:
    def __init__(
        self, spec: RunnerSpec, registry: Registry, backend: Backend, eager_reason: str = ""
    ) -> None:
        """`eager_reason` says why this runner is not recorded, where its backend is eager."""
        for name in spec.published:
            if registry.entry(name).kind is not Kind.PUBLISHED:
                raise ContractError(
                    f"runner {spec.name}: tensor {name!r} is not a published one", tensor=name
                )
        for name in spec.writes:
            if registry.entry(name).kind not in (Kind.DERIVED, Kind.OUTPUT):
                raise ContractError(
                    f"runner {spec.name}: tensor {name!r} is not one it may write", tensor=name
                )
        self.spec = spec
        self.counts = Counts()
        self.records: dict[GraphKey, Record] = {}
        self.observer: Observer | None = None
        self.registry = registry
        self.backend = backend
        self._eager = EagerBackend()
        self._eager_reason = eager_reason
        self._recordings: dict[GraphKey, Recording] = {}
        self._fingerprints: dict[GraphKey, tuple[Fingerprint, ...]] = {}

    @property
    def is_recorded(self) -> bool:
        return not self._eager_reason

    def entries(self) -> list[Entry]:
        """What it sees: all tables and constants, what is published to it, and what it writes."""
        mine = {*self.spec.published, *self.spec.writes}
        shared = (Kind.TABLE, Kind.CONSTANT)
        return [e for e in self.registry.entries() if e.kind in shared or e.name in mine]

    def pick(self, num_tokens: int, num_rows: int) -> GraphKey | NoCaptureSize:
        """`num_tokens` is not asked for where every row has as many."""
        if self.spec.rows is None:
            rows = self.spec.ladder.pick(num_rows)
            if isinstance(rows, NoCaptureSize):
                return NoCaptureSize(f"runner {self.spec.name}: rows: {rows.reason}")
            return GraphKey(self.spec.name, rows * self.spec.width, rows)
        tokens, rows = self.spec.ladder.pick(num_tokens), self.spec.rows.pick(num_rows)
        if isinstance(tokens, NoCaptureSize):
            return NoCaptureSize(f"runner {self.spec.name}: tokens: {tokens.reason}")
        if isinstance(rows, NoCaptureSize):
            return NoCaptureSize(f"runner {self.spec.name}: rows: {rows.reason}")
        return GraphKey(self.spec.name, tokens, rows)

    def num_tokens(self, num_tokens: int, num_rows: int) -> int:
        """Of a step; so many as are said, unless every row has as many."""
        return num_tokens if self.spec.rows is not None else num_rows * self.spec.width

    def all_keys(self) -> Iterable[GraphKey]:
        """Every key that `pick` can return, largest first: smaller recordings then fit into the
        memory of larger ones. A row holds at least one token."""
        for size in reversed(self.spec.ladder.sizes):
            if self.spec.rows is None:
                yield GraphKey(self.spec.name, size * self.spec.width, size)
                continue
            sizes = self.spec.rows.sizes
            smaller = (0, *sizes[:-1])
            for num_rows, last in reversed(list(zip(sizes, smaller, strict=True))):
                if last < size:
                    yield GraphKey(self.spec.name, size, num_rows)

    def rehearse(self, key: GraphKey) -> None:
        """Runs one size over an empty step, but equal layers once, so that whoever prepares for it
        has seen what it runs."""
        self._publish_nobody()
        self.spec.function(key, OncePieces())

    def record(self, key: GraphKey) -> Record:
        """Records one size over an empty step; one that fails is served eagerly, and says so."""
        self.registry.freeze()
        self._publish_nobody()
        start = time.perf_counter()
        backend, failure = self.backend, ""
        try:
            recording = backend.record(partial(self.spec.function, key))
        except RecordingError as error:
            backend, failure = self._eager, str(error)
            warnings.warn(f"{key} could not be recorded and runs eagerly: {error}", stacklevel=2)
            recording = backend.record(partial(self.spec.function, key))
        seconds = time.perf_counter() - start
        record = Record(key, backend.name, seconds, recording.num_bytes, failure)
        self.records[key] = record
        self._recordings[key] = recording
        self._fingerprints[key] = self.registry.fingerprints()
        if backend.name != self._eager.name:
            self._prove(key)
        return self.records[key]

    def prepare(self, key: GraphKey) -> None:
        """Records a size that was left for later; call it before publishing."""
        if key not in self._recordings:
            self.record(key)

    def run(self, key: GraphKey, num_tokens: int) -> None:
        """Replays over what was published in this step."""
        self.check(key, num_tokens)
        if self.observer is None:
            self.replay(key)
        else:
            self.observer.replay(self, key, num_tokens)
        self._count(self.records[key], num_tokens)

    def check(self, key: GraphKey, num_tokens: int) -> None:
        """What is checked at every replay; raises ContractError."""
        if key.runner != self.spec.name:
            raise ContractError(f"key {key} was dispatched to runner {self.spec.name}")
        if num_tokens > key.tokens:
            raise ContractError(f"key {key} was dispatched with {num_tokens} tokens")
        if key not in self._recordings:
            raise ContractError(f"key {key} was never recorded: prepare it before publishing")
        self.registry.check_stamps(self.spec.published)
        self.registry.check_fingerprints(self._fingerprints[key])

    def replay(self, key: GraphKey) -> None:
        """Unchecked and uncounted, over whatever the registered tensors hold."""
        self._recordings[key].replay()

    def seconds(self, key: GraphKey) -> float:
        """Of one replay among others over an empty step, once it is warm. What was published is
        gone then."""
        self.prepare(key)
        self._publish_nobody()
        num = TIMED_REPLAYS if self.registry.device.type == "cuda" else 1
        for _ in range(2):
            _wait_for(self.registry.device)
            start = time.perf_counter()
            for _ in range(num):
                self.replay(key)
            _wait_for(self.registry.device)
        return (time.perf_counter() - start) / num

    def eager(self, key: GraphKey) -> None:
        """What `replay` must equal: the same function, kernel by kernel."""
        self.spec.function(key, PlainPieces())

    def fall_back(self, keys: Iterable[GraphKey], reason: str) -> None:
        """From here on these sizes run eagerly."""
        for key in keys:
            record = self.records[key]
            self.records[key] = replace(record, backend=self._eager.name, failure=reason)
            self._recordings[key] = self._eager.record(partial(self.spec.function, key))

    def _prove(self, key: GraphKey) -> None:
        """A size with a flaw does not serve."""
        self._publish_nobody()
        reason = flaw(self, key)
        if reason:
            warnings.warn(f"{key} failed its proof and runs eagerly: {reason}", stacklevel=3)
            self.fall_back([key], f"failed its proof: {reason}")

    def _publish_nobody(self) -> None:
        self.registry.begin_step()
        for name in self.spec.published:
            self.registry.publish(name, ())

    def _count(self, record: Record, num_tokens: int) -> None:
        self.counts.real_tokens += num_tokens
        self.counts.padded_tokens += record.key.tokens - num_tokens
        if record.backend != "eager":
            self.counts.sizes[record.key] += 1
        else:
            self.counts.eager[record.failure or self._eager_reason or "eager backend"] += 1


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
