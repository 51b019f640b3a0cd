"""Fixtures and pytest hooks for all tests: oracles, test order, and the environment of a test."""

import contextlib
import gc
import logging
import random
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest
import torch

from slotzero.errors import CapacityError
from slotzero.kernels.cpu.build import load as load_kernels

if TYPE_CHECKING:  # it imports transformers, which takes seconds, and few processes need it
    from oracle import Oracle

pytest.register_assert_rewrite(*(file.stem for file in Path(__file__).parent.glob("support/*.py")))
hypothesis.settings.register_profile("untimed", deadline=None)  # a busy machine must not fail tests
hypothesis.settings.load_profile("untimed")
collect_ignore = ["clients"]  # run by `make test-clients`, where Slotzero is not installed


@pytest.fixture(scope="session")
def oracles(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], Oracle]":
    """Return a function that gets the oracle of a family, and builds each oracle once a session."""
    from oracle import FAMILIES, build

    built: dict[str, Oracle] = {}

    def get(family: str) -> "Oracle":
        if family not in built:
            folder: Path = tmp_path_factory.mktemp(family)
            built[family] = build(FAMILIES[family], folder)
        return built[family]

    return get


@pytest.fixture(params=[False, True], ids=["in order", "overlapped"])
def overlaps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run the test with and without overlap: whether its engines launch a step before they commit
    the previous one, as on a GPU."""
    from slotzero.executor.worker import Worker

    monkeypatch.setattr(Worker, "overlaps", request.param)
    return bool(request.param)


LONGEST = (
    "tests/server/test_ray.py",
    "tests/certify/test_mutants.py",
    "tests/kernels/test_triton.py",
    "tests/speculative/test_speculative.py",
    "tests/distributed/test_parallel.py",
    "tests/certify/test_answers.py",
    "tests/server/test_openai_client.py",
    "tests/certify/test_certify.py",
    "tests/models/test_recurrent.py",
    "tests/engine/test_engine.py",
    "tests/models/test_models.py",
    "tests/models/test_windows.py",
    "tests/certify/test_sanitize.py",
    "tests/quantization/test_models.py",
    "tests/engine/test_weight_update.py",
    "tests/grammars/test_structured.py",
    "tests/test_bad_input.py",
    "tests/server/test_fleet_http.py",
    "tests/models/test_latent.py",
    "tests/engine/test_scheduler_random.py",
    "tests/speculative/test_assistant.py",
)
"""The files that take longest, slowest first."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip a file whose tests are all slow, without importing it, if slow tests are deselected."""
    if "not slow" not in config.option.markexpr or not collection_path.name.startswith("test_"):
        return None
    is_slow = re.search(
        r"^pytestmark = [\s\[]*pytest\.mark\.(slow|gpu)", collection_path.read_text(), re.M
    )
    return True if is_slow else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests so that the slowest files start first, and files without a slow test last: no
    worker then begins a long file when the others have nothing left to do."""
    rank = {name: place for place, name in enumerate(LONGEST)}
    slow = {file_of(item) for item in items if item.get_closest_marker("slow")}

    def place(item: pytest.Item) -> tuple[int, bool]:
        return rank.get(file_of(item), len(rank)), file_of(item) not in slow

    items.sort(key=place)


def file_of(item: pytest.Item) -> str:
    return item.nodeid.split("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from by_file import ByFile

    return ByFile(config, log)


def pytest_collection_finish() -> None:
    """Exclude modules and tests from garbage collection: to look at them takes a twentieth of the
    time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or extension modules report their types as leaked


def pytest_configure(config: pytest.Config) -> None:
    """Build the CPU kernels once, before several worker processes need them at the same time.

    A failure is ignored here: the tests that use the kernels report it.
    """
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        with contextlib.suppress(CapacityError):
            load_kernels()


_sees_gpu = torch.cuda.is_available
_num_threads = torch.get_num_threads()

THREADED = "tests/kernels/", "tests/sampling/", "tests/graph/", "tests/runners/"
"""Tests that use one thread per core. All other tests run on one thread: their models are tiny and
the cores are busy with other tests, so splitting a step takes longer than computing it."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Hide the GPU from tests without the gpu marker, and limit most of these to one thread."""
    is_gpu_test = item.get_closest_marker("gpu") is not None
    torch.cuda.is_available = _sees_gpu if is_gpu_test else lambda: False
    is_threaded = is_gpu_test or item.nodeid.startswith(THREADED)
    torch.set_num_threads(_num_threads if is_threaded else 1)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Give a GPU's memory back: other processes test on it, too."""
    if item.get_closest_marker("gpu") is not None and _sees_gpu():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Handle Ctrl-C as in a foreground process: a shell starts background ones ignoring it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _logged_as_before() -> Iterator[None]:
    """Restore the server's log settings, which `slotzero serve` changes for the whole process."""
    log = logging.getLogger("slotzero.server")
    before = log.level, log.propagate, log.handlers[:]
    yield
    log.level, log.propagate, log.handlers[:] = before


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(0)
    torch.manual_seed(0)
