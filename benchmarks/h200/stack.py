"""Engines with random weights, each in its own process, and the time of their decode steps.

The other scripts in this folder use these functions.
"""

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
    """Call a function in a new process, as users run an engine, and return its result.

    An H200 reads memory that was freed and allocated again 12 % slower.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def open_stack(config: Mapping[str, Any], **settings: Any) -> BenchSession:
    """Start an engine with random weights from a config; sizes are captured at first use."""
    settings |= {"load_format": "dummy", "enable_prefix_caching": False, "show_progress": False}
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        return BenchSession(folder, {**settings, "lazy_recording": True})


def step_seconds(session: BenchSession, rows: int, context: int) -> float | None:
    """Return the seconds of a decode step, or None if the KV cache has no room for the rows."""
    engine, runner = session.engine, session.engine.worker.decode
    key = runner.pick(rows, rows)
    if refusal(engine, key, context) is not None:
        return None
    with torch.inference_mode():
        runner.prepare(key)
    with standing(engine, runner, key, context) as stand:
        device = engine.worker.registry.device
        return device_seconds(stand.replay, stand.rewind, REPEATS, device, lead=0.01)
