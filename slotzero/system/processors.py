"""The processors that this process may use.

The rule: the smallest limit counts: the affinity mask, the CPU quota of the control group, and the
number that the user set (OMP_NUM_THREADS or torch.set_num_threads).
"""

import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def num_processors() -> int:
    """Return how many threads can run at once; torch counts cores, not hyperthreads."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quotas = (max(1, math.ceil(quota)) for quota in _quotas())
    return min(torch.get_num_threads(), allowed or 1, *quotas)


def _quotas() -> Iterator[float]:
    """Yield the CPU quota of this process's control group and of its parents, in processors."""
    for line in _words(_OWN_GROUPS, "\n"):
        number, _, rest = line.partition(":")
        kinds, _, own = rest.partition(":")
        inside = PurePosixPath(own.lstrip("/"))
        for group in (inside, *inside.parents):
            if number == "0":
                words = _words(_GROUPS / group / "cpu.max")
            elif "cpu" in kinds.split(","):
                names = "cpu.cfs_quota_us", "cpu.cfs_period_us"
                words = [word for name in names for word in _words(_GROUPS / "cpu" / group / name)]
            else:
                continue
            if len(words) == 2 and all(word.isdigit() for word in words):  # not "max" or -1
                yield int(words[0]) / int(words[1])


def _words(file: Path, separator: str | None = None) -> list[str]:
    try:
        return file.read_text().split(separator)
    except OSError:
        return []
