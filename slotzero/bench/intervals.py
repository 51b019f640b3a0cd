"""How much of a stretch of time is covered by intervals that may overlap.

With graphs and dependent launches one kernel starts before the last has ended, and copies run
beside both: their times do not add up, their union does.
"""

from collections.abc import Iterable

Interval = tuple[int, int]  # [start, end)


def busy_and_gaps(intervals: Iterable[Interval]) -> tuple[int, list[Interval]]:
    """The time covered by at least one interval, and the gaps between them, in order.

    Busy time and gaps together are the span from the first start to the last end.
    """
    busy, gaps = 0, []
    covered: int | None = None  # all up to here is counted
    for start, end in sorted(intervals):
        if covered is None:
            covered = start
        if start > covered:
            gaps.append((covered, start))
            covered = start
        busy += max(0, end - covered)
        covered = max(covered, end)
    return busy, gaps
