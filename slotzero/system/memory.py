"""The memory of this machine or container, in total and available.

The rule: the smaller number counts. A container sees the memory of its machine, but is killed at
its own limit.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


class SystemMemory(NamedTuple):
    """Memory in bytes."""

    total: int
    available: int


class _Files(NamedTuple):
    """The files of one version of control groups: limit, usage and reclaimable memory."""

    folder: Path
    limit: str
    used: str
    reclaimable: tuple[str, ...]  # lines of memory.stat: cached file pages, which can be read again


def memory() -> SystemMemory:
    """Return the memory that this process can use."""
    machine = memory = _machine()
    for limit, used in _limits():
        if limit < machine.total:  # "no limit" is a huge number or a word
            left = max(0, limit - used)
            memory = SystemMemory(min(memory.total, limit), min(memory.available, left))
    return memory


def _machine() -> SystemMemory:
    lines = _read(_PROC / "meminfo").splitlines()
    info = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" in info and "MemAvailable" in info:
        return SystemMemory(*(int(info[name][0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return SystemMemory(total, total)  # this system does not report the available memory


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and unreclaimable usage of this process's control group and of its parents."""
    for line in _read(_PROC / "self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        kinds, _, own = rest.partition(":")
        if number == "0":
            files = _Files(
                _GROUPS, "memory.max", "memory.current", ("active_file", "inactive_file")
            )
        elif "memory" in kinds.split(","):
            idle = "total_active_file", "total_inactive_file"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", idle
            files = _Files(_GROUPS / "memory", *names)
        else:
            continue
        inside = PurePosixPath(own.lstrip("/"))
        for group in (inside, *inside.parents):
            folder = files.folder / group
            limit, used = (_read(folder / name).strip() for name in (files.limit, files.used))
            if limit.isdigit() and used.isdigit():
                yield int(limit), int(used) - _sum_of(folder / "memory.stat", files.reclaimable)


def _sum_of(stat: Path, names: tuple[str, ...]) -> int:
    lines = (line.split() for line in _read(stat).splitlines())
    return sum(int(line[1]) for line in lines if line and line[0] in names)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
