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
        stored, storing = _fill(registry["kv_full"], [*running, *idle], engine.limits.page_size)
        unknown, sampling = _unknown_columns(registry["tokens"], running)
        crowd = [*idle, *reversed(running)]
        yield Scene(
            key=key,
            published=_columns(runner, running, [actor.count for actor in running]),
            crowd=_columns(runner, crowd, [1] * len(crowd)),
            trap=idle[0].request.slot if idle else engine.limits.max_num_seqs,
            tables=memory_of(registry),
            unused={
                "kv_full": ~(stored | storing),
                "page_table": _unused_columns(registry["page_table"], running),
                "tokens": unknown,
            },
            fresh={"kv_full": storing, "tokens": sampling},
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
    start = rng.randint(0, max(0, min(MOST_STORED, room)))
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


def _fill(kv: Tensor, actors: Sequence[Actor], page_size: int) -> tuple[Tensor, Tensor]:
    """Noise where KV is stored, zeros elsewhere -> [pages, 1, 1, page_size, 1, 1] where it is, and
    where the step stores"""
    stored = torch.zeros(kv.shape[2], page_size, dtype=torch.bool, device=kv.device)
    storing = torch.zeros_like(stored)
    generator = torch.Generator(device=kv.device).manual_seed(1)
    kv.zero_()
    for request, start, count in actors:
        pages = torch.tensor(request.pages, device=kv.device)
        position = torch.arange(len(pages) * page_size, device=kv.device).view(-1, page_size)
        stored[pages] = position < start
        storing[pages] = (position >= start) & (position < start + count)
        shape = (*kv.shape[:2], *position.shape, *kv.shape[4:])
        noise = torch.randn(shape, generator=generator, device=kv.device).to(kv.dtype)
        kv[:, :, pages] = noise * (position < start)[:, :, None, None]
    return stored[:, None, None, :, None, None], storing[:, None, None, :, None, None]


def _unused_columns(table: Tensor, running: Sequence[Actor]) -> Tensor:
    unused = torch.zeros(table.shape, dtype=torch.bool, device=table.device)
    for actor in running:
        unused[actor.request.slot, len(actor.request.pages) :] = True
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
