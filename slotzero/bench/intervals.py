"""The total time covered by intervals that may overlap.

With CUDA graphs and dependent launches, a kernel starts before the previous one has ended, and
copies run in parallel: busy time is the union of their intervals, not the sum.
"""

from collections.abc import Iterable

Interval = tuple[int, int]  # [start, end)


def busy_and_gaps(intervals: Iterable[Interval]) -> tuple[int, list[Interval]]:
    """Return the time covered by at least one interval, and the gaps between them in order.

    Busy time and gaps together are the span from the first start to the last end.
    """
    busy, gaps = 0, []
    covered: int | None = None  # everything up to here is counted
    for start, end in sorted(intervals):
        if covered is None:
            covered = start
        if start > covered:
            gaps.append((covered, start))
            covered = start
        busy += max(0, end - covered)
        covered = max(covered, end)
    return busy, gaps
