"""How long a call takes: by the host's clock, and by the device's where it has one.

It does not know what is called. The rule: `before` runs ahead of every call and is not timed; of
all the times the median counts.
"""

import time
from collections.abc import Callable
from statistics import median

import torch

WARM_UPS = 2
_CYCLES_PER_SECOND = 2e9  # more than any GPU's clock has, so a wait is never too short

Call = Callable[[], object]


def host_seconds(call: Call, before: Call, repeats: int) -> float:
    """Until the call returns, whatever it has set going."""
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
    """Until what the call has set going is done.

    `lead` are seconds by which the host runs ahead of the device. With as many as the host needs
    for all calls, the device never waits for it, and its time alone is measured.
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
    """Of one call among `repeats`, issued without waiting, as steps are."""
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
