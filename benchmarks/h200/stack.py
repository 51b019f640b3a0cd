"""A decode step of a model of some shape, random weights, against the time to read all that it
reads; and a process for each engine, as its users have it. Shared by the scripts beside it."""

import json
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch

from slotzero.bench.clock import device_seconds
from slotzero.bench.rows import refusal, standing
from slotzero.bench.session import BenchSession

REPEATS = 7
T = TypeVar("T")


def apart(function: Callable[..., T], *args: Any) -> T:
    """What a function gives in a process of its own, as an engine has. An H200 reads memory that
    was given back and taken again 12 % slower."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def open_stack(config: Mapping[str, Any], **settings: Any) -> BenchSession:
    """An engine for a model that is only a config; each size is recorded when it is first asked."""
    settings |= {"load_format": "dummy", "enable_prefix_caching": False, "show_progress": False}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return BenchSession(folder, {**settings, "lazy_recording": True})


def step_seconds(session: BenchSession, rows: int, context: int) -> float | None:
    """None: there is no room for so much."""
    engine, runner = session.engine, session.engine.worker.decode
    key = runner.pick(rows, rows)
    if refusal(engine, key, context) is not None:
        return None
    with torch.inference_mode():
        runner.prepare(key)
    with standing(engine, runner, key, context) as stand:
        device = engine.worker.registry.device
        return device_seconds(stand.replay, stand.rewind, REPEATS, device, lead=0.01)
