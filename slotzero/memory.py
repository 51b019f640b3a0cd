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


class Memory(NamedTuple):
    """In bytes."""

    total: int
    available: int


class _Files(NamedTuple):
    """Where a version of control groups says what a group may have, has, and could give back."""

    folder: Path
    limit: str
    used: str
    idle: str  # a line of memory.stat: pages of files that nobody has used for a while


def memory() -> Memory:
    held = _machine()
    for limit, used in _limits():
        if limit < held.total:  # what is no limit is a number beyond any machine, or a word
            held = Memory(limit, min(held.available, max(0, limit - used)))
    return held


def _machine() -> Memory:
    lines = _read(_PROC / "meminfo").splitlines()
    said = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
    if "MemTotal" in said and "MemAvailable" in said:
        return Memory(*(int(said[name][0]) * 1024 for name in ("MemTotal", "MemAvailable")))
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return Memory(total, total)  # a system that tells no more


def _limits() -> Iterator[tuple[int, int]]:
    """-> what a control group may have, and what it has and cannot give back: this process's own,
    and each that this one is in"""
    for line in _read(_PROC / "self/cgroup").splitlines():
        number, kinds, own = line.split(":", 2)
        if number == "0":
            files = _Files(_GROUPS, "memory.max", "memory.current", "inactive_file")
        elif "memory" in kinds.split(","):
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            files = _Files(_GROUPS / "memory", *names)
        else:
            continue
        inside = PurePosixPath(own).relative_to("/")
        for group in (inside, *inside.parents):
            folder = files.folder / group
            limit, used = (_read(folder / name).strip() for name in (files.limit, files.used))
            if limit.isdigit() and used.isdigit():
                yield int(limit), int(used) - _idle(folder / "memory.stat", files.idle)


def _idle(stat: Path, name: str) -> int:
    lines = (line.split() for line in _read(stat).splitlines())
    return next((int(line[1]) for line in lines if line[0] == name), 0)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
