"""Test of the scheduler for pytest-xdist: a test that crashes its process is the only one lost."""

import os
import subprocess
import sys
from pathlib import Path

import by_file
import pytest

pytestmark = pytest.mark.slow

CONFTEST = """
import pytest
from by_file import ByFile

@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)
"""
CRASHES = """
import os

def test_before(): pass
def test_crashing(): os._exit(3)
def test_after(): pass
"""
SOUND = "def test_sound(): pass\n"


def test_crashes_are_reported_and_all_other_tests_run(tmp_path: Path) -> None:
    """Two tests crash, so that a worker may crash while the replacement of another one collects."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    for name, text in {"a": CRASHES, "b": CRASHES, "c": SOUND, "d": SOUND, "e": SOUND}.items():
        (tmp_path / f"test_{name}.py").write_text(text)
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-p", "xdist", "-n", "2", "-rA", "-c", os.devnull,
            "--rootdir", tmp_path, tmp_path,
        ],
        env={**os.environ, "PYTHONPATH": str(Path(by_file.__file__).parent),
             "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )  # fmt: skip
    for name in "ab":
        assert f"crashed while running 'test_{name}.py::test_crashing'" in done.stdout, done.stdout
    assert "2 failed, 7 passed" in done.stdout, done.stdout
    assert "INTERNALERROR" not in done.stdout + done.stderr
