"""Scenes of an engine: requests of odd lengths and every kind of sampling, over hostile memory.

The one file of checks that knows requests. A new published tensor is given its column here.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.engine import Engine
from slotzero.graph import GraphKey, Ladder, Runner
from slotzero.request import Request
from slotzero.runners.passes import COUNTS, SLOTS
from slotzero.sampling.params import SamplingParams
from slotzero.sanitizer.checks import Bounds
from slotzero.sanitizer.mirror import mirrored
from slotzero.sanitizer.scene import Scene, memory_of
from slotzero.standins import StandIns, stand_ins
from slotzero.worker import RESULTS

MOST_STORED = 37  # tokens of a stand-in before the step: two pages and a bit
WIDE_WINDOW = 64  # tokens; wider ones are not filled
CROWD = 8  # more rows than run, for the step before
_RELATIVE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 5e-2}
_ASKS: tuple[dict[str, object], ...] = (
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.9, "logprobs": 2, "top_k": 20, "top_p": 0.9, "seed": 11},
    {"temperature": 1.3, "min_p": 0.05, "seed": 5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.2, "logprobs": 3},
    {"temperature": 0.0, "logit_bias": {3: 4.0, 7: -2.0}, "min_tokens": 3},
)


def bounds_of(engine: Engine) -> Bounds:
    """What this backend and these kernels promise.

    On a CPU torch sums a norm in an order that depends on how many there are, and Inductor fuses
    arithmetic, so another size, and on the cpu backend eager, is equal within rounding. On CUDA how
    products and attention are cut depends on the rows and their lengths (docs/decisions/0009), so a
    row is equal to the bit only in an equal batch.
    """
    rounding = _RELATIVE[engine.limits.dtype]
    if engine.limits.device.startswith("cuda"):
        return Bounds(replay=0.0, size=rounding, neighbours=rounding)
    compiled = rounding if engine.limits.backend == "cpu" else 0.0
    return Bounds(replay=compiled, size=rounding, neighbours=0.0)


@contextmanager
def staged(engine: Engine, runner: Runner, key: GraphKey) -> Iterator[Scene]:
    """As few rows as this size is picked for, and then some that do not run."""
    rng = random.Random(f"{key}")
    engine.scheduler.ledger.cache.clear()  # a scene overwrites every page, those it keeps too
    with stand_ins(engine) as ins, mirrored(engine.worker.tables):
        running = [_admit(engine, ins, rng, count) for count in counts_of(runner, key)]
        num_more = min(
            max(1, CROWD + key.rows - len(running)),
            engine.scheduler.slots.num_free,
            _most_rows(runner) - len(running),
        )
        idle = [_admit(engine, ins, rng, 1) for _ in range(num_more)]
        engine.worker.tables.apply()
        registry = engine.worker.registry
        unused, fresh = _fill(engine, [*running, *idle])
        for group, table in enumerate(engine.worker.page_tables):
            unused[table] = _unused_columns(registry[table], running, group)
        unused["tokens"], fresh["tokens"] = _unknown_columns(registry["tokens"], running)
        crowd = [*idle, *reversed(running)]
        yield Scene(
            key=key,
            published=_columns(runner, running, [actor.count for actor in running]),
            crowd=_columns(runner, crowd, [1] * len(crowd)),
            trap=idle[0].request.slot if idle else engine.limits.max_num_seqs,
            tables=memory_of(registry),
            unused=unused,
            fresh=fresh,
            fetch=partial(_fetch, engine),
        )


class Actor(NamedTuple):
    """A stand-in whose tokens [start, start + count) are next."""

    request: Request
    start: int
    count: int  # type: ignore[assignment]  # tuple.count() is not missed


def _columns(
    runner: Runner, actors: Sequence[Actor], counts: Sequence[int]
) -> dict[str, Sequence[int]]:
    columns = {SLOTS: [actor.request.slot for actor in actors], COUNTS: counts}
    return {name: columns[name] for name in runner.spec.published}


def counts_of(runner: Runner, key: GraphKey) -> list[int]:
    """Tokens of each row: the fewest rows and tokens that pick this key, unevenly shared."""
    tokens = _below(runner.spec.ladder, key.tokens) + 1
    if runner.spec.rows is None:
        return [1] * tokens
    rows = min(_below(runner.spec.rows, key.rows) + 1, tokens)
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


def _admit(engine: Engine, ins: StandIns, rng: random.Random, count: int) -> Actor:
    """One in three that computes many tokens has one more after those, and does not sample."""
    room = engine.limits.max_model_len - count - 2
    start = most = max(0, min(_most_stored(engine), room))
    if ins.requests:  # the first has as much as there may be
        start = rng.randint(0, most)
    more = rng.choice((0, 0, 1)) if count > 1 else 0
    prompt = [rng.randrange(engine.worker.vocab_size) for _ in range(start + count + more)]
    asks = _ASKS[len(ins.requests) % len(_ASKS)]
    params = SamplingParams(**asks, detokenize=False)  # type: ignore[arg-type]
    request = ins.admit(prompt, params, start)
    if len(ins.requests) % 2 == 0:
        _constrain(engine, request.slot)
    return Actor(request, start, count)


def _constrain(engine: Engine, slot: int) -> None:
    """As a grammar would that allows every other token."""
    tables = engine.worker.tables
    tables.stage("is_masked", slot, [1])
    tables.stage("allowed", slot, [0x55555555] * tables["allowed"].shape[1])


def _most_stored(engine: Engine) -> int:
    """Enough that pages fall out of a window, unless it is wide."""
    windows = [window for window in engine.limits.windows.values() if window is not None]
    narrow = [window for window in windows if window <= WIDE_WINDOW]
    return max([MOST_STORED, *(window + 2 * engine.limits.page_size for window in narrow)])


def _fill(engine: Engine, actors: Sequence[Actor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Noise where KV is stored, zeros elsewhere -> by group's pages, [pages, 1, page_size, 1, 1]:
    where nothing is that the step may read or write, and where it stores."""
    unused, fresh = {}, {}
    page_size = engine.limits.page_size
    for group, (name, window) in enumerate(engine.limits.windows.items()):
        kv = engine.worker.registry[f"kv_{name}"]
        stored = torch.zeros(kv.shape[1], page_size, dtype=torch.bool, device=kv.device)
        storing = torch.zeros_like(stored)
        generator = torch.Generator(device=kv.device).manual_seed(1)
        kv.zero_()
        for request, start, count in actors:
            pages = torch.tensor(request.pages[group], device=kv.device)
            position = torch.arange(len(pages) * page_size, device=kv.device).view(-1, page_size)
            pages, position = pages[pages > 0], position[pages > 0]
            first = 0 if window is None else start + 1 - window
            is_stored = (position >= first) & (position < start)
            stored[pages] = is_stored
            storing[pages] = (position >= start) & (position < start + count)
            shape = (len(kv), *position.shape, *kv.shape[3:])
            noise = torch.randn(shape, generator=generator, device=kv.device).to(kv.dtype)
            kv[:, pages] = noise * is_stored[:, :, None, None]
        unused[f"kv_{name}"] = ~(stored | storing)[:, None, :, None, None]
        fresh[f"kv_{name}"] = storing[:, None, :, None, None]
    return unused, fresh


def _unused_columns(table: Tensor, running: Sequence[Actor], group: int) -> Tensor:
    """Those without a page: past the last one, or before the window."""
    unused = torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    for actor in running:
        pages = torch.tensor(actor.request.pages[group], device=table.device)
        unused[actor.request.slot] = True
        unused[actor.request.slot, : len(pages)] = pages == 0
    return unused


def _unknown_columns(table: Tensor, running: Sequence[Actor]) -> tuple[Tensor, Tensor]:
    """-> tokens that nobody knows, and those that the step samples"""
    unknown = torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    sampling = torch.zeros_like(unknown)
    for request, start, count in running:
        unknown[request.slot, request.num_tokens :] = True
        if start + count == request.num_tokens:
            sampling[request.slot, request.num_tokens] = True
    return unknown & ~sampling, sampling


def _fetch(engine: Engine, num_rows: int) -> dict[str, Tensor]:
    download = engine.worker.results.download(len(RESULTS), num_rows)
    return dict(zip(RESULTS, download.wait(), strict=True))
