"""The worker: everything on the device. It loads, records, keeps the tables and runs steps.

The scheduler tells it, as its `SlotWriter`, whose row changes; the engine hands it a step and gets
back results that arrive later. It does not know queues, text or who is finished.
"""

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from slotzero.config import DTYPES, EngineConfig
from slotzero.errors import CapacityError, ConfigError
from slotzero.graph import GraphKey, Ladder, Refusal, Registry, Runner
from slotzero.graph.backend import Backend, EagerBackend, backend_for
from slotzero.graph.runner import Record
from slotzero.graph.transfer import Download
from slotzero.kernels.contract import kernels_for
from slotzero.loading.checkpoint import Checkpoint
from slotzero.models.config import FULL, KvGroup, ModelConfig, parse_config
from slotzero.models.decoder import Decoder, KvPages
from slotzero.models.rope import frequencies
from slotzero.models.weights import Progress, load_weights, random_weights
from slotzero.pools.budget import Demand, GroupShape, free_bytes, split
from slotzero.pools.tables import SlotTables
from slotzero.request import Request
from slotzero.runners import passes
from slotzero.runners.results import ResultRing
from slotzero.sampling.tables import SAMPLING_TABLES, encode
from slotzero.speculative.build import Prepared, Target, prepare_drafter
from slotzero.speculative.drafter import MOST_PENDING, Drafter
from slotzero.speculative.passes import NUM_TRIED, NUM_VERIFIED, PATH, VERIFIED
from slotzero.speculative.shape import places_ahead
from slotzero.speculative.speculation import Cycle, Speculation, speculation_tables
from slotzero.step import Step

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

    def __init__(self, download: Download, names: Sequence[str], width: int) -> None:
        """`names` of what is downloaded, in its order; of the last ones maybe nothing is."""
        self._download, self._names, self._width = download, names, width

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

    @property
    def max_width(self) -> int:
        return self.widths[-1]


