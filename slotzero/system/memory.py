"""This machine's memory: all of it, and what could be had now.

It does not know who wants it. The rule: a container is shown its machine's numbers and ended by its
own, so the smaller ones count.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_PROC = Path("/proc")
_GROUPS = Path("/sys/fs/cgroup")


class SystemMemory(NamedTuple):
    """In bytes."""

    total: int
    available: int


class _Files(NamedTuple):
    """Where a version of control groups says what a group may have, has, and could give back."""

    folder: Path
    limit: str
    used: str
    files: tuple[str, ...]  # lines of memory.stat: pages of files, which can be read again


def memory() -> SystemMemory:
    machine = held = _machine()
    for limit, used in _limits():
        if limit < machine.total:  # what is no limit is a number beyond any machine, or a word
            left = max(0, limit - used)
            held = SystemMemory(min(held.total, limit), min(held.available, left))
    return held


def _machine() -> SystemMemory:
    lines = _read(_PROC / "meminfo").splitlines()
    said = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" in said and "MemAvailable" in said:
        return SystemMemory(*(int(said[name][0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return SystemMemory(total, total)  # a system that tells no more


def _limits() -> Iterator[tuple[int, int]]:
    """-> what a control group may have, and what it has and cannot give back: this process's own,
    and each that this one is in"""
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
