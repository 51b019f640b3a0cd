"""Fixtures for all tests on a GPU."""

import zlib
from collections.abc import Sequence

import pytest

from slotzero.kernels.triton.linear.tune import Choices


@pytest.fixture(autouse=True)
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give each shape an arbitrary tile, different from the next one's, instead of the fastest.

    Compiling and timing all tiles would take most of an engine's start-up time.
    """

    def known(self: Choices, key: str, candidates: Sequence[str]) -> str:
        return candidates[zlib.crc32(key.encode()) % len(candidates)]

    monkeypatch.setattr(Choices, "known", known)
