"""Scenarios for an engine: requests of odd lengths, all kinds of sampling, and poisoned memory.

This module decides which requests run and which only occupy a slot; synthetic_requests.py knows
what a runner accesses in the row of a slot. A new published tensor gets its column here.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.certify.checks import Bounds
from slotzero.certify.dummy_requests import dummy_requests
from slotzero.certify.mirror import mirrored
from slotzero.certify.reach import has
from slotzero.certify.scenario import Scenario, memory_of
from slotzero.certify.synthetic_requests import (
    Access,
    Snapshots,
    SyntheticRequest,
    SyntheticRequestBuilder,
    paged_tables,
)
from slotzero.engine.engine import Engine
from slotzero.graph import GraphKey, Ladder, Runner
from slotzero.graph.registry import Entry
from slotzero.kernels.float8_kv import to_codes
from slotzero.pools.states import SNAPSHOT_ROWS, SNAPSHOTS, STATES, stored
from slotzero.runners.passes import COUNTS, SLOTS
from slotzero.runners.pooler import POOLED_SUMS
from slotzero.speculative.drafter import FEATURES, SPECULATION_TABLES
from slotzero.speculative.tree import PARENTS

EXTRA_ROWS = 8  # rows of the preceding larger step beyond those of the scenario
_RELATIVE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}
"""Relative rounding error of a row, see `compare.magnitude`. Sums are in float32, so a layer rounds
to its dtype a few times; n independent roundings by eps / 2 add up to about sqrt(n) * eps / 2. The
16-bit bounds are ten such roundings, enough for a hundred layers, and they are relative to the
largest value of a row, which is several times the typical one. float32 allows for long sums too."""


_FLOAT8 = 5e-2
"""The same with a KV cache in FP8, where another rounding can give the neighbouring code, which is
up to an eighth away. A result is a mean of many values, of which few get another code."""


class Mask(NamedTuple):
    """Masks of what a step reads and writes in one table, with slots or owned rows first."""

    known: Tensor
    written: Tensor


def states_of(engine: Engine) -> tuple[str, ...]:
    """Return the tables that only the device writes: states of the drafter and of recurrent layers,
    snapshots of those, and sums of hidden states."""
    worker = engine.worker
    sums = (POOLED_SUMS,) if has(worker.registry, POOLED_SUMS) else ()
    drafter = () if worker.drafter is None else (FEATURES, *worker.drafter.states)
    layers = () if worker.states is None else stored(STATES, worker.states)
    return (*drafter, *layers, *snapshots_of(engine), *sums)


def snapshots_of(engine: Engine) -> tuple[str, ...]:
    """Return the tables of snapshots."""
    states = engine.worker.states
    if states is None or not engine.limits.num_snapshots:
        return ()
    return stored(SNAPSHOTS, states)


def bounds_of(engine: Engine) -> Bounds:
    """Return how far results may differ, which follows from what the engine promises.

    A replay repeats the operators of an eager step, so both give the same bits. If results are
    deterministic (executor/determinism.py), a row has the same bits in every batch. Otherwise sums
    have an order that depends on the batch: plain torch, and on CUDA the way in which matrix
    products and attention are split (docs/decisions/0009); between ranks, the place of a partial
    sum in the collective's buffer, and the rank that adds a token's shared expert. Then a row is
    bit-identical only in an identical batch.
    """
    if engine.limits.is_deterministic:
        return Bounds(replay=0.0, size=0.0, neighbours=0.0)
    rounding = _RELATIVE[engine.limits.dtype]
    if engine.limits.kv_cache_dtype == "fp8":
        rounding += _FLOAT8
    return Bounds(replay=0.0, size=rounding, neighbours=rounding)


@contextmanager
def scenario_for(engine: Engine, runner: Runner, key: GraphKey) -> Iterator[Scenario]:
    """Set up a step with the fewest rows for which this size is picked, and a few idle requests."""
    rng = random.Random(f"{key}")
    engine.schedulers[0].ledger.cache.clear()  # a scenario overwrites every page, cached ones too
    with dummy_requests(engine) as dummies, mirrored(engine.worker.tables):
        builder, counts = (
            SyntheticRequestBuilder(engine, runner, dummies, rng),
            counts_of(runner, key),
        )
        running = [builder.admit(count) for count in counts]
        num_more = min(
            max(1, EXTRA_ROWS + key.rows - len(running)),
            engine.schedulers[0].slots.num_free,
            _most_rows(runner) - len(running),
        )
        idle = [builder.admit(1) for _ in range(num_more)]
        engine.worker.tables.apply()
        registry = engine.worker.registry
        masks = _fill(engine, running, idle)
        for name in _tables_with_accesses(engine):
            masks[name] = _columns(registry.entry(name), running)
        for name in snapshots_of(engine):
            masks[name] = _snapshots(registry.entry(name), registry[SNAPSHOT_ROWS], running)
        unused = {name: ~(mask.known | mask.written) for name, mask in masks.items()}
        for entry in registry.entries():
            if entry.through == SNAPSHOT_ROWS:
                unused[SNAPSHOT_ROWS] = _unnamed(registry[SNAPSHOT_ROWS], running)
            elif entry.through:
                unused[entry.through] = _unused_pages(engine, running, entry)
        larger_step = [*idle, *reversed(running)]
        yield Scenario(
            key=key,
            published=_published(runner, running, counts),
            larger_step=_published(runner, larger_step, [1] * len(larger_step)),
            idle_slot=idle[0].request.slot if idle else engine.limits.max_num_seqs,
            tables=memory_of(registry),
            unused=unused,
            fresh={name: mask.written & ~mask.known for name, mask in masks.items()},
            kept={name: ~mask.written for name, mask in masks.items()},
            fetch=partial(_fetch, engine, runner, counts),
        )


def _published(
    runner: Runner, requests: Sequence[SyntheticRequest], counts: Sequence[int]
) -> dict[str, Sequence[int]]:
    columns = {SLOTS: [synthetic.request.slot for synthetic in requests], COUNTS: counts}
    return {name: columns[name] for name in runner.spec.published}


def counts_of(runner: Runner, key: GraphKey) -> list[int]:
    """Return the tokens of each row: the fewest rows that pick this key, and then tokens, unevenly
    distributed."""
    spec = runner.spec
    if spec.rows is None:
        return [spec.width] * (_below(spec.ladder, key.rows) + 1)
    rows = min(_below(spec.rows, key.rows) + 1, key.tokens)
    tokens = max(_below(spec.ladder, key.tokens) + 1, rows)
    counts = [1] * rows
    rest = tokens - rows
    for row in range(rows - 1, 0, -1):
        counts[row] += rest // 3
        rest -= rest // 3
    counts[0] += rest
    return counts


def _below(ladder: Ladder, size: int) -> int:
    return max((n for n in ladder.sizes if n < size), default=0)


def _most_rows(runner: Runner) -> int:
    return (runner.spec.rows or runner.spec.ladder).maximum


def _fill(
    engine: Engine, running: Sequence[SyntheticRequest], idle: Sequence[SyntheticRequest]
) -> dict[str, Mask]:
    """Fill stored KV and all states with noise, and the rest of the KV cache with zeros.

    Returns, for each group's pages, masks of shape [pages, layers or 1, page_size, 1, 1].
    """
    masks = {}
    page_size, registry = engine.limits.page_size, engine.worker.registry
    generator = torch.Generator(device=registry.device).manual_seed(1)
    for state in states_of(engine):
        by_row = registry[state].movedim(registry.entry(state).axis, 0)
        by_row[1:] = torch.randn(by_row[1:].shape, generator=generator, device=by_row.device)
    for name, group, window in paged_tables(engine):
        kv = registry[name]
        num_accesses = max(
            len(kv_accesses.get(name, ())) for _, _, kv_accesses, _ in (*running, *idle)
        )
        shape = kv.shape[1], max(1, num_accesses), page_size
        stored = torch.zeros(shape, dtype=torch.bool, device=kv.device)
        storing = torch.zeros_like(stored)
        generator.manual_seed(1)
        kv.zero_()
        for request, _, kv_accesses, _ in (*running, *idle):
            pages = torch.tensor(request.pages[group], device=kv.device)
            position = torch.arange(len(pages) * page_size, device=kv.device).view(-1, page_size)
            pages, position = pages[pages > 0], position[pages > 0]
            for layer, (known, written) in enumerate(kv_accesses.get(name, ())):
                first = 0 if window is None else known + 1 - window
                stored[pages, layer] = (position >= first) & (position < known)
                places = torch.tensor([*written], device=kv.device)
                storing[pages, layer] = torch.isin(position, places)
            shape = (len(kv), *position.shape, *kv.shape[3:])
            noise = torch.randn(shape, generator=generator, device=kv.device)
            noise *= stored[pages].movedim(1, 0)[..., None, None]
            is_float8 = registry.entry(name).is_float8
            kv[:, pages] = to_codes(noise, noise.new_ones(())) if is_float8 else noise.to(kv.dtype)
        masks[name] = Mask(*(mask[..., None, None] for mask in (stored, storing)))
    return masks


def _tables_with_accesses(engine: Engine) -> list[str]:
    """Return the tables by slot for which synthetic requests declare their accesses."""
    names = ("tokens", *(spec.name for spec in SPECULATION_TABLES), PARENTS, *states_of(engine))
    entries = engine.worker.registry.entries()
    return [e.name for e in entries if e.name in names and e.tensor.numel() and not e.through]


def _columns(entry: Entry, running: Sequence[SyntheticRequest]) -> Mask:
    table, name = entry.tensor.movedim(entry.axis, 0), entry.name
    num = table.shape[1] if name in ("tokens", FEATURES, PARENTS) else 1
    known = torch.ones(len(table), num, dtype=torch.bool, device=table.device)
    written = torch.zeros_like(known)
    for request, accesses, _, _ in running:
        access = accesses.get(name, Access(0))
        known[request.slot, access.known :] = False
        written[request.slot, [*access.written]] = True
    shape = (len(table), num, *[1] * (table.dim() - 2))[: table.dim()]
    return Mask(known.view(shape), written.view(shape))


def _snapshots(entry: Entry, table: Tensor, running: Sequence[SyntheticRequest]) -> Mask:
    """Return the mask of a table of snapshots, [rows, 1, ...]."""
    rows = entry.tensor.movedim(entry.axis, 0)
    known = torch.zeros(len(rows), *[1] * (rows.dim() - 1), dtype=torch.bool, device=rows.device)
    written = torch.zeros_like(known)
    for synthetic in running:
        columns = synthetic.snapshots or Snapshots()
        known[table[synthetic.request.slot, [*columns.reads]].long()] = True
        written[table[synthetic.request.slot, [*columns.takes]].long()] = True
    known[0] = written[0] = False
    return Mask(known, written)


def _unnamed(table: Tensor, running: Sequence[SyntheticRequest]) -> Tensor:
    """Return the columns that name no snapshot which the step resumes from or takes."""
    unused = torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    for synthetic in running:
        unused[synthetic.request.slot] = True
        if synthetic.snapshots is not None:
            unused[
                synthetic.request.slot, [*synthetic.snapshots.reads, *synthetic.snapshots.takes]
            ] = False
    return unused


def _unused_pages(engine: Engine, running: Sequence[SyntheticRequest], entry: Entry) -> Tensor:
    """Return the columns of this KV's page table without a page that the step needs: those past the
    last page, and those before the sliding window."""
    table = engine.worker.registry[entry.through]
    group = engine.worker.page_tables.index(entry.through)
    unused = torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    for request, _, kv_accesses, _ in running:
        end = max((access.end for access in kv_accesses.get(entry.name, ())), default=0)
        num_pages = -(-end // engine.limits.page_size)
        pages = torch.tensor(request.pages[group][:num_pages], device=table.device)
        unused[request.slot] = True
        unused[request.slot, :num_pages] = pages == 0
    return unused


def _fetch(engine: Engine, runner: Runner, counts: Sequence[int]) -> dict[str, Tensor]:
    ring = engine.worker.ring_of(runner)
    if ring is None:
        return {}
    num_tokens = runner.num_tokens(sum(counts), len(counts))
    download = ring.download(len(counts), num_tokens, with_logprobs=True)
    return dict(zip(ring.names, download.wait(), strict=True))
