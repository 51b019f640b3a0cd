"""Tests with a Ray cluster of two nodes on this machine: placement and loss of engines."""

import asyncio
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from crowd import NUM_SLOTS, engines, kill_one_under_load
from ray.cluster_utils import Cluster
from served import Server, descendants, free_port, kill_a_rank, wait_until

import slotzero
from slotzero import LLM
from slotzero.cli import serve
from slotzero.cli.main import main
from slotzero.config import EngineConfig
from slotzero.errors import ConfigError
from slotzero.server import ray_places
from slotzero.server.ray_places import PlacementPlan, RayPlaces
from slotzero.server.share import WHOLE, Share
from slotzero.system.child import ENGINE, FOLLOWER

pytestmark = pytest.mark.slow

WORDS = f"tiny:llama --backend eager --executor ray --max-num-seqs {NUM_SLOTS}"
ROOM = {"num_cpus": 1, "object_store_memory": 80 << 20}  # for one rank
ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_worker_niceness": "0",  # or engines wait until other tests leave them a processor
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        made = Cluster()
        try:
            try:
                made.add_node(**ROOM, include_dashboard=False)
                made.add_node(**ROOM)
            # an error of Ray's own processes, before any of ours has started
            except Exception as error:
                pytest.skip(f"Ray cannot start two nodes on this machine: {error}")
            patch.setenv("RAY_ADDRESS", made.address)
            yield made
        finally:
            made.shutdown()


def ours(module: str) -> list[int]:
    """Return our processes in the Ray cluster that this process has started."""
    return descendants(os.getpid(), module)


def test_engines_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    server = Server([*WORDS.split(), "--data-parallel-size", "2"], tmp_path / "log")
    try:
        wait_until(lambda: engines(server.url) == ["ready", "ready"])
        assert descendants(server.process.pid, ENGINE) == []
        kill_one_under_load(server, ours(ENGINE)[0])
        lose_a_node(cluster, server)
        assert server.end() == 0
        wait_until(lambda: not ours(ENGINE))
    finally:
        server.kill()


def lose_a_node(cluster: Cluster, server: Server) -> None:
    """Remove a node: the other engine keeps serving, and the lost one is placed on a new node."""
    (worker,) = cluster.worker_nodes
    cluster.remove_node(worker, allow_graceful=False)
    wait_until(lambda: sorted(engines(server.url)) == ["ready", "restarting"])
    assert answer(server)
    cluster.add_node(**ROOM)
    wait_until(lambda: engines(server.url) == ["ready", "ready"])
    assert answer(server)


def answer(server: Server) -> str:
    made = server.client().completions.create(
        model="tiny:llama", prompt="Hello", max_tokens=8, temperature=0
    )
    return made.choices[0].text


def test_ranks_on_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    server = Server([*WORDS.split(), "--tensor-parallel-size", "2"], tmp_path / "log")
    try:
        wait_until(lambda: len(ours(FOLLOWER)) == 1)
        (rank,) = ours(FOLLOWER)
        kill_a_rank(server, rank, f"rank 1 (process {rank} on node 1)")
        assert server.end() == 0
        wait_until(lambda: not ours(ENGINE) + ours(FOLLOWER))
    finally:
        server.kill()


def plan(nodes: list[dict[str, float]], num_engines: int = 1, **settings: Any) -> PlacementPlan:
    return PlacementPlan.of(EngineConfig(**settings), num_engines, nodes)


def test_an_engine_is_on_one_machine_if_one_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    gpus: dict[str, float] = {"CPU": 16, "GPU": 4}
    whole = plan([gpus, gpus], 4, tensor_parallel_size=2)
    assert (whole.bundles, whole.strategy) == ([{"CPU": 4, "GPU": 2}] * 4, "SPREAD")
    assert whole.share == WHOLE, "Ray assigns GPUs to each engine"
    torn = plan([gpus, gpus], tensor_parallel_size=8)
    assert (torn.bundles, torn.strategy) == ([{"CPU": 2, "GPU": 1}] * 8, "PACK")
    cpus = plan([gpus, {"CPU": 16}], 3, backend="cpu")
    assert (cpus.bundles, cpus.share) == ([{"CPU": 2}] * 3, Share(0, 3))


@pytest.mark.parametrize(
    ("nodes", "settings", "named"),
    [
        (
            [{"CPU": 2}] * 2,
            {"tensor_parallel_size": 8},
            "8 ranks with 1 CPU .* 2 machines have 4 CPU",
        ),
        (
            [{"CPU": 9}, {"CPU": 9, "GPU": 1}],
            {"tensor_parallel_size": 2},
            "18 CPU and 1 GPU",
        ),
        ([{"CPU": 9}], {"backend": "cuda"}, "1 CPU and 1 GPU each .* have 9 CPU and 0 GPU"),
        ([], {}, "0 machines"),
    ],
)
def test_too_few_resources_are_named(
    nodes: list[Any], settings: dict[str, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with pytest.raises(ConfigError, match=named):
        plan(nodes, **settings)


def test_resources_in_use_are_named(cluster: Cluster) -> None:
    words = [*WORDS.split(), "--port", "0", "--node-timeout", "1"]
    with ray.init(address=cluster.address, logging_level=logging.WARNING):
        ray.get(ray.util.placement_group([{"CPU": 1}] * 2).ready())
        refused = subprocess.run(
            [sys.executable, "-m", "slotzero", "serve", *words], capture_output=True, text=True
        )
    assert refused.returncode == 2
    assert "1 times 1 CPU did not become free within 1 s, only 0 CPU is free" in refused.stderr


def test_another_version_on_a_node_is_named(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_places, "__version__", "9.9")
    places = RayPlaces(EngineConfig(), 1)
    try:
        with pytest.raises(ConfigError, match=r"and the server has 9\.9"):
            asyncio.run(places.launch({}, WHOLE))
    finally:
        places.close()


def test_without_ray_or_a_cluster(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["serve", *WORDS.split(), "--port", "0"]

    def connect(**_: Any) -> None:
        raise ConnectionError("nobody there")

    monkeypatch.setattr(ray, "init", connect)
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{free_port()}")
    assert main(words) == 2
    assert "no Ray cluster at RAY_ADDRESS=127.0.0.1:" in capsys.readouterr().err
    monkeypatch.delenv("RAY_ADDRESS")
    assert main(words) == 2
    assert "no Ray cluster on this machine" in capsys.readouterr().err
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name == "ray" else name)
    assert main(words) == 2
    assert "pip install 'slotzero[ray]'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="supported by slotzero serve"):
        LLM("tiny:llama", executor="ray")
    with pytest.raises(ConfigError, match="nnodes=2"):
        EngineConfig(executor="ray", tensor_parallel_size=2, nnodes=2)


def test_only_ray_places_imports_ray() -> None:
    package = Path(slotzero.__file__).parent
    importing = re.compile(r"^\s*(import|from) (ray\b|slotzero.server.ray_places)", re.MULTILINE)
    found = {file.name for file in package.rglob("*.py") if importing.search(file.read_text())}
    assert found == {"ray_places.py", "serve.py"}, (
        "serve.py imports ray_places.py if Ray is requested"
    )
