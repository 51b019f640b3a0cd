"""Servers for the tests of clients, which run where Slotzero is not installed."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from agent_tools import MODEL, Tools
from other_python import started, wait_until_ready

SCRIPTED = Path(__file__).parent.parent / "support" / "scripted_server.py"
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