class Worker:
    def __init__(self, config: EngineConfig, checkpoint: Checkpoint, progress: Progress) -> None:
        device, backend = choose_backend(config)
        model = parse_config(checkpoint.config)
        dtype = choose_dtype(config.dtype, device, checkpoint.config)
        self.registry = registry = Registry(device)
        self.kernels = kernels_for(device)
        for group in model.groups:
            for heads in group.shapes:
                self.kernels.refuse(heads)
        if config.load_format == "dummy":
            weights = random_weights(model, registry, self.kernels, dtype, config.seed)
        else:
            weights = load_weights(model, checkpoint, registry, self.kernels, dtype, progress)
        turns = {
            g.name: registry.constant(f"rope_{g.name}", frequencies(g.rope).to(device))
            for g in model.groups
        }
        self.model, self.weights = model, weights
        self.decoder = decoder = Decoder(model, weights, turns, self.kernels)
        self.vocab_size = model.vocab_size
        prepared: Prepared | None = None
        if config.speculative is not None:
            prepared = prepare_drafter(
                config,
                Target(model, weights, checkpoint, registry, self.kernels, dtype, progress),
            )
        self.weight_bytes = sum(
            e.tensor.nbytes for e in registry.entries() if e.name.startswith("weight.")
        )
        groups = (*model.groups, *(prepared.groups if prepared else ()))
        shapes = group_shapes(groups, config.page_size, dtype)
        shares = prepared is None or prepared.shares_prefixes
        self.limits = limits = _resolve(config, device, backend, dtype, shapes, model, shares)
        self.page_tables = tuple(page_table(shape.name) for shape in shapes)
        pages_per_slot = -(-limits.max_model_len // config.page_size)
        self.tables = SlotTables(
            registry,
            limits.max_num_seqs,
            limits.max_model_len,
            pages_per_slot,
            model.vocab_size,
            self.page_tables,
            () if prepared is None else speculation_tables(config.tree),
        )
        kv = {
            shape.name: KvPages(
                _kv_pages(registry, shape, limits.num_pages[shape.name]),
                self.tables[page_table(shape.name)],
            )
            for shape in shapes
        }
        rows = limits.max_num_seqs
        drafter: Drafter | None = None
        if prepared is not None:
            drafter = prepared.drafter(decoder, registry, self.tables, kv, limits.max_width)
        self.passes = step = passes.Passes(
            registry,
            decoder,
            self.kernels,
            self.tables,
            kv,
            rows,
            limits.max_num_batched_tokens,
            dtype,
            drafter,
        )
        graphs = backend_for(backend, device)
        self.decode = Runner(step.decode_spec(Ladder.up_to(rows)), registry, graphs)
        self.prefills = _prefill_runners(step, registry, graphs, limits)
        self._results = ResultRing(registry, passes.RESULTS)
        self.tree = config.tree
        self._speculation: Speculation | None = None
        if drafter is not None:
            self._speculation = Speculation(
                registry,
                decoder,
                drafter,
                kv,
                config.tree,
                limits.widths[1:],
                config.page_size,
                graphs,
            )
        self._seconds: dict[GraphKey, float] = {}

    @property
    def runners(self) -> tuple[Runner, ...]:
        more = () if self._speculation is None else self._speculation.runners
        return self.decode, *self.prefills, *more

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

    def run(self, step: Step) -> Results:
        """Launches one step and returns before it has run, where the device allows."""
        with torch.inference_mode():
            launches = self._dispatch(step)
            for runner, key in launches:
                with _explained(f"recording {key}"):
                    runner.prepare(key)
            self.tables.apply()
            self.registry.begin_step()
            self.registry.publish(passes.SLOTS, [row.slot for row in step.rows])
            if any(passes.COUNTS in runner.spec.published for runner, _ in launches):
                self.registry.publish(passes.COUNTS, [row.count for row in step.rows])
            for runner, key in launches:
                with _explained(f"running {key}"):
                    runner.run(key, runner.num_tokens(step.num_tokens, step.num_rows))
            return self._download(step)

    def seconds(self, width: int, num_rows: int) -> float:
        """Of a step in which all decode; over empty rows, and measured when first asked for."""
        runners = self.cycles[width] if width > 1 else (self.decode,)
        return sum(self._seconds_of(runner, num_rows) for runner in runners)

    def _seconds_of(self, runner: Runner, num_rows: int) -> float:
        key = runner.pick(num_rows, num_rows)
        assert isinstance(key, GraphKey), key
        if key not in self._seconds:
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

    def _download(self, step: Step) -> Results:
        ring = self._results
        if step.width > 1:
            assert self._speculation is not None
            ring = self._speculation.verified
        wanted = any(row.request.params.logprobs is not None for row in step.rows)
        download = ring.download(step.num_rows, step.width, with_logprobs=wanted)
        return Results(download, ring.names, step.width)

    # SlotWriter: in the order of these calls, before the step that was planned with them.

    def admitted(
        self, request: Request, tokens: list[int], num_computed: int, pages: list[list[int]]
    ) -> None:
        stage, slot = self.tables.stage, request.slot
        stage("tokens", slot, tokens)
        stage("length", slot, [num_computed])
        stage("target", slot, [request.target])
        for table, numbers in zip(self.page_tables, pages, strict=True):
            stage(table, slot, numbers)
        prompt_len = len(request.prompt_token_ids)
        row = encode(request.params, request.seed, prompt_len, request.stop_ids)
        for spec in SAMPLING_TABLES:
            stage(spec.name, slot, _without_tail(row[spec.name], spec.neutral))
        if self._speculation is not None:
            self._speculation.stage(request, num_computed)

    def pages_changed(
        self, request: Request, group: int, first_index: int, pages: list[int]
    ) -> None:
        self.tables.stage(self.page_tables[group], request.slot, pages, first_index)
        if self._speculation is not None:
            self._speculation.stage_paged(request)

    def constrained(self, request: Request) -> None:
        assert request.grammar is not None
        self.tables.stage("is_masked", request.slot, [1])
        self.tables.stage("allowed", request.slot, request.grammar.allowed.view(np.int32))

    def released(self, slot: int) -> None:
        self.tables.reset(slot)


def _picked(runners: Sequence[Runner], step: Step) -> tuple[Runner, GraphKey]:
    """The first that has a size for the step."""
    reasons = []
    for runner in runners:
        key = runner.pick(step.num_tokens, step.num_rows)
        if not isinstance(key, Refusal):
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
) -> Limits:
    on_cpu, max_position = device.type == "cpu", model.max_position
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} is above the model's own limit of {max_position}"
        )
    rows = config.max_num_seqs or min(
        default_max_num_seqs(device), config.max_num_batched_tokens or sys.maxsize
    )
    budget = config.kv_cache_memory or free_bytes(device, config.gpu_memory_utilization)
    tokens = config.max_num_batched_tokens or max(rows, 512 if on_cpu else 8192)
    widths = choose_widths(config)
    ahead = places_ahead(widths[-1], config.tree)
    chunk = max(tokens, 4 * ahead + MOST_PENDING * (ahead > 0))  # as SchedulerConfig.reach
    demand = Demand(rows, chunk, config.expected_len, config.max_model_len, max_position)
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
        enable_prefix_caching=config.enable_prefix_caching and shares_prefixes and not is_uneven,
    )


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


def _without_tail(values: Sequence[int | float], neutral: int | float) -> Sequence[int | float]:
    """The row without the columns at its end that are neutral already."""
    n = len(values)
    while n and values[n - 1] == neutral:
        n -= 1
    return values[:n]
