"""S11: copies between host and device, with a device that is late.

Certification waits after each step, and would not see a host buffer that is reused while it is
being copied, or results that are read before they are there. Here the rings of graph/transfer.py
run over a device that does nothing until it is waited for, over one whose results leave only then,
and over one that does all at once. What each step reads, and what the host reads of it, must be
values of that step. The rings are made anew for tensors on the host, so that the check is the same
for every device.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from slotzero.certify.report import ENGINE, Violation
from slotzero.executor.worker import Worker
from slotzero.graph import TensorKind
from slotzero.graph.registry import Entry
from slotzero.graph.transfer import DEPTH, Copies, Download, DownloadRing, Event, UploadRing

LATE_COPIES, COPIES = "S11", "copies"
STEPS = 3 * DEPTH + 1
SCHEDULES = ((False, False), (False, True), (True, True))  # whether work is late, and results are


class _Queue:
    """Work in order, done only when it is asked for."""

    def __init__(self) -> None:
        self._work: list[Callable[[], object]] = []
        self._num_done = 0

    @property
    def end(self) -> int:
        return len(self._work)

    def add(self, work: Callable[[], object]) -> None:
        self._work.append(work)

    def run(self, end: int) -> None:
        while self._num_done < end:
            self._num_done += 1
            self._work[self._num_done - 1]()


class _Place(Event):
    def __init__(self, queue: _Queue, end: int) -> None:
        self._queue, self._end = queue, end

    def synchronize(self) -> None:
        self._queue.run(self._end)

    def query(self) -> bool:
        self.synchronize()
        return True


class LateDevice(Copies):
    """A device that does its work in the latest order that its streams allow, or at once."""

    def __init__(self, runs_late: bool, sends_late: bool) -> None:
        """`runs_late`, `sends_late`: do steps, or downloads, only when the host waits for them."""
        self._work, self._sending = _Queue(), _Queue()
        self._runs_late, self._sends_late = runs_late, sends_late

    def do(self, work: Callable[[], object]) -> None:
        self._work.add(work)
        self._go_on()

    def finish(self) -> None:
        self._work.run(self._work.end)
        self._sending.run(self._sending.end)

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        self.do(lambda: _copy(sources, targets))

    def record_event(self) -> Event:
        return _Place(self._work, self._work.end)

    def wait(self, event: Event) -> None:
        self.do(event.synchronize)

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        self._sending.add(self.record_event().synchronize)
        self._sending.add(lambda: _copy(sources, targets))
        self._go_on()
        return _Place(self._sending, self._sending.end)

    def _go_on(self) -> None:
        if not self._runs_late:
            self._work.run(self._work.end)
        if not self._sends_late:
            self._sending.run(self._sending.end)


def _copy(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)


class Damage(NamedTuple):
    """What a mutant changes for one tensor."""

    device: Callable[[bool, bool], LateDevice] = LateDevice
    change: "Change" = lambda ring: None


Change = Callable[[UploadRing | DownloadRing], None]
NO_DAMAGE: Mapping[str, Damage] = {}


def copied(worker: Worker) -> list[Entry]:
    """Return the tensors that the host uploads in a step, and those that it downloads."""
    rings = (worker.ring_of(runner) for runner in worker.runners)
    sent = {name for ring in rings if ring is not None for name in ring.names}
    entries = worker.registry.entries()
    return [e for e in entries if e.kind is TensorKind.PUBLISHED or e.name in sent]


def late_copies(worker: Worker, damages: Mapping[str, Damage] = NO_DAMAGE) -> Iterator[Violation]:
    """Yield each tensor of which a step, or the host, gets the values of another step."""
    for entry in copied(worker):
        damage = damages.get(entry.name, Damage())
        trial = _uploaded if entry.kind is TensorKind.PUBLISHED else _downloaded
        for schedule in SCHEDULES:
            found = trial(entry, damage.device(*schedule), damage.change)
            if found:
                yield Violation(LATE_COPIES, ENGINE, COPIES, entry.name, found)
                break


def _uploaded(entry: Entry, device: LateDevice, change: Change) -> str:
    """Upload values that the device reads in each step; return what it read wrongly, if it did."""
    target, seen = torch.zeros_like(entry.tensor, device="cpu"), list[Tensor]()
    ring = UploadRing(target, device)
    change(ring)
    for step in range(STEPS):
        ring.upload([step + 1], 0)
        device.do(lambda: seen.append(target[:1].clone()))
    device.finish()
    return next(filter(None, (_wrong("device", *read) for read in enumerate(seen))), "")


def _downloaded(entry: Entry, device: LateDevice, change: Change) -> str:
    """Download what the device writes in each step, and read it as late as the ring allows."""
    source = torch.zeros_like(entry.tensor[:1], device="cpu")
    ring, coming = DownloadRing([source], copies=device), list[Download]()
    change(ring)
    for step in range(STEPS):
        device.do(partial(source.fill_, step + 1))
        coming.append(ring.download([1]))
        due = step + 1 - DEPTH
        if due >= 0 and (found := _wrong("host", due, coming[due].wait()[0])):
            return found
    return ""


def _wrong(reader: str, step: int, got: Tensor) -> str:
    value = got.flatten()[0].item()
    if value == step + 1:
        return ""
    return f"the {reader} read {value:g} in step {step} where {step + 1} was expected"
