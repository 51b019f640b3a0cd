"""Decode steps under torch's profiler: the device's idle time between steps, and its most expensive
kernels.

Only device events are read, from the trace that the profiler writes. The rule: every row of the
batch decodes in every traced step, so that neither prefill nor a shrinking batch is measured.
Tracing itself takes time: compare `step_ms` with the time without it.
"""

import json
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from slotzero.bench.intervals import busy_and_gaps
from slotzero.bench.sheets import Report, rounded
from slotzero.bench.workloads import Workload
from slotzero.engine.engine import Engine
from slotzero.errors import CapacityError
from slotzero.sampling.params import SamplingParams

NUM_STEPS = 64
NUM_COSTLIEST = 10
_SETTLING_STEPS = 8  # traced first and dropped, while tracer and pipeline start up
_MARK = "spin_kernel"  # launched only by torch.cuda._sleep
_DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_ENDLESS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class DeviceEvent:
    """A kernel or a copy on any stream; times in nanoseconds."""

    name: str
    start: int
    end: int


def profile_decode(engine: Engine, workload: Workload) -> Report:
    """Profile decoding of the workload's first requests, as many as run at once."""
    prompts = workload.prompts[: engine.limits.max_num_seqs]
    try:
        with decoding(engine, prompts):
            events = after_mark(_traced(engine))
        return {"steps": NUM_STEPS, "rows": len(prompts), **summarize(events, NUM_STEPS)}
    except CapacityError as error:  # keep the results measured before
        return {"failure": str(error)}


def summarize(events: Sequence[DeviceEvent], num_steps: int) -> Report:
    if not events:
        raise CapacityError("the profiler recorded no kernels: is another profiler attached?")
    busy, gaps = busy_and_gaps((event.start, event.end) for event in events)
    idle = sum(end - start for start, end in gaps)
    times: defaultdict[str, list[int]] = defaultdict(list)
    for event in events:
        times[event.name].append(event.end - event.start)
    costliest = sorted(times.items(), key=lambda item: -sum(item[1]))[:NUM_COSTLIEST]
    return {
        "span_ms": rounded((busy + idle) / 1e6),
        "step_ms": rounded((busy + idle) / num_steps / 1e6),
        "busy_ms": rounded(busy / 1e6),
        "idle_share": rounded(idle / (busy + idle)),
        "longest_gap_ms": rounded(max((end - start for start, end in gaps), default=0) / 1e6),
        "events_per_step": rounded(len(events) / num_steps),
        "kernels": [
            {
                "name": name,
                "ms_per_step": rounded(sum(spent) / num_steps / 1e6),
                "count_per_step": rounded(len(spent) / num_steps),
            }
            for name, spent in costliest
        ],
    }


def profile_rows(profile: Report | None) -> list[tuple[str, str]]:
    if profile is None:
        return []
    if "failure" in profile:
        return [("profile", profile["failure"])]
    shown = [
        f"{kernel['ms_per_step']:.4f} ms a step, {kernel['count_per_step']:g} times: "
        f"{kernel['name'][:48]}"
        for kernel in profile["kernels"]
    ]
    steps = f"{profile['steps']} steps of {profile['rows']} rows, {profile['step_ms']:.3f} ms each"
    gap = f"longest gap {profile['longest_gap_ms']:.3f} ms"
    return [
        ("device idle", f"{profile['idle_share']:.1%} of {steps}; {gap}"),
        ("costliest", "\n".join(shown)),
    ]


@contextmanager
def decoding(engine: Engine, prompts: Sequence[Sequence[int]]) -> Iterator[None]:
    """Context in which every prompt is a decoding row; all are cancelled afterwards."""
    names = [f"profile-{i}" for i in range(len(prompts))]
    try:
        for name, prompt in zip(names, prompts, strict=True):
            engine.add(name, prompt, _ENDLESS)
        num_chunks = sum(map(len, prompts)) // engine.limits.max_num_batched_tokens + 1
        for _ in range(num_chunks + _SETTLING_STEPS):
            if len(engine.step()) == len(prompts):
                break
        yield
        if engine.schedulers.num_running < len(prompts):
            raise CapacityError(
                f"{len(prompts)} requests do not run at once for {NUM_STEPS} steps: lower "
                "--max-num-seqs, or raise --kv-cache-memory or --max-model-len"
            )
    finally:
        for name in names:
            engine.cancel(name)
        while engine.has_work:
            engine.step()


def read_trace(path: Path) -> list[DeviceEvent]:
    """Return the device events of a trace in Chrome's format, which counts in microseconds."""
    return [
        DeviceEvent(
            e["name"], round(1000 * e["ts"]), round(1000 * e["ts"]) + round(1000 * e["dur"])
        )
        for e in json.loads(path.read_text())["traceEvents"]
        if e.get("cat") in _DEVICE_CATEGORIES
    ]


def after_mark(events: Sequence[DeviceEvent]) -> list[DeviceEvent]:
    marked = max((event.end for event in events if _MARK in event.name), default=None)
    return [event for event in events if marked is not None and event.start >= marked]


def _traced(engine: Engine) -> list[DeviceEvent]:
    """Trace all in one session: after an empty or short one, CUPTI may record nothing.

    The mark goes through the stream like a step, so that the host does not wait for it.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_SETTLING_STEPS):
            engine.step()
        torch.cuda._sleep(1)  # type: ignore[no-untyped-call]
        for _ in range(NUM_STEPS):
            engine.step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(path)
