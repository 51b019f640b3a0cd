"""Kernel tests that run on a GPU as they are, and on a CPU through Triton's interpreter."""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
HALF = torch.float16 if INTERPRETED else torch.bfloat16
"""The interpreter's matrix product takes the bits of a bfloat16 for an integer."""

if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]  # tests/test_triton.py runs them in a process of its own


def patch_once_a_launch() -> None:
    """The interpreter patches triton.language again whenever one jit function calls another, though
    nothing is restored before the launch ends. That is half of its time."""
    import triton.language as tl
    from triton.runtime import interpreter

    patched: set[ModuleType] = set()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__

    @functools.cache
    def seen_by(fn: Callable[..., Any]) -> frozenset[ModuleType]:
        return frozenset(lang for lang in (tl, tl.core) if lang in fn.__globals__.values())

    def patch_once(fn: Callable[..., Any]) -> Any:
        if patched >= seen_by(fn):
            return None  # only a launch restores, and it is the first to patch
        patched.update(seen_by(fn))
        return patch(fn)

    def launch_unpatched(executor: Any, *args: Any, **kwargs: Any) -> None:
        patched.clear()
        launch(executor, *args, **kwargs)

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_unpatched


if INTERPRETED:
    patch_once_a_launch()


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
        monkeypatch.setattr("slotzero.kernels.triton.decode.cut_for", lambda _: (16, 64))
        monkeypatch.setattr("slotzero.kernels.triton.verify.cut_for", lambda *_: (4, 64, True))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not INTERPRETED:
        for item in items:
            if "tests/triton/" in str(item.path):
                item.add_marker(pytest.mark.gpu)
