"""Kernel tests that run on a GPU as they are, and on a CPU through Triton's interpreter."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter's matrix product takes the bits of a bfloat16 for an integer."""

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]  # tests/kernels/test_triton.py runs them in processes


if INTERPRETED:
    from interpreter import make_quick

    make_quick()


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def half() -> torch.dtype:
    return HALF


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the interpreter, contexts are cut as ever, but over few of the 512 programs that a
    card has: most would find nothing to do. Those of a card run in tests of decode and verify."""
    if INTERPRETED:
        monkeypatch.setattr("slotzero.kernels.triton.attention.decode.cut_for", lambda _: (16, 64))
        monkeypatch.setattr(
            "slotzero.kernels.triton.attention.verify.cut_for", lambda *_: (4, 64, True)
        )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        for item in items:
            if "tests/kernels/triton/" in str(item.path):
                item.add_marker(pytest.mark.gpu)
