"""Which injected faults are real bugs of other engines."""

from slotzero.certify.known_bugs import BUGS
from slotzero.graph import TensorKind


def numbers_of(runner: str, culprit: str, kind: TensorKind | None, fault: str) -> tuple[str, ...]:
    """Return the bugs that were this fault. `kind`: of the tensor; None for a fault of the
    engine."""
    names = {culprit, "" if kind is None else kind.value}
    return tuple(
        bug.number
        for bug in BUGS
        if bug.fault == fault and not names.isdisjoint(bug.where) and bug.runner in ("", runner)
    )
