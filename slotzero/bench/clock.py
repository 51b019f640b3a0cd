"""Timing of calls, by the host's clock and by the device's if it has one.

This module does not know what is called. The rule: `before` runs before every call and is not
timed, and the result is the median.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UPS = 2
_CYCLES_PER_SECOND = 2e9  # above any GPU's clock rate, so that a wait is never too short

Call = Callable[[], object]


def host_seconds(call: Call, before: Call, repeats: int) -> float:
    """Return the time until the call returns, even if the device is still busy."""
    seconds = []
    for _ in range(WARM_UPS + repeats):
        before()
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds[WARM_UPS:])


def device_seconds(
    call: Call, before: Call, repeats: int, device: torch.device, lead: float = 0.0
) -> float:
    """Return the time until the work that the call has launched is done.

    `lead`: seconds by which the host runs ahead of the device. If that is as long as the host needs
    for all calls, the device never waits, and only its own time is measured.
    """
    if device.type != "cuda":
        return host_seconds(call, before, repeats)
    for _ in range(WARM_UPS):
        before()
        call()
    torch.cuda.synchronize(device)
    if lead:
        torch.cuda._sleep(int(lead * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]
    pairs = []
    for _ in range(repeats):
        before()
        start, end = _timing_event(), _timing_event()
        start.record()
        call()
        end.record()
        pairs.append((start, end))
    torch.cuda.synchronize(device)
    return float(median(start.elapsed_time(end) for start, end in pairs)) / 1000


def train_seconds(call: Call, before: Call, repeats: int, device: torch.device) -> float:
    """Return the time of one call among `repeats` that are issued without waiting, like steps."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        before()
        call()
    wait(device)
    return (time.perf_counter() - start) / repeats


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
