"""Sum of the statistics of several engines."""

from collections.abc import Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

from msgspec import structs

from slotzero.server.messages import SpeculationReport, Stats


def sum_stats(reports: Sequence[Stats]) -> Stats | None:
    """Return the sum of all reports, or None if there are none."""
    return reduce(_added, reports) if reports else None


def _added(left: Any, right: Any) -> Any:
    match left, right:
        case (other, None) | (None, other):
            return other
        case SpeculationReport(), SpeculationReport():
            added = type(left)(*map(_added, structs.astuple(left), structs.astuple(right)))
            return structs.replace(added, width=max(left.width, right.width))
        case Stats(), Stats():
            return Stats(*map(_added, structs.astuple(left), structs.astuple(right)))
        case dict(), dict():
            return left | {key: _added(left.get(key), value) for key, value in right.items()}
        case list(), list():
            return [_added(*pair) for pair in zip_longest(left, right)]
        case str(), str():
            return left  # why a size failed
        case _:
            return left + right
