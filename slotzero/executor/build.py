"""Construction of a worker, in this order:

1. The weights of the target model and of the drafter are loaded, sharded for this rank.
2. The limits are resolved from the memory that is left.
3. The slot tables, the KV cache, recurrent states and the drafter's own tensors are allocated.
4. The runners are created. Nothing is captured yet: `Worker.record` does that.

All tensors that CUDA graphs read are registered in this process, never after the first capture.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from slotzero.config import EngineConfig
from slotzero.errors import CapacityError
from slotzero.executor.determinism import is_deterministic, refuse_dependence
from slotzero.executor.limits import (
    MAX_CAPTURED_TOKENS,
    Limits,
    captured_prefill_sizes,
    choose_backend,
    choose_dtype,
    choose_kv_dtype,
    eager_prefill_sizes,
    group_shapes,
    resolve_limits,
    state_shape,
    unpack_if_faster,
)
from slotzero.executor.rank_group import RankGroup
from slotzero.executor.routed_experts import RoutedExperts, routed_experts
from slotzero.executor.step_watch import StepWatch
from slotzero.executor.table_writer import TableWriter
from slotzero.executor.worker import Worker
from slotzero.graph import Ladder, Registry, Runner
from slotzero.graph.backend import Backend, EagerBackend, backend_for
from slotzero.kernels.contract import Kernels, kernels_for
from slotzero.kernels.float8_kv import CODES, no_scales
from slotzero.kernels.types import PagedKv
from slotzero.kernels.types_recurrent import States
from slotzero.models.bridge.config import BridgedConfig
from slotzero.models.bridge.load import load_bridged
from slotzero.models.cache_scales import read_cache_scales
from slotzero.models.checkpoint import Checkpoint
from slotzero.models.config import FULL, ModelConfig
from slotzero.models.decoder import Decoder
from slotzero.models.implementation import parse_model
from slotzero.models.model import Model, ModelShape
from slotzero.models.pooling import read_pooling
from slotzero.models.rope import frequencies
from slotzero.models.routing import CHOSEN_EXPERTS, Routing
from slotzero.models.weight_store import WeightStore
from slotzero.models.weight_update import WeightUpdater
from slotzero.models.weights import DecoderWeights, Progress, load_weights, random_weights
from slotzero.pools.budget import GroupShape
from slotzero.pools.states import SNAPSHOT_ROWS, StateShape, snapshot_tables
from slotzero.pools.tables import SlotTables, Staging
from slotzero.runners.passes import RESULTS, Passes
from slotzero.runners.pooler import POOLED
from slotzero.runners.prompt_scores import SCORED
from slotzero.runners.results import ResultRing
from slotzero.speculative.build import DraftTarget, Prepared, prepare_drafter
from slotzero.speculative.drafter import Drafter
from slotzero.speculative.speculation import SpeculativeRunners, speculation_tables

_log = logging.getLogger("slotzero")

KV_SCALES = "kv_scales"
"""Name in the registry of the scales of a KV group, before the group's name."""


def build_worker(
    config: EngineConfig, checkpoint: Checkpoint, progress: Progress, rank_group: RankGroup
) -> Worker:
    """Build this rank's worker; `progress` is called while weights are loaded."""
    return _Builder(config, checkpoint, progress, rank_group).worker()


@dataclass(frozen=True)
class _Loaded:
    """The models of this rank, before memory for requests is allocated."""

    model: ModelShape
    weights: DecoderWeights | None
    decoder: Model
    drafter: Prepared | None
    num_bytes: int = 0

    @property
    def shares_prefixes(self) -> bool:
        return self.drafter is None or self.drafter.shares_prefixes


@dataclass(frozen=True)
class _Memory:
    """The memory for requests."""

    tables: SlotTables
    kv: Mapping[str, PagedKv]
    states: States | None
    drafter: Drafter | None
    routed: RoutedExperts | None


