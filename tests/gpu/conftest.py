"""What all tests on a card share."""

import zlib
from collections.abc import Sequence

import pytest

from slotzero.kernels.triton.linear.tune import Choices


@pytest.fixture(autouse=True)
def any_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way to multiply is the fastest is not for these tests, and to compile and time all of
    them takes most of an engine's start: each shape gets one, and another one than the next."""

    def known(self: Choices, key: str, candidates: Sequence[str]) -> str:
        return candidates[zlib.crc32(key.encode()) % len(candidates)]

    monkeypatch.setattr(Choices, "known", known)
