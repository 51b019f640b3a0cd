"""The worker: everything on the device. It loads, records, keeps the tables and runs steps.

Schedulers tell its writers whose row changes; the engine hands it a step and gets back results that
arrive later. It does not know queues, text or who is finished.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from slotzero.config import DTYPES, EngineConfig
from slotzero.distributed.ranks import Ranks
from slotzero.errors import CapacityError, ConfigError, ContractError
from slotzero.executor.rank_group import RankGroup
from slotzero.executor.step_message import Message, Orders, Timing
from slotzero.executor.table_writer import TableWriter
from slotzero.graph import GraphKey, Ladder, NoCaptureSize, Registry, Runner
from slotzero.graph.backend import Backend, EagerBackend, backend_for
from slotzero.graph.runner import Record
from slotzero.graph.transfer import Arriving, Download
from slotzero.kernels.contract import kernels_for
from slotzero.kernels.types_recurrent import States
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import FULL, KvGroup, ModelConfig, parse_config
from slotzero.models.decoder import Decoder, KvPages
from slotzero.models.rope import frequencies
from slotzero.models.routing import Routing
from slotzero.models.shards import sharded
from slotzero.models.weights import Progress, load_weights, random_weights
from slotzero.pools.budget import Demand, GroupShape, free_bytes, split
from slotzero.pools.pages import KvPool, PagePool, reach
from slotzero.pools.states import SNAPSHOT_ROWS, StateShape, snapshot_tables
from slotzero.pools.tables import SlotTables, Staging
from slotzero.runners import passes
from slotzero.runners.results import ResultRing
from slotzero.speculative.build import Prepared, Target, prepare_drafter
from slotzero.speculative.drafter import MOST_PENDING, Drafter
from slotzero.speculative.passes import NUM_TRIED, NUM_VERIFIED, PATH, VERIFIED
from slotzero.speculative.speculation import Cycle, Speculation, speculation_tables
from slotzero.step import Step
from slotzero.tree_shape import places_ahead

MOST_RECORDED = 8192  # tokens of a recorded prefill; beyond, launches hide behind the work
FEW_ROWS = 8  # a recorded prefill has rows for so many, or for all
EAGER_STEP = {
    "cpu": 16,
    "cuda": 256,
}  # token sizes of an eager prefill: it costs nothing to have many


@dataclass(frozen=True)
class RowLogprobs:
    chosen: float
    top_ids: list[int]
    top_values: list[float]


class Results:
    """What a launched step will have sampled; reading waits for the device."""

    def __init__(self, download: Arriving, names: Sequence[str], width: int) -> None:
        """`names` of what is downloaded, in its order; of the last ones maybe nothing is."""
        self._download, self._names, self._width = download, names, width

    def wait(self) -> None:
        self._download.wait()

    def tokens(self) -> list[list[int]]:
        if self._width == 1:
            return [[token] for token in self._part(passes.SAMPLED)]
        sampled, counts = self._part(VERIFIED), self._part(NUM_VERIFIED)
        return [[sampled[i] for i in self._chosen(row)[:num]] for row, num in enumerate(counts)]

    def drafts(self) -> list[tuple[int, int]]:
        """By row: how many drafts were tried, and how many were right."""
        pairs = zip(self._part(NUM_TRIED), self._part(NUM_VERIFIED), strict=True)
        return [(max(n - 1, 0), max(right - 1, 0)) for n, right in pairs]

    def logprobs(self, row: int) -> list[RowLogprobs]:
        """Of every token that counts, and then of others."""
        *_, chosen, ids, values = self._download.wait()
        return [
            RowLogprobs(chosen[i].item(), ids[i].tolist(), values[i].tolist())
            for i in self._chosen(row)
        ]

    def _chosen(self, row: int) -> list[int]:
        """Which of all that were sampled are the row's: those that count, and then others."""
        first = row * self._width
        nodes = range(self._width) if self._paths is None else self._paths[row]
        return [first + node for node in nodes]

    @cached_property
    def _paths(self) -> list[list[int]] | None:
        """Of trees, by row"""
        return self._part(PATH) if PATH in self._names else None

    def _part(self, name: str) -> list[Any]:
        return self._download.wait()[self._names.index(name)].tolist()