class _Builder:
    def __init__(
        self,
        config: EngineConfig,
        checkpoint: Checkpoint,
        progress: Progress,
        rank_group: RankGroup,
    ) -> None:
        self._config, self._checkpoint, self._progress = config, checkpoint, progress
        self._rank_group, self._ranks = rank_group, rank_group.ranks
        self._device, self._backend = choose_backend(config)
        self._dtype = choose_dtype(config.dtype, self._device, checkpoint.config)
        parsed = parse_model(checkpoint.config, config.model_impl)
        if (
            isinstance(parsed, BridgedConfig)
            and config.model_impl == "auto"
            and not self._ranks.rank
        ):
            _log.warning(
                "%s has no family in Slotzero: it runs over the bridge to transformers (see "
                "--model-impl)",
                parsed.architecture,
            )
        if isinstance(parsed, ModelConfig):
            parsed = unpack_if_faster(parsed, config.quantization, self._device, self._dtype)
        self._whole: ModelShape = parsed
        self._pooling = read_pooling(
            checkpoint, parsed.hidden_size, config.pooling, config.score_tokens
        )
        self._model = self._whole.shard(self._ranks)
        self._registry = Registry(self._device)
        self._kernels: Kernels = kernels_for(self._device, config.deterministic)
        self._store = WeightStore(self._registry, self._kernels, self._dtype)
        refuse_dependence(config, parsed, self._kernels, self._device)
        self._kv_dtype = choose_kv_dtype(config.kv_cache_dtype, parsed, self._kernels, self._dtype)

    def worker(self) -> Worker:
        loaded = self._load()
        groups = (*self._model.groups, *(loaded.drafter.groups if loaded.drafter else ()))
        shapes = group_shapes(groups, self._config.page_size, self._kv_dtype)
        states = state_shape(
            loaded.decoder.config, self._device, self._dtype, self._config.deterministic
        )
        limits = resolve_limits(
            self._config,
            self._model,
            shapes,
            states,
            device=self._device,
            backend=self._backend,
            dtype=self._dtype,
            shares_prefixes=loaded.shares_prefixes,
            weight_bytes=loaded.num_bytes,
            ranks=self._ranks,
            is_deterministic=is_deterministic(loaded.decoder.is_batch_invariant, self._ranks),
        )
        memory = self._allocate(loaded, limits, shapes, states)
        passes = Passes(
            self._registry,
            loaded.decoder,
            self._kernels,
            memory.tables,
            memory.kv,
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            self._dtype,
            self._pooling,
            memory.drafter,
            memory.states,
        )
        graphs = backend_for(self._backend, self._device)
        decode_sizes = Ladder.up_to(limits.max_num_seqs)
        page_tables = tuple(page_table(shape.name) for shape in shapes)
        return Worker(
            rank_group=self._rank_group,
            limits=limits,
            registry=self._registry,
            kernels=self._kernels,
            model=loaded.model,
            weights=loaded.weights,
            weight_bytes=loaded.num_bytes,
            decoder=loaded.decoder,
            tables=memory.tables,
            page_tables=page_tables,
            states=memory.states,
            drafter=memory.drafter,
            routed_experts=memory.routed,
            tree=self._config.tree,
            passes=passes,
            decode=Runner(passes.decode_spec(decode_sizes), self._registry, graphs),
            pooling=self._pooling,
            prefills=_prefill_runners(passes, self._registry, graphs, limits),
            pooled_prefills=_prefill_runners(
                passes, self._registry, graphs, limits, "pooled ", is_pooled=True
            ),
            scored_prefills=_prefill_runners(
                passes, self._registry, graphs, limits, "scored ", is_scored=True, is_pooled=True
            ),
            results=ResultRing(self._registry, RESULTS, self._deadline),
            pooled_results=ResultRing(self._registry, (POOLED, *RESULTS), self._deadline),
            scored_results=ResultRing(self._registry, (POOLED, *SCORED, *RESULTS), self._deadline),
            speculation=self._speculation(loaded, limits, memory, states, graphs),
            writers=self._writers(limits, memory, page_tables),
            updater=self._updater(shapes),
            watch=StepWatch(
                self._config.step_timeout,
                self._ranks.rank,
                self._deadline,
                self._rank_group.ask_for_stacks,
            ),
        )

    def _load(self) -> _Loaded:
        registry, kernels = self._registry, self._kernels
        for group in self._model.groups:
            for heads in group.shapes:
                kernels.refuse(heads, self._kv_dtype is CODES)
        for name, tensor in kernels.workspace().items():
            registry.constant(name, tensor)
        turns = {
            g.name: registry.constant(f"rope_{g.name}", frequencies(g.rope).to(self._device))
            for g in self._model.groups
        }
        if isinstance(self._whole, BridgedConfig):
            loaded = self._load_bridged(self._whole, turns)
        else:
            assert isinstance(self._whole, ModelConfig)
            loaded = self._load_family(self._whole, turns)
        weights = [e for e in registry.entries() if e.name.startswith("weight.")]
        return replace(loaded, num_bytes=sum(entry.tensor.nbytes for entry in weights))

    def _load_family(self, whole: ModelConfig, turns: Mapping[str, Tensor]) -> _Loaded:
        """Load a model of a family of this package, and its drafter."""
        config, registry, kernels = self._config, self._registry, self._kernels
        model, weights = whole.shard(self._ranks), self._weights(whole)
        routing = Routing.of(model, registry)
        if model.recurrent is not None:
            model = model.with_snapshots(config.snapshot_interval)
        decoder = Decoder(model, weights, turns, kernels, routing, self._ranks)
        return _Loaded(self._model, weights, decoder, self._drafter(decoder, routing))

    def _load_bridged(self, model: BridgedConfig, turns: Mapping[str, Tensor]) -> _Loaded:
        """Load a model of transformers."""
        config = self._config
        seed = config.weights_seed if config.load_format == "dummy" else None
        decoder = load_bridged(
            model,
            self._checkpoint,
            self._registry,
            self._kernels,
            self._dtype,
            turns,
            self._progress,
            seed,
        )
        return _Loaded(model, None, decoder, self._drafter(decoder, None))

    def _drafter(self, decoder: Model, routing: Routing | None) -> Prepared | None:
        config = self._config
        if config.speculative is None:
            return None
        target = DraftTarget(
            self._whole,
            decoder,
            routing,
            self._checkpoint,
            self._store,
            self._kv_dtype is CODES,
            self._progress,
            self._ranks,
            config.speculative,
        )
        return prepare_drafter(config, target)

    def _weights(self, whole: ModelConfig) -> DecoderWeights:
        config, ranks = self._config, self._ranks
        if config.load_format == "dummy":
            return random_weights(whole, self._store, config.weights_seed, ranks=ranks)
        return load_weights(whole, self._checkpoint, self._store, self._progress, ranks=ranks)

    def _allocate(
        self,
        loaded: _Loaded,
        limits: Limits,
        shapes: Sequence[GroupShape],
        states: StateShape | None,
    ) -> _Memory:
        registry, interval = self._registry, limits.snapshot_interval
        more = () if loaded.drafter is None else speculation_tables(self._config.tree)
        tables = SlotTables(
            registry,
            limits.max_num_seqs,
            limits.max_model_len,
            limits.pages_per_slot,
            self._model.vocab_size,
            [page_table(shape.name) for shape in shapes],
            (*more, *snapshot_tables(interval, limits.max_model_len)),
        )
        scales = self._kv_scales(loaded, shapes)
        kv = {
            shape.name: PagedKv(
                _kv_pages(registry, shape, limits.num_pages[shape.name]),
                tables[page_table(shape.name)],
                scales.get(shape.name),
            )
            for shape in shapes
        }
        state_rows = None
        if states is not None:
            kept = tables[SNAPSHOT_ROWS] if interval else None
            state_rows = states.tables(registry, limits.max_num_seqs, limits.num_snapshots, kept)
        drafter = None
        if loaded.drafter is not None:
            width = limits.max_width
            drafter = loaded.drafter.drafter(loaded.decoder, registry, tables, kv, width)
        routed = None
        if self._config.enable_return_routed_experts:
            names = [page_table(group.name) for group in self._model.groups]
            routed = routed_experts(self._model, registry, kv, names)
            kv = {**kv, CHOSEN_EXPERTS: routed.kv}  # not the drafter's, which has experts too
        return _Memory(tables, kv, state_rows, drafter, routed)

    def _updater(self, shapes: Sequence[GroupShape]) -> WeightUpdater | None:
        """Return what replaces weights. The scales of a drafter's KV stay: they have no influence
        on answers."""
        whole = self._whole
        if not isinstance(whole, ModelConfig):
            return None
        scales = {}
        if self._kv_dtype is CODES:
            scales = {s.name: self._registry[f"{KV_SCALES}_{s.name}"] for s in shapes}
        return WeightUpdater(
            whole, self._store, scales, lambda given: read_cache_scales(whole, given)
        )

    def _kv_scales(self, loaded: _Loaded, shapes: Sequence[GroupShape]) -> dict[str, Tensor]:
        """Register the scales [layers, 2] of each group; none if pages hold numbers."""
        if self._kv_dtype is not CODES:
            return {}
        read: dict[str, Tensor] = {}
        if isinstance(self._model, ModelConfig):
            read |= read_cache_scales(self._model, self._checkpoint)
        if loaded.drafter is not None:
            read |= loaded.drafter.read_cache_scales()
        return {
            s.name: self._registry.constant(
                f"{KV_SCALES}_{s.name}",
                read.get(s.name, no_scales(s.num_layers)).to(self._device),
            )
            for s in shapes
        }

    @property
    def _deadline(self) -> float | None:
        """Return how many seconds to wait for the results of a step; None: forever.

        With several ranks the wait is limited, because another rank may be gone.
        """
        return self._config.rank_timeout if self._ranks.is_distributed else None

    def _speculation(
        self,
        loaded: _Loaded,
        limits: Limits,
        memory: _Memory,
        states: StateShape | None,
        graphs: Backend,
    ) -> SpeculativeRunners | None:
        if memory.drafter is None:
            return None
        num_drafted = limits.max_num_seqs * limits.max_width
        return SpeculativeRunners(
            self._registry,
            loaded.decoder,
            memory.drafter,
            memory.kv,
            self._config.tree,
            limits.widths[1:],
            graphs,
            self._deadline,
            memory.states,
            None if states is None else states.trail(self._registry, num_drafted),
        )

    def _writers(
        self, limits: Limits, memory: _Memory, page_tables: Sequence[str]
    ) -> tuple[TableWriter, ...]:
        """Create one writer per DP rank, this rank's first."""
        tables = memory.tables
        remote = range(1, self._ranks.num_dp_ranks)
        stagings = [tables, *(Staging(limits.max_num_seqs, tables.specs) for _ in remote)]
        return tuple(
            TableWriter(
                staging,
                page_tables,
                limits.page_size,
                limits.snapshot_interval,
                memory.drafter is not None,
                self._model.vocab_size,
                self._config.logprobs_mode,
            )
            for staging in stagings
        )


