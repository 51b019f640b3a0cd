"""Servers for the tests of clients, which run where Slotzero is not installed.

SLOTZERO_PYTHON names the Python of the environment in which it is (`make test-clients` sets it).
"""

import os
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from agent_tools import MODEL, Tools

SCRIPTED = Path(__file__).parent.parent / "support" / "scripted_server.py"
PATIENCE, STOP_TIME = 300.0, 60.0  # seconds
Serve = Callable[..., AbstractContextManager[str]]


@pytest.fixture
def tools() -> Tools:
    return Tools()


@pytest.fixture(scope="session")
def scripted() -> Iterator[str]:
    """Start a server that answers with calls of two tools; return its URL."""
    with started(str(SCRIPTED)) as line:
        yield line


@pytest.fixture(scope="session")
def served() -> Iterator[str]:
    """Serve the default model; return the URL."""
    with serving() as url:
        yield url


@pytest.fixture(scope="session")
def serve() -> Serve:
    """Return a function that serves a model."""
    return serving


@contextmanager
def serving(*words: str) -> Iterator[str]:
    """Serve a model as MODEL, with these words of the command line; yield its URL."""
    named = ("--port", "0", "--served-model-name", MODEL)
    with started("-m", "slotzero", "serve", *words, *named) as line:
        url = line.split()[2].rstrip(",")
        wait_until_ready(url)
        yield url


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
