"""Faults of copies that are not awaited, and whether S11 names the tensor.

Each breaks one rule of the rings in graph/transfer.py, or of the streams that they use.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from slotzero.certify.known_bugs import numbers_of
from slotzero.certify.late_device import Damage, LateDevice, copied, late_copies
from slotzero.certify.mutants import Mutant
from slotzero.certify.report import ENGINE
from slotzero.engine.engine import Engine
from slotzero.errors import ContractError
from slotzero.graph import TensorKind
from slotzero.graph.transfer import DEPTH, DownloadRing, Event, UploadRing


class _NoEvents(LateDevice):
    """Says at once that copies have ended."""

    def record_event(self) -> Event:
        return _Ended()

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        super().send(sources, targets)
        return _Ended()


class _Ended(Event):
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class _OneEvent(LateDevice):
    """Has one event for the copies of all steps, which keeps its first place."""

    def __init__(self, runs_late: bool, sends_late: bool) -> None:
        super().__init__(runs_late, sends_late)
        self._events: dict[str, Event] = {}

    def record_event(self) -> Event:
        return self._events.setdefault("mark", super().record_event())

    def send(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Event:
        return self._events.setdefault("send", super().send(sources, targets))


class _Unordered(LateDevice):
    """Copies inputs on a stream that later work does not wait for."""

    def copy(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        super().send(sources, targets)


def _one_buffer(ring: UploadRing | DownloadRing) -> None:
    if isinstance(ring, UploadRing):
        ring._buffers, ring._views = [ring._buffers[0]] * DEPTH, [ring._views[0]] * DEPTH
    else:
        ring._buffers = [ring._buffers[0]] * DEPTH


def _not_aside(ring: UploadRing | DownloadRing) -> None:
    if isinstance(ring, DownloadRing):
        ring._aside = [list(ring._sources)] * DEPTH


INPUTS, RESULTS = (TensorKind.PUBLISHED,), (TensorKind.OUTPUT,)


@dataclass(frozen=True)
class LateFault:
    name: str
    kinds: tuple[TensorKind, ...]
    damage: Damage


LATE_FAULTS: tuple[LateFault, ...] = (
    LateFault("copy not awaited", (*INPUTS, *RESULTS), Damage(_NoEvents)),
    LateFault("one event for all steps", (*INPUTS, *RESULTS), Damage(_OneEvent)),
    LateFault("inputs copied out of order", INPUTS, Damage(_Unordered)),
    LateFault("ring of one buffer", (*INPUTS, *RESULTS), Damage(change=_one_buffer)),
    LateFault("result overwritten by the next step", RESULTS, Damage(change=_not_aside)),
)


def mutate_copies(
    engine: Engine, seen: Callable[[Mutant], None] = lambda mutant: None
) -> list[Mutant]:
    """Try every fault in every tensor that is copied. Nothing of the engine is changed."""
    worker, mutants = engine.worker, list[Mutant]()
    for violation in late_copies(worker):
        raise ContractError(f"a check fails without any fault: {violation}")
    for entry, fault in product(copied(worker), LATE_FAULTS):
        if entry.kind not in fault.kinds:
            continue
        found = list(late_copies(worker, {entry.name: fault.damage}))
        named = tuple(violation.tensor for violation in found)
        caught_by = found[0].check if found else ""
        numbers = numbers_of(ENGINE, entry.name, entry.kind, fault.name)
        mutants.append(Mutant(ENGINE, entry.name, fault.name, numbers, caught_by, named))
        seen(mutants[-1])
    return mutants
