"""Tests of how several engines share the GPUs, threads and memory of a machine."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from slotzero.config import EngineConfig
from slotzero.errors import ConfigError
from slotzero.pools import budget
from slotzero.server.share import GPUS, THREADS, WHOLE, Share
from slotzero.system import processors

See = Callable[[int], None]


@pytest.fixture(autouse=True)
def _kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore environment and settings after each test."""
    monkeypatch.setattr(torch, "set_num_threads", lambda num: None)
    monkeypatch.setenv(THREADS, "1")
    monkeypatch.setenv(GPUS, "0")
    monkeypatch.delenv(GPUS)


@pytest.fixture
def see(monkeypatch: pytest.MonkeyPatch) -> See:
    """Return a function that fakes a machine with some GPUs, visible as the environment says."""

    def see(num_gpus: int) -> None:
        def count() -> int:
            named = os.environ.get(GPUS, ",".join(map(str, range(num_gpus)))).split(",")
            return sum(name.startswith("GPU-") or 0 <= int(name or -1) < num_gpus for name in named)

        monkeypatch.setattr(torch.cuda, "device_count", count)

    return see


def devices(size: int, **settings: Any) -> list[str | None]:
    """Return CUDA_VISIBLE_DEVICES of each engine."""
    before, found = os.environ.get(GPUS), []
    for i in range(size):
        Share(i, size).taken(EngineConfig(**settings))
        found.append(os.environ.get(GPUS))
        os.environ.pop(GPUS, None)
        if before is not None:
            os.environ[GPUS] = before
    return found


def test_a_share_is_encoded_in_one_word() -> None:
    assert Share.read(str(Share(2, 5))) == Share(2, 5)
    assert Share.read("0/1") == WHOLE


def test_a_single_engine_gets_everything(see: See, monkeypatch: pytest.MonkeyPatch) -> None:
    see(4)
    monkeypatch.delenv(THREADS)
    config = EngineConfig(tensor_parallel_size=4)
    assert WHOLE.taken(config) is config
    assert (GPUS in os.environ, THREADS in os.environ) == (False, False)


def test_gpus_are_divided(see: See, monkeypatch: pytest.MonkeyPatch) -> None:
    see(5)
    assert devices(2) == ["0", "1"]
    assert devices(2, tensor_parallel_size=2) == ["0,1", "2,3"]
    monkeypatch.setenv(GPUS, "4,2,1")
    assert devices(3) == ["4", "2", "1"]
    monkeypatch.setenv(GPUS, "GPU-8a,GPU-1b")
    assert devices(2) == ["GPU-8a", "GPU-1b"]


@pytest.mark.parametrize("index", [0, 1])
def test_too_few_gpus_are_refused_by_each(see: See, index: int) -> None:
    see(3)
    message = "data_parallel_size=2 with tensor_parallel_size=2 needs 4 GPUs: this machine has 3"
    with pytest.raises(ConfigError, match=message):
        Share(index, 2).taken(EngineConfig(tensor_parallel_size=2))


def test_gpus_that_cannot_be_chosen_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA has read the environment already, so its count of GPUs no longer follows it."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ConfigError, match=f"cannot be shared out here; .* {GPUS}"):
        Share(0, 2).taken(EngineConfig())


@pytest.mark.parametrize(("num_gpus", "backend"), [(0, "auto"), (1, "cpu")])
def test_on_a_cpu_memory_is_divided(
    see: See, monkeypatch: pytest.MonkeyPatch, num_gpus: int, backend: str
) -> None:
    see(num_gpus)
    monkeypatch.setattr(budget, "free_bytes", lambda device, share: 900)
    assert Share(1, 3).taken(EngineConfig(backend=backend)).kv_cache_memory == 300
    asked = EngineConfig(backend=backend, kv_cache_memory=800)
    assert Share(1, 3).taken(asked) == asked
    assert GPUS not in os.environ


def test_threads_are_divided_unless_they_were_set(
    see: See, monkeypatch: pytest.MonkeyPatch
) -> None:
    see(0)
    chosen: list[int] = []
    monkeypatch.setattr(processors, "num_processors", lambda: 9)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    Share(0, 2).taken(EngineConfig())
    assert (chosen, os.environ[THREADS]) == ([], "1")
    monkeypatch.delenv(THREADS)
    Share(0, 2).taken(EngineConfig())
    assert (chosen, os.environ[THREADS]) == ([4], "4")
    monkeypatch.delenv(THREADS)
    Share(0, 20).taken(EngineConfig())
    assert chosen == [4, 1]
