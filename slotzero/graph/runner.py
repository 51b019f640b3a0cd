"""The runner: it captures one pass at every size, and checks and replays it.

One class serves all passes; a spec has what differs. It knows keys, sizes and checks. The spec's
function computes the pass.
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
from slotzero.graph.proof import find_violation
from slotzero.graph.registry import Entry, Fingerprint, Registry, TensorKind

TIMED_REPLAYS = 4  # back to back like steps, so that the host's launch time is hidden


@dataclass(frozen=True)
class GraphKey:
    """The key of one recording: a step is dispatched, checked and replayed by the same key."""

    runner: str
    tokens: int
    rows: int

    @property
    def width(self) -> int:
        """Tokens per row, for runners with a fixed row width."""
        return self.tokens // self.rows

    def __str__(self) -> str:
        shape = f"{self.rows}" if self.rows == self.tokens else f"{self.tokens}t x {self.rows}r"
        return f"{self.runner}[{shape}]"


@dataclass(frozen=True)
class RunnerSpec:
    name: str
    ladder: Ladder  # of tokens; of rows if every row has `width` tokens
    rows: Ladder | None  # of rows, if a row may have any number of tokens
    published: tuple[str, ...]  # one value per row each; the first holds the slots that run
    function: Callable[[GraphKey, Pieces], None]
    writes: tuple[str, ...]
    """The derived tensors and outputs that it writes; it must not change any others."""
    width: int = 1
    chosen_from: Mapping[str, str] = field(default_factory=dict)
    """For tables into which this runner writes a choice, such as a token: the tensor from which it
    was chosen, such as logits."""
    ahead: int = 0
    """Number of positions after a slot's newest token that it may write."""


@dataclass(frozen=True)
class RecordingReport:
    """How one size was recorded: its time and memory, or why it runs eagerly."""

    key: GraphKey
    backend: str
    seconds: float
    num_bytes: int
    failure: str = ""


