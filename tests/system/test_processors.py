"""Tests of the number of threads: affinity, quotas of control groups, and torch's own number."""

import os
from pathlib import Path

import pytest
import torch

from slotzero.system import processors


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", 8), ("150000 100000", 2), ("20000 100000", 1)]
)
def test_the_smallest_limit_counts(
    quota: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("0::/outer/inner\n")
    (tmp_path / "outer/inner").mkdir(parents=True)
    (tmp_path / "outer/cpu.max").write_text(quota)
    (tmp_path / "outer/inner/cpu.max").write_text("max 100000")
    monkeypatch.setattr(processors, "_GROUPS", tmp_path)
    monkeypatch.setattr(processors, "_OWN_GROUPS", own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert processors.num_processors() == expected


def test_older_control_groups_have_two_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "own"
    own.write_text("4:cpu,cpuacct:/\n")
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("300000\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    monkeypatch.setattr(processors, "_GROUPS", tmp_path)
    monkeypatch.setattr(processors, "_OWN_GROUPS", own)
    assert list(processors._quotas()) == [3.0]
