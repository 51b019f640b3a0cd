"""This machine's memory: the total, and what is available now.

The rule: a container sees the numbers of its machine but is killed at its own limit, so the smaller
of both counts.
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
    """The files of one version of control groups: limit, usage, and what can be reclaimed."""

    folder: Path
    limit: str
    used: str
    files: tuple[str, ...]  # lines of memory.stat: pages of files, which can be read again


def memory() -> SystemMemory:
    machine = held = _machine()
    for limit, used in _limits():
        if limit < machine.total:  # "no limit" is written as a huge number, or as a word
            left = max(0, limit - used)
            held = SystemMemory(min(held.total, limit), min(held.available, left))
    return held


def _machine() -> SystemMemory:
    lines = _read(_PROC / "meminfo").splitlines()
    said = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" in said and "MemAvailable" in said:
        return SystemMemory(*(int(said[name][0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return SystemMemory(total, total)  # the system reports no more


def _limits() -> Iterator[tuple[int, int]]:
    """Yield limit and unreclaimable usage of this process's control group, and of each group that
    contains it."""
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
                yield int(limit), int(used) - _of_files(folder / "memory.stat", files.files)


def _of_files(stat: Path, names: tuple[str, ...]) -> int:
    lines = (line.split() for line in _read(stat).splitlines())
    return sum(int(line[1]) for line in lines if line and line[0] in names)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