@dataclass
class Counts:
    """Counts of steps and tokens, for benchmarks and metrics."""

    sizes: Counter[GraphKey] = field(default_factory=Counter)  # replays by size
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
        """`eager_reason`: why this runner is not recorded, if its backend is eager."""
        for name in spec.published:
            if registry.entry(name).kind is not TensorKind.PUBLISHED:
                raise ContractError(
                    f"runner {spec.name}: tensor {name!r} is not published", tensor=name
                )
        for name in spec.writes:
            if registry.entry(name).kind not in (TensorKind.DERIVED, TensorKind.OUTPUT):
                raise ContractError(
                    f"runner {spec.name}: tensor {name!r} is neither derived nor an output",
                    tensor=name,
                )
        self.spec = spec
        self.counts = Counts()
        self.records: dict[GraphKey, RecordingReport] = {}
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
        """Return the tensors that it may use: all tables and constants, its published tensors, and
        those that it writes."""
        own = {*self.spec.published, *self.spec.writes}
        shared = (TensorKind.TABLE, TensorKind.CONSTANT)
        return [e for e in self.registry.entries() if e.kind in shared or e.name in own]

    def pick(self, num_tokens: int, num_rows: int) -> GraphKey | NoCaptureSize:
        """Return the smallest size that fits. `num_tokens` is ignored with a fixed row width."""
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
        """Return the number of tokens in the step: `num_tokens`, or `num_rows * width` for runners
        with a fixed row width."""
        return num_tokens if self.spec.rows is not None else num_rows * self.spec.width

    def all_keys(self) -> Iterable[GraphKey]:
        """Yield every key that `pick` can return, largest first, so that smaller recordings fit
        into the memory of larger ones. A row has at least one token."""
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
        """Run one size over an empty step without recording it, equal layers only once, so that
        kernels are compiled and tuned."""
        self._publish_empty_step()
        self.spec.function(key, OncePieces())

    def record(self, key: GraphKey) -> RecordingReport:
        """Record one size over an empty step; if that fails, warn and run it eagerly."""
        self.registry.freeze()
        self._publish_empty_step()
        start = time.perf_counter()
        backend, failure = self.backend, ""
        try:
            recording = backend.record(partial(self.spec.function, key))
        except RecordingError as error:
            backend, failure = self._eager, str(error)
            warnings.warn(f"{key} could not be recorded and runs eagerly: {error}", stacklevel=2)
            recording = backend.record(partial(self.spec.function, key))
        seconds = time.perf_counter() - start
        record = RecordingReport(key, backend.name, seconds, recording.num_bytes, failure)
        self.records[key] = record
        self._recordings[key] = recording
        self._fingerprints[key] = self.registry.fingerprints()
        if backend.name != self._eager.name:
            self._prove(key)
        return self.records[key]

    def prepare(self, key: GraphKey) -> None:
        """Record a size if it was not recorded yet; must be called before publishing."""
        if key not in self._recordings:
            self.record(key)

    def run(self, key: GraphKey, num_tokens: int) -> None:
        """Check and replay a size over the values published in this step."""
        self.check(key, num_tokens)
        if self.observer is None:
            self.replay(key)
        else:
            self.observer.replay(self, key, num_tokens)
        self._count(self.records[key], num_tokens)

    def check(self, key: GraphKey, num_tokens: int) -> None:
        """Run the checks of every replay; raises ContractError."""
        if key.runner != self.spec.name:
            raise ContractError(f"key {key} was dispatched to runner {self.spec.name}")
        if num_tokens > key.tokens:
            raise ContractError(f"key {key} was dispatched with {num_tokens} tokens")
        if key not in self._recordings:
            raise ContractError(f"key {key} was never recorded: prepare it before publishing")
        self.registry.check_stamps(self.spec.published)
        self.registry.check_fingerprints(self._fingerprints[key])

    def addresses(self, key: GraphKey) -> set[int]:
        """Return the memory that a replay of this size uses, where the backend knows it."""
        return self._recordings[key].addresses()

    def replay(self, key: GraphKey) -> None:
        """Replay without checks and counts, over the present contents of the tensors."""
        self._recordings[key].replay()

    def measure_seconds(self, key: GraphKey) -> float:
        """Return the time of one replay among several over an empty step, after a warm-up. This
        overwrites what was published."""
        self.prepare(key)
        self._publish_empty_step()
        num = TIMED_REPLAYS if self.registry.device.type == "cuda" else 1
        for _ in range(2):
            _wait_for(self.registry.device)
            start = time.perf_counter()
            for _ in range(num):
                self.replay(key)
            _wait_for(self.registry.device)
        return (time.perf_counter() - start) / num

    def eager(self, key: GraphKey) -> None:
        """Run the same function eagerly, kernel by kernel: `replay` must give the same result."""
        self.spec.function(key, PlainPieces())

    def fall_back(self, keys: Iterable[GraphKey], reason: str) -> None:
        """Run these sizes eagerly from now on."""
        for key in keys:
            record = self.records[key]
            self.records[key] = replace(record, backend=self._eager.name, failure=reason)
            self._recordings[key] = self._eager.record(partial(self.spec.function, key))

    def _prove(self, key: GraphKey) -> None:
        """Check a new recording; if it violates a rule, warn and run the size eagerly."""
        self._publish_empty_step()
        reason = find_violation(self, key)
        if reason:
            warnings.warn(f"{key} failed its check and runs eagerly: {reason}", stacklevel=3)
            self.fall_back([key], f"failed its check: {reason}")

    def _publish_empty_step(self) -> None:
        self.registry.begin_step()
        for name in self.spec.published:
            self.registry.publish(name, ())

    def _count(self, record: RecordingReport, num_tokens: int) -> None:
        self.counts.real_tokens += num_tokens
        self.counts.padded_tokens += record.key.tokens - num_tokens
        if record.backend != "eager":
            self.counts.sizes[record.key] += 1
        else:
            self.counts.eager[record.failure or self._eager_reason or "eager backend"] += 1


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
