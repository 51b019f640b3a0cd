"""Tests of the detected memory: that of a machine, and less in a container."""

from pathlib import Path

import pytest

from slotzero.system import memory as module
from slotzero.system.memory import SystemMemory, memory

GIB = 1 << 30


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(module, "_GROUPS", tmp_path / "groups")
    write(tmp_path, "proc/meminfo", f"MemTotal: {64 << 20} kB\nMemAvailable:   {40 << 20} kB\n")
    return tmp_path


def write(root: Path, name: str, text: object) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(str(text))


def test_memory_of_a_machine(root: Path) -> None:
    assert memory() == SystemMemory(64 * GIB, 40 * GIB)
    write(root, "proc/self/cgroup", "0::/\n")  # a control group without limits
    assert memory() == SystemMemory(64 * GIB, 40 * GIB)


def test_memory_of_this_machine() -> None:
    held = memory()
    assert 0 < held.available <= held.total


@pytest.mark.parametrize("own", ["/", "/kubepods/pod/box"])
def test_a_container_has_less(root: Path, own: str) -> None:
    """Its control group is the root with its own namespace, and deep inside without one."""
    write(root, "proc/self/cgroup", f"0::{own}\n")
    folder = f"groups{own}".rstrip("/")
    write(root, f"{folder}/memory.max", 8 * GIB)
    write(root, f"{folder}/memory.current", 5 * GIB)
    stat = f"anon 9\ninactive_file {GIB}\nactive_file {GIB}\nfile {3 * GIB}\n"
    write(root, f"{folder}/memory.stat", stat)
    assert memory() == SystemMemory(8 * GIB, 5 * GIB)


def test_an_outer_group_may_have_even_less(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/slice/service\n")
    for folder, limit, used in (("slice", 4 * GIB, 3 * GIB), ("slice/service", "max", GIB)):
        write(root, f"groups/{folder}/memory.max", f"{limit}\n")
        write(root, f"groups/{folder}/memory.current", f"{used}\n")
    assert memory() == SystemMemory(4 * GIB, 1 * GIB)


def test_available_memory_is_that_of_the_group_with_least_left(root: Path) -> None:
    """That need not be the group with the lowest limit."""
    write(root, "proc/self/cgroup", "0::/pod/box\n")
    for folder, limit, used in (("pod", 10 * GIB, 9 * GIB), ("pod/box", 8 * GIB, GIB)):
        write(root, f"groups/{folder}/memory.max", limit)
        write(root, f"groups/{folder}/memory.current", used)
    assert memory() == SystemMemory(8 * GIB, 1 * GIB)


@pytest.mark.parametrize("line", ["", "0", "0::", "0::box", "nothing", "4:memory", "x:y:z"])
def test_lines_without_information_are_ignored(root: Path, line: str) -> None:
    write(root, "proc/self/cgroup", f"{line}\n")
    assert memory() == SystemMemory(64 * GIB, 40 * GIB)


def test_control_groups_version_1(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/a\n4:memory:/docker/of-the-machine\n")
    write(root, "groups/memory/memory.limit_in_bytes", 2 * GIB)
    # above the limit, so no memory is left
    write(root, "groups/memory/memory.usage_in_bytes", 3 * GIB)
    assert memory() == SystemMemory(2 * GIB, 0)
    write(root, "groups/memory/memory.limit_in_bytes", 9223372036854771712)  # no limit
    assert memory() == SystemMemory(64 * GIB, 40 * GIB)


def test_a_system_with_little_information(root: Path) -> None:
    (root / "proc/meminfo").unlink()
    held = memory()
    assert held.total == held.available > 0
