"""Fixtures for tests that start engines in separate processes."""

from collections.abc import Iterator

import pytest
from served import SETTINGS

from slotzero import LLM


@pytest.fixture(scope="module")
def without_gpu() -> Iterator[None]:
    """Hide GPUs from processes that a test starts, as tests/conftest.py hides them from tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield


@pytest.fixture(scope="module")
def offline() -> LLM:
    return LLM(**SETTINGS)
