"""The limits of one worker: its rows, tokens, pages, snapshots and capture sizes.

Settings that the user left open are resolved here, from the model and from the memory that is left
after loading its weights. This module allocates nothing.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from slotzero.config import DTYPES, EngineConfig
from slotzero.distributed.ranks import Ranks
from slotzero.errors import ConfigError
from slotzero.graph import Ladder
from slotzero.kernels.contract import Kernels
from slotzero.kernels.float8_kv import CODES
from slotzero.models.blocks.attention import KvGroup
from slotzero.models.config import ModelConfig
from slotzero.models.model import ModelShape
from slotzero.pools.budget import Demand, GroupShape, free_bytes, moderate, split
from slotzero.pools.pages import KvPool, PagePool, reach
from slotzero.pools.states import StateShape
from slotzero.speculative.drafter import MOST_PENDING
from slotzero.tree_shape import places_ahead

_log = logging.getLogger("slotzero")

MAX_CAPTURED_TOKENS = 8192  # in a prefill; with more, computation hides the launches anyway
FEW_ROWS = 8  # a captured prefill has this number of rows, or max_num_seqs
EAGER_STEP = {"cpu": 16, "cuda": 256}  # tokens between two sizes of an eager prefill


@dataclass(frozen=True)
class Limits:
    """Limits of one worker, with every open setting resolved."""

    device: str
    backend: str
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    widths: tuple[int, ...]
    """Tokens per row of a decode step, ascending: 1, then the widths that verify drafts."""
    ahead: int
    """Positions after the newest token of a request that drafts may occupy."""
    num_pages: Mapping[str, int]  # by KV group, page 0 included
    windows: Mapping[str, int | None]
    page_size: int
    enable_prefix_caching: bool
    num_snapshots: int = 0  # of recurrent states, row 0 included; 0: none are taken
    snapshot_interval: int = 0
    is_deterministic: bool = False
    """Tokens and log probabilities of a request depend on it alone, see docs/determinism.md."""

    def pools(self) -> list[KvPool]:
        """Create one pool for each KV group, and one for snapshots."""
        pools = [KvPool(PagePool(n), self.windows[g]) for g, n in self.num_pages.items()]
        if self.num_snapshots:
            rows = PagePool(self.num_snapshots)
            pools.append(KvPool(rows, interval=self.snapshot_interval))
        return pools

    @property
    def num_kv_tokens(self) -> int:
        """Tokens for which there are pages: of the groups without a window, if there are any."""
        whole = [name for name, window in self.windows.items() if window is None]
        groups = whole or self.windows
        return min(self.num_pages[name] - 1 for name in groups) * self.page_size

    @property
    def max_width(self) -> int:
        return self.widths[-1]

    @property
    def pages_per_slot(self) -> int:
        return -(-self.max_model_len // self.page_size)


class PrefillSizes(NamedTuple):
    """Capture sizes of one prefill runner."""

    tokens: Ladder
    rows: Ladder


def captured_prefill_sizes(limits: Limits) -> PrefillSizes:
    """Return the sizes of the prefill runner that is captured in CUDA graphs."""
    rows = limits.max_num_seqs
    tokens = min(limits.max_num_batched_tokens, MAX_CAPTURED_TOKENS)
    few_or_all = Ladder(tuple(sorted({min(FEW_ROWS, rows), rows})))
    return PrefillSizes(Ladder.doubling(tokens), few_or_all)


def eager_prefill_sizes(limits: Limits, device: torch.device) -> PrefillSizes:
    """Return the sizes of a prefill runner that is not captured: many, as they cost nothing."""
    tokens = Ladder.multiples(EAGER_STEP[device.type], limits.max_num_batched_tokens)
    return PrefillSizes(tokens, Ladder.up_to(limits.max_num_seqs))


def choose_backend(config: EngineConfig) -> tuple[torch.device, str]:
    wanted = "eager" if config.enforce_eager else config.backend
    has_cuda = torch.cuda.is_available()
    if wanted == "cuda" and not has_cuda:
        raise ConfigError("backend=cuda: torch finds no CUDA device; use --backend cpu")
    device = torch.device("cuda" if has_cuda and wanted != "cpu" else "cpu")
    if wanted == "auto":
        wanted = "cuda" if has_cuda else "cpu"
    if wanted == "cpu":
        from slotzero.kernels.cpu.build import compiler

        if compiler() is None:
            if config.backend == "cpu":
                raise ConfigError(
                    "backend=cpu builds its kernels and needs a C++ compiler: install g++, or use "
                    "--backend eager"
                )
            wanted = "eager"
    return device, wanted


def default_max_num_seqs(device: torch.device) -> int:
    return 16 if device.type == "cpu" else 256


def choose_dtype(wanted: str, device: torch.device, config: Mapping[str, Any]) -> torch.dtype:
    if device.type == "cpu":
        if wanted not in ("auto", "float32"):
            raise ConfigError(
                f"dtype={wanted}: only float32 is implemented on a CPU; use --dtype auto"
            )
        return torch.float32
    if wanted == "auto":
        stored = config.get("dtype") or config.get("torch_dtype")
        wanted = stored if stored in DTYPES else "bfloat16"
    dtype: torch.dtype = getattr(torch, wanted)
    return dtype


def choose_kv_dtype(
    wanted: str, model: ModelShape, kernels: Kernels, dtype: torch.dtype
) -> torch.dtype:
    """Return the dtype of KV pages; codes of FP8 are bytes."""
    if wanted == "none" or (wanted == "auto" and not model.quantization.asks_for_fp8_cache):
        return dtype
    if kernels.has_float8_kv:
        return CODES
    if wanted == "auto":
        _log.warning(
            "the model's config asks for an FP8 KV cache, which this GPU does not support: the KV "
            "cache is %s",
            _name_of(dtype),
        )
        return dtype
    raise ConfigError(
        f"kv_cache_dtype={wanted}: this GPU has no FP8 (compute capability 8.9 is needed); drop it"
    )


def unpack_if_faster(
    model: ModelConfig, wanted: str, device: torch.device, dtype: torch.dtype
) -> ModelConfig:
    """Return the model with the weights of a GGUF file unpacked, if it runs in float32 on a GPU.

    No tensor core multiplies float32: the plain product of unpacked weights is cuBLAS's, and small
    GGUF models, which alone run in float32, have room for them.
    """
    stored = model.quantization.stored
    if wanted != "auto" or stored is None or stored.name != "gguf":
        return model
    if device.type != "cuda" or dtype is not torch.float32:
        return model
    return replace(model, quantization=replace(model.quantization, unpacks=True))


def choose_widths(config: EngineConfig) -> tuple[int, ...]:
    if config.speculative is None:
        return (1,)
    if config.tree is not None:
        return (1, config.tree.num_nodes)
    most = config.speculative_steps + 1
    half = {config.speculative_steps // 2 + 1} if config.speculative_adaptive else set()
    return tuple(sorted({1, most, *half}))


class _Batch(NamedTuple):
    """Rows and tokens of the largest step."""

    rows: int
    tokens: int
    widths: tuple[int, ...]
    ahead: int


def resolve_limits(
    config: EngineConfig,
    model: ModelShape,
    shapes: Sequence[GroupShape],
    states: StateShape | None,
    *,
    device: torch.device,
    backend: str,
    dtype: torch.dtype,
    shares_prefixes: bool,
    weight_bytes: int,
    ranks: Ranks,
    is_deterministic: bool = False,
) -> Limits:
    """Resolve every open setting, and split the memory that is free now.

    `shares_prefixes` is false if the drafter does not allow prefix caching. On a CPU, the KV cache
    of a model with `weight_bytes` takes a moderate part of the memory.
    """
    max_position = model.max_position
    if config.max_model_len is not None and config.max_model_len > max_position:
        raise ConfigError(
            f"max_model_len={config.max_model_len} exceeds the model's own limit of {max_position}"
        )
    batch = _largest_batch(config, device)
    budget = _kv_budget(config, device, ranks)
    chunk = reach(batch.tokens, batch.ahead, MOST_PENDING if batch.ahead else 0)
    demand = Demand(batch.rows, chunk, config.expected_len, config.max_model_len, max_position)
    if device.type == "cpu" and config.kv_cache_memory is None:
        budget = ranks.least(moderate(shapes, budget, demand, weight_bytes))
    caches, num_snapshots = config.enable_prefix_caching and shares_prefixes, 0
    if states is not None:
        budget = states.reserve(batch.rows, batch.widths[-1], budget)
        if caches:
            num_snapshots = states.snapshots(config.snapshot_interval, budget, demand)
            budget -= num_snapshots * states.num_bytes
    pages, length = split(shapes, budget, demand, config.sliding_kv_memory)
    return Limits(
        device=str(device),
        backend=backend,
        dtype=_name_of(dtype),
        kv_cache_dtype=_name_of(shapes[0].dtype) if shapes else _name_of(dtype),
        max_model_len=length,
        max_num_seqs=batch.rows,
        max_num_batched_tokens=batch.tokens,
        widths=batch.widths,
        ahead=batch.ahead,
        num_pages=pages,
        windows={shape.name: shape.window for shape in shapes},
        page_size=config.page_size,
        enable_prefix_caching=caches and not _keys_depend_on_prompt_len(model, length),
        num_snapshots=num_snapshots,
        snapshot_interval=config.snapshot_interval if num_snapshots else 0,
        is_deterministic=is_deterministic,
    )


def _name_of(dtype: torch.dtype) -> str:
    return "fp8" if dtype is CODES else str(dtype).removeprefix("torch.")


def _largest_batch(config: EngineConfig, device: torch.device) -> _Batch:
    rows = config.max_num_seqs or min(
        default_max_num_seqs(device), config.max_num_batched_tokens or sys.maxsize
    )
    tokens = config.max_num_batched_tokens or max(rows, 512 if device.type == "cpu" else 8192)
    widths = choose_widths(config)
    return _Batch(rows, tokens, widths, places_ahead(widths[-1], config.tree))


def _kv_budget(config: EngineConfig, device: torch.device, ranks: Ranks) -> int:
    """Return the bytes for KV and snapshots on this rank: the minimum over all ranks."""
    num_sharing = ranks.size if device.type == "cpu" else 1  # ranks that share this memory
    free = free_bytes(device, config.gpu_memory_utilization) // num_sharing
    return ranks.least(config.kv_cache_memory or free)


def _keys_depend_on_prompt_len(model: ModelShape, max_model_len: int) -> bool:
    """Return whether equal prefixes can have different keys, so that they cannot be shared."""
    ropes = [group.rope for group in model.groups if group.rope.depends_on_prompt]
    return any(max_model_len > rope.original_max_position for rope in ropes)


def state_shape(
    model: ModelShape, device: torch.device, dtype: torch.dtype, is_deterministic: bool = False
) -> StateShape | None:
    """Return the shape of the recurrent states, or None for a model without recurrent layers. In
    deterministic mode they are not rounded between two steps, as they are not within one."""
    if model.recurrent is None:
        return None
    mixer = model.recurrent.mixer
    wanted = getattr(torch, mixer.state_dtype)
    if is_deterministic:
        wanted = torch.float32
    scan_dtype = dtype if device.type == "cpu" else wanted
    return StateShape(len(model.recurrent.layers), mixer.scan, dtype, scan_dtype)


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
