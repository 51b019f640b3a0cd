"""Processes of the Python that has Slotzero, for tests that run where it is not installed.

SLOTZERO_PYTHON names it (`make test-clients` sets it).
"""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

PATIENCE, STOP_TIME = 300.0, 60.0  # seconds


def wait_until_ready(url: str) -> None:
    end = time.monotonic() + PATIENCE
    while True:
        try:
            urllib.request.urlopen(f"{url}/health").close()
            return
        except urllib.error.URLError:  # it does not listen yet, or replies 503 while it loads
            assert time.monotonic() < end, f"the model was not loaded within {PATIENCE:g} s"
            time.sleep(0.1)


@contextmanager
def started(*words: str) -> Iterator[str]:
    """Start a process and yield the first line that it prints."""
    command = [os.environ["SLOTZERO_PYTHON"], *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, f"{' '.join(command)} ended with {process.wait()}"
        yield line
    finally:
        process.terminate()
        process.wait(STOP_TIME)
