"""The worker: it runs steps on the device.

It captures CUDA graphs, applies the staged writes to the slot tables, launches the runners of a
step, and returns results that arrive later. It does not know queues, text or which requests are
finished. build.py creates it.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from slotzero.distributed.ranks import Ranks
from slotzero.errors import CapacityError, ContractError, InvalidInputError, WeightUpdateError
from slotzero.executor.limits import Limits
from slotzero.executor.rank_group import RankGroup
from slotzero.executor.results import Results
from slotzero.executor.routed_experts import RoutedExperts
from slotzero.executor.step_message import Message, SentTensor, StepMessage, Timing, Update
from slotzero.executor.step_watch import StepWatch, Work
from slotzero.executor.table_writer import TableWriter
from slotzero.graph import GraphKey, NoCaptureSize, Registry, Runner
from slotzero.graph.runner import RecordingReport
from slotzero.graph.transfer import Download, PendingTensors
from slotzero.kernels.contract import Kernels
from slotzero.kernels.types_recurrent import States
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.model import Model, ModelShape
from slotzero.models.pooling import Pooling
from slotzero.models.weight_update import WeightUpdater
from slotzero.models.weights import DecoderWeights
from slotzero.pools.tables import SlotTables
from slotzero.runners.passes import COUNTS, SLOTS, Passes
from slotzero.runners.results import ResultRing
from slotzero.speculative.drafter import MOST_PENDING, Drafter
from slotzero.speculative.speculation import Cycle, SpeculativeRunners
from slotzero.step import Step
from slotzero.system.pages import give_back
from slotzero.tree_shape import TreeShape


@dataclass(eq=False, kw_only=True)
class Worker:
    rank_group: RankGroup
    limits: Limits
    registry: Registry
    kernels: Kernels
    model: ModelShape  # this rank's shard
    weights: DecoderWeights | None
    """None: the model is not of a family of this package."""
    weight_bytes: int
    decoder: Model
    tables: SlotTables
    page_tables: tuple[str, ...]  # by KV group
    states: States | None
    drafter: Drafter | None
    routed_experts: RoutedExperts | None
    """None: the setting is off."""
    tree: TreeShape | None
    passes: Passes
    decode: Runner
    pooling: Pooling
    prefills: tuple[Runner, ...]
    """In order of preference: a step runs on the first runner that has a size for it."""
    pooled_prefills: tuple[Runner, ...]
    """The same for steps that compute vectors of prompts. Unless the model is an embedding
    model or a reranker, a size is captured when it is first used."""
    scored_prefills: tuple[Runner, ...]
    """The same for steps that compute log probabilities of prompts, and maybe vectors. They are
    rare, so a size is captured when it is first used."""
    results: ResultRing
    pooled_results: ResultRing
    scored_results: ResultRing
    speculation: SpeculativeRunners | None
    writers: tuple[TableWriter, ...]  # by DP rank, this rank's first
    updater: WeightUpdater | None
    """None: the weights cannot be replaced."""
    watch: StepWatch
    _seconds: dict[GraphKey, float] = field(default_factory=dict, init=False)
    """Measured seconds of a replay."""

    @property
    def ranks(self) -> Ranks:
        return self.rank_group.ranks

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    @property
    def runners(self) -> tuple[Runner, ...]:
        more = () if self.speculation is None else self.speculation.runners
        more_prefills = (*self.pooled_prefills, *self.scored_prefills)
        return self.decode, *self.prefills, *more_prefills, *more

    @property
    def overlaps(self) -> bool:
        """Whether `run` returns before the step has run, so that the host works in parallel."""
        return self.registry.device.type == "cuda"

    def ring_of(self, runner: Runner) -> ResultRing | None:
        """Return the ring that copies the outputs of a step to the host, if this runner writes
        them all."""
        verified = () if self.speculation is None else (self.speculation.verified,)
        writes = {*runner.spec.writes}
        rings = (self.scored_results, self.pooled_results, self.results, *verified)
        return next((ring for ring in rings if writes.issuperset(ring.names)), None)

    @property
    def cycles(self) -> Mapping[int, Cycle]:
        """Runners that verify drafts, by width; empty without a drafter."""
        return {} if self.speculation is None else self.speculation.cycles

    @property
    def most_behind(self) -> int | None:
        """Plain decode steps after which the drafter must catch up; None: no drafter."""
        return None if self.speculation is None else MOST_PENDING

    @property
    def kv(self) -> dict[str, dict[str, int | None]]:
        """Pages, bytes and window of each KV group."""
        limits = self.limits
        return {
            name: {
                "pages": num_pages,
                "bytes": self.registry[f"kv_{name}"].nbytes,
                "window": limits.windows[name],
            }
            for name, num_pages in limits.num_pages.items()
        }

    @property
    def recorded_keys(self) -> list[tuple[Runner, GraphKey]]:
        """All sizes that are captured at start-up, largest first."""
        later = self.scored_prefills
        if not self.pooling.is_expected:
            later += self.pooled_prefills
        return [
            (runner, key)
            for runner in reversed(self.runners)
            if runner.is_recorded and runner not in later
            for key in runner.all_keys()
        ]

    def record(self, seen: Callable[[RecordingReport], None]) -> float:
        """Capture every size of every captured runner; return how many seconds that took."""
        start = time.perf_counter()
        with torch.inference_mode():
            self.kernels.prepare(self._rehearse)
            for runner, key in self.recorded_keys:
                with _explained(f"recording {key}"):
                    seen(runner.record(key))
        return time.perf_counter() - start

    def _rehearse(self) -> None:
        for runner, key in self.recorded_keys:
            with _explained(f"preparing {key}"):
                runner.rehearse(key)

    def run(self, step: Step) -> list[Results]:
        """Launch one step, and return the results of each DP rank.

        If the device `overlaps`, the step may still be running.
        """
        launches = self._dispatch(step)
        self.watch.latest = work = _work(launches, step.num_rows)
        with self.watch.doing("running", work):
            return self._run(step, launches)

    def _run(self, step: Step, launches: Sequence[tuple[Runner, GraphKey]]) -> list[Results]:
        messages = [
            StepMessage(
                writer.staging.take(),
                [row.slot for row in rows],
                [row.count for row in rows],
                step.num_tokens,
                step.num_rows,
                [key for _, key in launches],
                step.width,
                any(row.request.params.logprobs is not None for row in rows),
                step.is_scored,
                step.is_pooled,
            )
            for writer, rows in zip(self.writers, step.rows_by_dp_rank, strict=True)
        ]
        self.rank_group.send(messages)
        with torch.inference_mode():
            self._launch(messages[0], launches)
            downloads: list[PendingTensors] = [self._download(messages[0])]
        downloads += [self.rank_group.sampled(dp_rank) for dp_rank in range(1, len(messages))]
        names = self._ring(messages[0]).names
        return [Results(download, names, step.width) for download in downloads]

    def run_message(self, message: Message) -> PendingTensors | None:
        """Run a message of rank 0; return this rank's samples for its own requests, if any."""
        with torch.inference_mode():
            if isinstance(message, Update):
                self._receive_weights(message)
                return None
            if isinstance(message, Timing):
                self._runner(message.key).measure_seconds(message.key)
                return None
            launches = [(self._runner(key), key) for key in message.launches]
            for runner, key in launches:
                picked = runner.pick(message.num_tokens, message.num_rows)
                if picked != key:
                    raise ContractError(
                        f"rank {self.ranks.rank} would run {picked}, but rank 0 runs {key}: "
                        "start all ranks with the same settings"
                    )
            with self.watch.doing("running", _work(launches, message.num_rows)):
                self._launch(message, launches)
            return self._download(message) if self.ranks.dp_attention else None

    def _launch(self, message: StepMessage, launches: Sequence[tuple[Runner, GraphKey]]) -> None:
        for runner, key in launches:
            if runner is self.decode:
                _refuse_prompts(key, message)
            with _explained(f"recording {key}"):
                runner.prepare(key)
        self.tables.put(message.writes)
        self.registry.begin_step()
        self.registry.publish(SLOTS, message.slots)
        if any(COUNTS in runner.spec.published for runner, _ in launches):
            self.registry.publish(COUNTS, message.counts)
        for runner, key in launches:
            with _explained(f"running {key}"):
                runner.run(key, runner.num_tokens(sum(message.counts), len(message.slots)))

    def _runner(self, key: GraphKey) -> Runner:
        return next(runner for runner in self.runners if runner.spec.name == key.runner)

    def measure_seconds(self, width: int, num_rows: int) -> float:
        """Return the duration of a decode step over empty rows, measured on the first call."""
        runners = self.cycles[width] if width > 1 else (self.decode,)
        return sum(self._seconds_of(runner, num_rows) for runner in runners)

    def _seconds_of(self, runner: Runner, num_rows: int) -> float:
        key = runner.pick(num_rows, num_rows)
        assert isinstance(key, GraphKey), key
        if key not in self._seconds:
            self.rank_group.send([Timing(key)] * len(self.writers))
            with torch.inference_mode():
                self._seconds[key] = runner.measure_seconds(key)
        return self._seconds[key]

    def check_update(self, checkpoint: Checkpoint, is_partial: bool) -> list[str]:
        """Raise WeightUpdateError unless the weights can be replaced by these; return the names of
        the tensors that are read."""
        if self.updater is None:
            raise WeightUpdateError(
                "this model runs over the bridge to transformers, where weights cannot be updated"
            )
        return self.updater.check(checkpoint, is_partial)

    def update_weights(self, checkpoint: Checkpoint, names: Sequence[str]) -> None:
        """Replace weights, on all ranks, after `check_update`."""
        assert self.updater is not None
        refill, ranks = self.updater.begin(names), self.ranks
        with torch.inference_mode():
            if ranks.is_distributed:
                update = Update([_described(name, checkpoint.read(name)) for name in names])
                self.rank_group.send([update] * len(self.writers))
            for name in names:
                tensor = checkpoint.read(name)
                if ranks.is_distributed:
                    tensor = tensor.to(self.registry.device).contiguous()
                    ranks.broadcast(tensor)
                refill.give(name, tensor)
            refill.finish()

    def check_giving_back(self, *, weights: bool) -> None:
        """Raise InvalidInputError unless `give_back_memory` is possible."""
        if self.registry.device.type != "cpu" or self.ranks.is_distributed:
            raise InvalidInputError(
                "memory is given back on a CPU with one rank only: on GPUs, end the server and "
                "start it again instead"
            )
        if weights and self.updater is None:
            raise InvalidInputError(
                "this model runs over the bridge to transformers, where weights cannot be given "
                "back: keep them (level 1)"
            )

    def give_back_memory(self, *, weights: bool) -> int:
        """Give the memory of the KV cache, and of the weights that an update fills, back to the
        operating system; return the bytes that were in use. Addresses stay valid, but what was
        stored is lost."""
        self.check_giving_back(weights=weights)
        tensors = [entry.tensor for entry in self.registry.entries() if entry.through]
        if weights:
            assert self.updater is not None
            tensors += self.updater.tensors()
        return sum(give_back(tensor.data_ptr(), tensor.nbytes) for tensor in tensors)

    def _receive_weights(self, update: Update) -> None:
        assert self.updater is not None
        refill = self.updater.begin([name for name, _, _ in update.tensors])
        for name, shape, dtype in update.tensors:
            tensor = torch.empty(shape, dtype=dtype, device=self.registry.device)
            self.ranks.broadcast(tensor)
            refill.give(name, tensor)
        refill.finish()

    def _dispatch(self, step: Step) -> list[tuple[Runner, GraphKey]]:
        """Return the launches of a step in order. Between two of them, the host reads nothing."""
        launches: list[Sequence[Runner]] = []
        if step.catches_up:
            assert self.speculation is not None
            launches.append([self.speculation.catch_up])
        if step.width > 1:
            cycle = self.cycles[step.width]
            if step.catches_up:
                launches.append([cycle.draft])  # the previous step made no drafts
            launches += [[runner] for runner in cycle]
        elif step.is_decode:
            launches.append([self.decode])
        else:
            launches.append(self._prefills_for(step))
            if self.cycles:
                launches.append([self.cycles[self.limits.max_width].draft])
        return [_picked(runners, step) for runners in launches]

    def _prefills_for(self, step: Step) -> tuple[Runner, ...]:
        if step.is_scored:
            return self.scored_prefills
        return self.pooled_prefills if step.is_pooled else self.prefills

    def _download(self, message: StepMessage) -> Download:
        num_rows = len(message.slots)
        num_tokens = num_rows * message.width if message.width > 1 else sum(message.counts)
        ring = self._ring(message)
        return ring.download(num_rows, num_tokens, with_logprobs=message.with_logprobs)

    def _ring(self, message: StepMessage) -> ResultRing:
        if message.width > 1:
            assert self.speculation is not None
            return self.speculation.verified
        if message.is_scored:
            return self.scored_results
        return self.pooled_results if message.is_pooled else self.results


def _picked(runners: Sequence[Runner], step: Step) -> tuple[Runner, GraphKey]:
    """Return the first runner that has a size for the step, and that size."""
    reasons = []
    for runner in runners:
        key = runner.pick(step.num_tokens, step.num_rows)
        if not isinstance(key, NoCaptureSize):
            return runner, key
        reasons.append(key.reason)
    raise CapacityError(f"no capture size fits a planned step: {'; '.join(reasons)}")


def _refuse_prompts(key: GraphKey, message: StepMessage) -> None:
    """Raise if a row has more tokens than the one that a decode graph computes for each row."""
    if sum(message.counts) != len(message.slots):
        row = next(i for i, count in enumerate(message.counts) if count != 1)
        raise ContractError(
            f"key {key} was dispatched with {message.counts[row]} tokens in row {row}: it computes "
            "one token of each row",
            tensor=COUNTS,
        )


def _work(launches: Sequence[tuple[Runner, GraphKey]], num_rows: int) -> Work:
    return Work(tuple([key for _, key in launches]), num_rows)


def _described(name: str, tensor: torch.Tensor) -> SentTensor:
    return SentTensor(name, tuple(tensor.shape), tensor.dtype)


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"out of GPU memory while {doing}: lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs"
        ) from error
