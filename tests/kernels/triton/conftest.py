"""Fixtures of the Triton tests, which run on a GPU, or on a CPU through the interpreter."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""The 16-bit dtype; the interpreter's matrix product treats the bits of a bfloat16 as an
integer."""

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
    """Use few programs in the interpreter, where most of a GPU's 512 would find nothing to do.

    Contexts are still split. The tests of decode and verify also use the grid of a GPU.
    """
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