def _prefill_runners(
    passes: Passes,
    registry: Registry,
    graphs: Backend,
    limits: Limits,
    prefix: str = "",
    *,
    is_scored: bool = False,
    is_pooled: bool = False,
) -> tuple[Runner, ...]:
    eager_sizes = eager_prefill_sizes(limits, registry.device)
    name = f"{prefix}prefill"
    if limits.backend != "cuda":
        spec = passes.prefill_spec(name, *eager_sizes, is_scored, is_pooled)
        return (Runner(spec, registry, EagerBackend(), "prefill is not recorded"),)
    spec = passes.prefill_spec(name, *captured_prefill_sizes(limits), is_scored, is_pooled)
    captured = Runner(spec, registry, graphs)
    if limits.max_num_batched_tokens <= MAX_CAPTURED_TOKENS:
        return (captured,)
    spec = passes.prefill_spec(f"long {name}", *eager_sizes, is_scored, is_pooled)
    reason = f"more than {MAX_CAPTURED_TOKENS} tokens"
    return captured, Runner(spec, registry, EagerBackend(), reason)


def _zeros(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros. On a CPU they take memory page by page, when they are first written."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=dtype, device=device)
    zeros = np.zeros(math.prod(size) * dtype.itemsize, np.uint8)
    return torch.from_numpy(zeros).view(dtype).view(size)


def page_table(group: str) -> str:
    """Return the name of the page table of a KV group."""
    return "page_table" if group == FULL else f"page_table_{group}"


def _kv_pages(registry: Registry, shape: GroupShape, num_pages: int) -> torch.Tensor:
    size = (shape.num_layers, num_pages, shape.page_size, shape.num_kv_heads, shape.width)
    try:
        pages = _zeros(size, shape.dtype, registry.device)
    except (torch.OutOfMemoryError, RuntimeError, MemoryError) as error:
        raise CapacityError(
            f"{num_pages} KV pages do not fit into memory: lower --kv-cache-memory"
        ) from error
    return registry.table(
        f"kv_{shape.name}",
        pages,
        axis=1,
        through=page_table(shape.name),
        is_float8=shape.dtype is CODES,
    )
