"""Runs tests/triton through Triton's interpreter, which is chosen before triton is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "triton"
SHORT = ("experts", "kernels", "trees", "tune")
"""Which take less time than a process of their own takes to start"""
NAMES = sorted(file.stem.removeprefix("test_") for file in FOLDER.glob("test_*.py"))
GROUPS = [*((name,) for name in NAMES if name not in SHORT), SHORT]


@pytest.mark.parametrize("names", GROUPS, ids="-".join)
def test_through_the_interpreter(names):
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    quick = ("-p", "no:schemathesis")  # it takes a second to load, and none of them wants it
    files = [f"{FOLDER}/test_{name}.py" for name in names]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *quick, "-rp", *files],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=FOLDER.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    passed = set(re.findall(r"^PASSED \S+/test_(\w+)\.py::", done.stdout, re.MULTILINE))
    assert passed == set(names), done.stdout
