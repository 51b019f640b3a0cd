"""Runs tests/triton through Triton's interpreter, which is chosen before triton is imported."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FILES = sorted((Path(__file__).parent / "triton").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_through_the_interpreter(file):
    pytest.importorskip("triton", reason="triton has no wheel for this platform")
    quick = ("-p", "no:schemathesis")  # it takes a second to load, and none of them wants it
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *quick, str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        cwd=file.parent.parent.parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d+ passed", done.stdout), done.stdout
