"""Tests of a server whose engine has two ranks, of which one is killed."""

from pathlib import Path

import pytest
from served import (
    PATIENCE,
    RANK_TIMEOUT,
    Server,
    children,
    free_port,
    kill_a_rank,
    outpost,
    wait_until,
)

from slotzero.distributed.secure_socket import KEY

pytestmark = pytest.mark.slow

WORDS = f"tiny:llama --backend eager --tensor-parallel-size 2 --rank-timeout {RANK_TIMEOUT}"


def test_a_rank_that_is_killed_is_replaced(tmp_path: Path) -> None:
    server = Server([*WORDS.split(), "--max-num-seqs", "2"], tmp_path / "log")
    (engine,) = children(server.process.pid)
    (rank,) = children(engine)
    kill_a_rank(server, rank, f"rank 1 (process {rank})")
    alive = [engine, *children(server.process.pid)]
    assert server.end() == 0
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in alive))


def test_a_killed_rank_on_another_node_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "only-for-tests-" * 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    nodes = f"--nnodes 2 --master-port {free_port()} --max-num-seqs 2"
    with outpost([*WORDS.split(), *nodes.split()]) as node:
        server = Server([*WORDS.split(), *nodes.split()], tmp_path / "log")
        (rank,) = children(node.pid)
        kill_a_rank(server, rank, f"rank 1 (process {rank} on node 1)")
        assert server.end() == 0
        assert node.wait(PATIENCE) == 0
