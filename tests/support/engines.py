"""Engines with a tiny model, requests for them, and a check that nothing has leaked."""

import random
from collections.abc import Sequence

from slotzero.config import EngineConfig
from slotzero.engine.engine import Engine
from slotzero.engine.request_handle import RequestHandle
from slotzero.sampling.params import SamplingParams
from slotzero.sampling.tables import SAMPLING_TABLES, mask_tables

VOCAB, EOS = 259, 257
PAGE = 2 * 2 * 16 * 2 * 16 * 4  # layers, k and v, page size, KV heads, head size, float32
Ask = tuple[list[int], SamplingParams]


def make(**wanted: object) -> Engine:
    fixed = {"model": "tiny:llama", "backend": "eager", "show_progress": False}
    return Engine(EngineConfig(**{**fixed, "skip_tokenizer_init": True, **wanted}))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(256) for _ in range(length)]


def greedy(max_tokens: int | None = 24, **more: object) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "ignore_eos": True, "max_tokens": max_tokens} | more)


def drain(engine: Engine) -> list[RequestHandle]:
    """Step until the engine is idle, and return each answer once for every token it received."""
    grown = []
    for _ in range(2000):  # a request that never ends must not hang the tests
        grown += engine.step()
        if not engine.has_work:
            break
    check_nothing_leaked(engine)
    return grown


def answer_all(engine: Engine, asks: Sequence[Ask]) -> list[RequestHandle]:
    answers = [engine.add(f"{i}", prompt, params) for i, (prompt, params) in enumerate(asks)]
    drain(engine)
    return answers


def answer_alone(engine: Engine, prompt: list[int], params: SamplingParams) -> list[int]:
    return answer_all(engine, [(prompt, params)])[0].token_ids


def check_nothing_leaked(engine: Engine) -> None:
    assert not engine.has_work
    engine.check()
    scheduler = engine.schedulers[0]
    assert scheduler.slots.num_free == scheduler.slots.num_slots
    assert not any(scheduler.ledger.num_used)
    assert engine._handles == {}
    engine.worker.tables.apply()
    neutral = {"page_table": 0, "length": 0, "target": 0}
    specs = (*SAMPLING_TABLES, *mask_tables(VOCAB))
    for name, value in (neutral | {spec.name: spec.neutral for spec in specs}).items():
        assert (engine.worker.tables[name] == value).all(), name
