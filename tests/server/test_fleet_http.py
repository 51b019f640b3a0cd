"""Test of a server with two engines, of which one is killed under load."""

from pathlib import Path
from typing import Any

import pytest
from crowd import NUM_SLOTS, engines, kill_one_under_load
from served import Server, children, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    words = f"tiny:llama --backend eager --data-parallel-size 2 --max-num-seqs {NUM_SLOTS}"
    made = Server(words.split(), tmp_path / "log")
    yield made
    made.kill()


def test_one_of_two_is_killed_under_load(server: Server) -> None:
    assert any(f"{n} of 2 engines. Try:" in line for line in server.lines for n in (1, 2))
    wait_until(lambda: engines(server.url) == ["ready", "ready"])
    kill_one_under_load(server, children(server.process.pid)[0])
    alive = children(server.process.pid)
    assert len(alive) == 2
    assert server.end() == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in alive)
