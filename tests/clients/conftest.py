"""Servers for the tests of clients, which run where Slotzero is not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_tools import MODEL, Tools
from other_python import started, wait_until_ready

SCRIPTED = Path(__file__).parent.parent / "support" / "scripted_server.py"


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
    words = ("-m", "slotzero", "serve", "--port", "0", "--served-model-name", MODEL)
    with started(*words) as line:
        url = line.split()[2].rstrip(",")
        wait_until_ready(url)
        yield url
