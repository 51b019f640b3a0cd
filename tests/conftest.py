"""Fixtures of all tests: tiny models with transformers as the oracle, and what a test may see."""

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import pytest
import torch
from oracle import FAMILIES, Oracle, build

hypothesis.settings.register_profile("untimed", deadline=None)  # speed is not for tests to judge
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Oracle]:
    """Oracles by family name, each built once a session."""
    built: dict[str, Oracle] = {}

    def get(family: str) -> Oracle:
        if family not in built:
            folder: Path = tmp_path_factory.mktemp(family)
            built[family] = build(FAMILIES[family], folder)
        return built[family]

    return get


LONGEST = ("test_triton.py", "test_models.py", "test_windows.py", "test_mutants.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files are shared out among processes in this order: long ones are begun with. Of the longest,
    each test is a process of its own anyway, and may be anybody's."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
    for item in items:
        is_alone = item.path.name == LONGEST[0]
        item.add_marker(pytest.mark.xdist_group(item.nodeid if is_alone else str(item.path)))


_sees_gpu = torch.cuda.is_available


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tests without the gpu marker see a machine without a GPU, whatever this one has."""
    is_gpu_test = item.get_closest_marker("gpu") is not None
    torch.cuda.is_available = _sees_gpu if is_gpu_test else lambda: False


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """A process started in the background ignores Ctrl-C; the tests are about one that does not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)
