"""Runs the kernel tests again with Triton's interpreter, which must be chosen before the import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def test_triton_kernels_through_the_interpreter():
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(here / "test_kernels.py"), "-k", "triton"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=here.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "18 passed" in done.stdout