@dataclass(frozen=True)
class Limits:
    """What this machine and model allow, once the settings left open are resolved."""

    device: str
    backend: str
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    widths: tuple[int, ...]
    """Tokens that a row of a step may have where all decode, ascending: 1, and then some that
    verify drafts."""
    ahead: int
    """Places behind the newest token of a request that drafts may take."""
    num_pages: Mapping[str, int]  # by group of layers, page 0 included
    windows: Mapping[str, int | None]
    page_size: int
    enable_prefix_caching: bool
    num_snapshots: int = 0  # of recurrent states, row 0 included; 0: none are taken
    snapshot_interval: int = 0

    def pools(self) -> list[KvPool]:
        """One for each group of layers, and one of snapshots."""
        pools = [KvPool(PagePool(n), self.windows[g]) for g, n in self.num_pages.items()]
        if self.num_snapshots:
            rows = PagePool(self.num_snapshots)
            pools.append(KvPool(rows, interval=self.snapshot_interval))
        return pools

    @property
    def max_width(self) -> int:
        return self.widths[-1]


class Worker:
    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress,
        rank_group: RankGroup,
    ) -> None:
        device, backend = choose_backend(config)
        whole = parse_config(checkpoint.config)
        self.ranks = ranks = rank_group.ranks
        self._crew = rank_group
        model = sharded(whole, ranks)
        dtype = choose_dtype(config.dtype, device, checkpoint.config)
        self.registry = registry = Registry(device)
        self.kernels = kernels_for(device)
        for group in model.groups:
            for heads in group.shapes:
                self.kernels.refuse(heads)
        for name, tensor in self.kernels.held().items():
            registry.constant(name, tensor)
        if config.load_format == "dummy":
            weights = random_weights(
                whole, registry, self.kernels, dtype, config.weights_seed, ranks=ranks
            )
        else:
            weights = load_weights(
                whole, checkpoint, registry, self.kernels, dtype, progress, ranks=ranks
            )
        turns = {
            g.name: registry.constant(f"rope_{g.name}", frequencies(g.rope).to(device))
            for g in model.groups
        }
        self.model, self.weights = model, weights
        routing = Routing.of(model, registry)
        if model.recurrent is not None:
            model = replace(model, recurrent=model.recurrent.every(config.snapshot_interval))
        self.decoder = decoder = Decoder(model, weights, turns, self.kernels, routing, ranks)
        self.vocab_size = model.vocab_size
        prepared: Prepared | None = None
        if config.speculative is not None:
            prepared = prepare_drafter(
                config,
                Target(
                    whole,
                    decoder.vocabulary,
                    routing,
                    checkpoint,
                    registry,
                    self.kernels,
                    dtype,
                    progress,
                ),
            )
        self.weight_bytes = sum(
            e.tensor.nbytes for e in registry.entries() if e.name.startswith("weight.")
        )
        groups = (*model.groups, *(prepared.groups if prepared else ()))
        shapes = group_shapes(groups, config.page_size, dtype)
        states = _state_shape(model, device, dtype)
        shares = prepared is None or prepared.shares_prefixes
        self.limits = limits = _resolve(
            config, device, backend, dtype, shapes, model, shares, ranks, states
        )
        interval = limits.snapshot_interval
        self.page_tables = tuple(page_table(shape.name) for shape in shapes)
        pages_per_slot = -(-limits.max_model_len // config.page_size)
        self.tables = SlotTables(
            registry,
            limits.max_num_seqs,
            limits.max_model_len,
            pages_per_slot,
            model.vocab_size,
            self.page_tables,
            (
                *(() if prepared is None else speculation_tables(config.tree)),
                *snapshot_tables(interval, limits.max_model_len),
            ),
        )
        kv = {
            shape.name: KvPages(
                _kv_pages(registry, shape, limits.num_pages[shape.name]),
                self.tables[page_table(shape.name)],
            )
            for shape in shapes
        }
        rows = limits.max_num_seqs
        self.states: States | None = None
        if states is not None:
            kept = self.tables[SNAPSHOT_ROWS] if interval else None
            self.states = states.tables(registry, rows, limits.num_snapshots, kept)
        self.drafter: Drafter | None = None
        if prepared is not None:
            self.drafter = prepared.drafter(decoder, registry, self.tables, kv, limits.max_width)
        self.passes = step = passes.Passes(
            registry,
            decoder,
            self.kernels,
            self.tables,
            kv,
            rows,
            limits.max_num_batched_tokens,
            dtype,
            self.drafter,
            self.states,
        )
        graphs = backend_for(backend, device)
        self.decode = Runner(step.decode_spec(Ladder.up_to(rows)), registry, graphs)
        self.prefills = _prefill_runners(step, registry, graphs, limits)
        deadline = config.rank_timeout if ranks.is_distributed else None
        self._results = ResultRing(registry, passes.RESULTS, deadline)
        self.tree = config.tree
        self._speculation: Speculation | None = None
        if self.drafter is not None:
            self._speculation = Speculation(
                registry,
                decoder,
                self.drafter,
                kv,
                config.tree,
                limits.widths[1:],
                graphs,
                deadline,
                self.states,
                states.trail(registry, rows * limits.max_width) if states is not None else None,
            )
        theirs = [Staging(rows, self.tables.specs) for _ in range(1, ranks.num_lanes)]
        self.writers = tuple(
            TableWriter(
                staging,
                self.page_tables,
                limits.page_size,
                limits.snapshot_interval,
                self.drafter is not None,
            )
            for staging in (self.tables, *theirs)
        )
        """Of each lane, this rank's first."""
        self._seconds: dict[GraphKey, float] = {}

    @property
    def runners(self) -> tuple[Runner, ...]:
        more = () if self._speculation is None else self._speculation.runners
        return self.decode, *self.prefills, *more

    @property
    def overlaps(self) -> bool:
        """Whether `run` returns before the step has run, so that the host can work meanwhile."""
        return self.registry.device.type == "cuda"

    @property
    def result_rings(self) -> tuple[ResultRing, ...]:
        more = () if self._speculation is None else (self._speculation.verified,)
        return self._results, *more

    @property
    def cycles(self) -> Mapping[int, Cycle]:
        """By width; without a drafter there are none."""
        return {} if self._speculation is None else self._speculation.cycles

    @property
    def most_behind(self) -> int | None:
        """Plain steps after which a drafter must catch up; None: there is none."""
        return None if self._speculation is None else MOST_PENDING

    @property
    def kv(self) -> dict[str, dict[str, int | None]]:
        """How KV memory is split, by group of layers."""
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
        """Every size that is recorded at the start, largest first."""
        return [
            (runner, key)
            for runner in reversed(self.runners)
            if runner.is_recorded
            for key in runner.all_keys()
        ]

    def record(self, seen: Callable[[Record], None]) -> float:
        """Records every size of every recorded runner; -> seconds."""
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
        """Launches one step, and returns before it has run if the device `overlaps`; -> by lane"""
        launches = self._dispatch(step)
        orders = [
            Orders(
                writer.staging.take(),
                [row.slot for row in rows],
                [row.count for row in rows],
                step.num_tokens,
                step.num_rows,
                [key for _, key in launches],
                step.width,
                any(row.request.params.logprobs is not None for row in rows),
            )
            for writer, rows in zip(self.writers, step.lanes, strict=True)
        ]
        self._crew.tell(orders)
        with torch.inference_mode():
            self._launch(orders[0], launches)
            downloads: list[Arriving] = [self._download(orders[0])]
        downloads += [self._crew.sampled(lane) for lane in range(1, len(orders))]
        names = self._ring(step.width).names
        return [Results(download, names, step.width) for download in downloads]

    def obey(self, message: Message) -> Arriving | None:
        """As one of the other ranks -> what it sampled of requests of its own"""
        with torch.inference_mode():
            if isinstance(message, Timing):
                self._runner(message.key).seconds(message.key)
                return None
            launches = [(self._runner(key), key) for key in message.launches]
            for runner, key in launches:
                picked = runner.pick(message.num_tokens, message.num_rows)
                if picked != key:
                    raise ContractError(
                        f"rank {self.ranks.rank} would run {picked}, and rank 0 runs {key}: they "
                        "were started with other settings"
                    )
            self._launch(message, launches)
            return self._download(message) if self.ranks.dp_attention else None

    def _launch(self, orders: Orders, launches: Sequence[tuple[Runner, GraphKey]]) -> None:
        for runner, key in launches:
            with _explained(f"recording {key}"):
                runner.prepare(key)
        self.tables.put(orders.writes)
        self.registry.begin_step()
        self.registry.publish(passes.SLOTS, orders.slots)
        if any(passes.COUNTS in runner.spec.published for runner, _ in launches):
            self.registry.publish(passes.COUNTS, orders.counts)
        for runner, key in launches:
            with _explained(f"running {key}"):
                runner.run(key, runner.num_tokens(sum(orders.counts), len(orders.slots)))

    def _runner(self, key: GraphKey) -> Runner:
        return next(runner for runner in self.runners if runner.spec.name == key.runner)

    def seconds(self, width: int, num_rows: int) -> float:
        """Of a step in which all decode; over empty rows, and measured when first asked for."""
        runners = self.cycles[width] if width > 1 else (self.decode,)
        return sum(self._seconds_of(runner, num_rows) for runner in runners)

    def _seconds_of(self, runner: Runner, num_rows: int) -> float:
        key = runner.pick(num_rows, num_rows)
        assert isinstance(key, GraphKey), key
        if key not in self._seconds:
            self._crew.tell([Timing(key)] * len(self.writers))
            with torch.inference_mode():
                self._seconds[key] = runner.seconds(key)
        return self._seconds[key]

    def _dispatch(self, step: Step) -> list[tuple[Runner, GraphKey]]:
        """What is launched, in order; between two of them the host reads nothing."""
        launches: list[Sequence[Runner]] = []
        if step.catches_up:
            assert self._speculation is not None
            launches.append([self._speculation.catch_up])
        if step.width > 1:
            cycle = self.cycles[step.width]
            if step.catches_up:
                launches.append([cycle.draft])  # there is none from the step before
            launches += [[runner] for runner in cycle]
        elif step.is_decode:
            launches.append([self.decode])
        else:
            launches.append(self.prefills)
            if self.cycles:
                launches.append([self.cycles[self.limits.max_width].draft])
        return [_picked(runners, step) for runners in launches]

    def _download(self, orders: Orders) -> Download:
        ring, num_rows = self._ring(orders.width), len(orders.slots)
        return ring.download(num_rows, orders.width, with_logprobs=orders.with_logprobs)

    def _ring(self, width: int) -> ResultRing:
        if width == 1:
            return self._results
        assert self._speculation is not None
        return self._speculation.verified


def _picked(runners: Sequence[Runner], step: Step) -> tuple[Runner, GraphKey]:
    """The first that has a size for the step."""
    reasons = []
    for runner in runners:
        key = runner.pick(step.num_tokens, step.num_rows)
        if not isinstance(key, NoCaptureSize):
            return runner, key
        reasons.append(key.reason)
    raise CapacityError(f"a planned step has no size: {'; '.join(reasons)}")


def _prefill_runners(
    step: passes.Passes, registry: Registry, graphs: Backend, limits: Limits
) -> tuple[Runner, ...]:
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    eager_sizes = Ladder.multiples(EAGER_STEP[registry.device.type], tokens), Ladder.up_to(rows)
    if limits.backend != "cuda":
        spec = step.prefill_spec("prefill", *eager_sizes)
        return (Runner(spec, registry, EagerBackend(), "prefill is not recorded"),)
    few_or_all = Ladder(tuple(sorted({min(FEW_ROWS, rows), rows})))
    spec = step.prefill_spec("prefill", Ladder.doubling(min(tokens, MOST_RECORDED)), few_or_all)
    recorded = Runner(spec, registry, graphs)
    if tokens <= MOST_RECORDED:
        return (recorded,)
    spec = step.prefill_spec("long prefill", *eager_sizes)
    reason = f"more than {MOST_RECORDED} tokens"
    return recorded, Runner(spec, registry, EagerBackend(), reason)


@contextmanager
def _explained(doing: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise CapacityError(
            f"out of GPU memory while {doing}: lower --gpu-memory-utilization, "
            "--max-num-batched-tokens or --max-num-seqs"
        ) from error


def choose_backend(config: EngineConfig) -> tuple[torch.device, str]:
    wanted = "eager" if config.enforce_eager else config.backend
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("backend cuda: torch sees no CUDA device here; use --backend cpu")
    device = torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")
    if wanted == "auto":
        wanted = "cuda" if has_cuda else "cpu"
    if wanted == "cpu":
        from slotzero.kernels.cpu.build import compiler

        if compiler() is None:
            if config.backend == "cpu":
                raise ConfigError("backend cpu: compiling needs a C++ compiler; install g++")
            wanted = "eager"
    return device, wanted


def default_max_num_seqs(device: torch.device) -> int:
    return 16 if device.type == "cpu" else 256


def choose_dtype(wanted: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    if device.type == "cpu":
        if wanted not in ("auto", "float32"):
            raise ConfigError(f"dtype {wanted}: on a CPU only float32 is implemented")
        return torch.float32
    if wanted == "auto":
        stored = config.get("dtype") or config.get("torch_dtype")
        wanted = stored if stored in DTYPES else "bfloat16"
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def choose_widths(config: EngineConfig) -> tuple[int, ...]:
    if config.speculative is None:
        return (1,)
    if config.tree is not None:
        return (1, config.tree.num_nodes)
    most = config.speculative_steps + 1
    fewer = {config.speculative_steps // 2 + 1} if config.speculative_adaptive else set()
    return tuple(sorted({1, most, *fewer}))


def _resolve(
    config: EngineConfig,
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    shapes: Sequence[GroupShape],
    model: ModelConfig,
    shares_prefixes: bool,
    ranks: Ranks,
    states: StateShape | None,
) -> Limits:
    on_cpu, max_position = device.type == "cpu", model.max_position
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the model's own limit of {max_position}"
        )
    rows = config.max_num_seqs or min(
        default_max_num_seqs(device), config.max_num_batched_tokens or sys.maxsize
    )
    free = free_bytes(device, config.gpu_memory_utilization) // (ranks.size if on_cpu else 1)
    budget = ranks.least(config.kv_cache_memory or free)
    tokens = config.max_num_batched_tokens or max(rows, 512 if on_cpu else 8192)
    widths = choose_widths(config)
    ahead = places_ahead(widths[-1], config.tree)
    chunk = reach(tokens, ahead, MOST_PENDING if ahead else 0)
    demand = Demand(rows, chunk, config.expected_len, config.max_model_len, max_position)
    caches, num_snapshots = config.enable_prefix_caching and shares_prefixes, 0
    if states is not None:
        budget = states.reserve(rows, widths[-1], budget)
        if caches:
            num_snapshots = states.snapshots(config.snapshot_interval, budget, demand)
            budget -= num_snapshots * states.num_bytes
    pages, length = split(shapes, budget, demand, config.sliding_kv_memory)
    ropes = [group.rope for group in model.groups if group.rope.depends_on_prompt]
    # keys then depend on the prompt's length: equal prefixes do not have equal keys
    is_uneven = any(length > rope.original_max_position for rope in ropes)
    return Limits(
        device=str(device),
        backend=backend,
        dtype=str(dtype).removeprefix("torch."),
        max_model_len=length,
        max_num_seqs=rows,
        max_num_batched_tokens=tokens,
        widths=widths,
        ahead=ahead,
        num_pages=pages,
        windows={shape.name: shape.window for shape in shapes},
        page_size=config.page_size,
        enable_prefix_caching=caches and not is_uneven,
        num_snapshots=num_snapshots,
        snapshot_interval=config.snapshot_interval if num_snapshots else 0,
    )


def _state_shape(model: ModelConfig, device: torch.device, dtype: torch.dtype) -> StateShape | None:
    if model.recurrent is None:
        return None
    wanted = getattr(torch, model.recurrent.state_dtype)
    scan_dtype = dtype if device.type == "cpu" else wanted
    return StateShape(len(model.recurrent.layers), model.recurrent.scan, dtype, scan_dtype)


def group_shapes(groups: Sequence[KvGroup], page_size: int, dtype: torch.dtype) -> list[GroupShape]:
    return [
        GroupShape(
            g.name,
            len(g.layers),
            page_size,
            g.heads.num_kv_heads,
            g.heads.row_size,
            dtype,
            g.heads.window,
        )
        for g in groups
    ]


def page_table(group: str) -> str:
    return "page_table" if group == FULL else f"page_table_{group}"


def _kv_pages(registry: Registry, shape: GroupShape, num_pages: int) -> torch.Tensor:
    size = (shape.num_layers, num_pages, shape.page_size, shape.num_kv_heads, shape.width)
    try:
        pages = torch.zeros(size, dtype=shape.dtype, device=registry.device)
    except (torch.OutOfMemoryError, RuntimeError) as error:
        raise CapacityError(
            f"{num_pages} KV pages do not fit into memory: lower --kv-cache-memory"
        ) from error
    return registry.table(f"kv_{shape.name}", pages, axis=1, through=page_table(shape.name))
