"""Engines of a fleet on the machines of a Ray cluster. Imported only with `--executor ray`.

Ray only decides on which machine a rank runs. A Ray task per engine connects to the server and
starts the engine's process with that connection (server/process.py); one task per further rank is a
node agent (executor/node_agent.py) with one rank. To Ray, a task is a rank with its CPUs and its
GPU. The tasks of an engine live as long as its process; a restarted engine has new tasks.

The rules: all engines fit at once, or none is started and the error names what is missing; the
ranks of one engine are on one machine if one has room, and engines are spread over machines. When a
machine is lost, Ray moves its reservation elsewhere as soon as it can, and the engine waits for
that.
"""

import asyncio
import contextlib
import json
import logging
import os
import secrets
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slotzero import __version__
from slotzero.config import EngineConfig
from slotzero.distributed import secure_socket
from slotzero.errors import ConfigError, RankLostError
from slotzero.executor.node_agent import NodeAgent
from slotzero.executor.node_messages import LISTENER, Hello
from slotzero.server.share import THREADS, Share
from slotzero.system import child

ADDRESS = "RAY_ADDRESS"
CPU, GPU = "CPU", "GPU"  # as Ray calls them
_POLL = 0.2

Resources = Mapping[str, float]
Address = tuple[str, int]


@dataclass(frozen=True)
class PlacementPlan:
    """The resources to reserve in Ray."""

    rank: Resources
    ranks_per_bundle: int
    """Ray places all ranks of a bundle on one machine."""
    num_bundles: int
    strategy: str
    share: Share
    """The share of a machine that each engine gets, assuming the most engines that fit on one."""

    @classmethod
    def of(
        cls, config: EngineConfig, num_engines: int, nodes: Sequence[Resources]
    ) -> "PlacementPlan":
        size, rank = config.tensor_parallel_size, _of_rank(config, nodes)
        num_ranks = size * num_engines
        for per_bundle, strategy in ((size, "SPREAD"), (1, "PACK")):
            bundle = _times(rank, per_bundle)
            fitting = [min(node.get(k, 0) // num for k, num in bundle.items()) for node in nodes]
            if sum(fitting) * per_bundle >= num_ranks:
                shared_by = 1 if GPU in rank else min(num_engines, int(max(fitting)))
                share = Share(0, shared_by)
                return cls(rank, per_bundle, num_ranks // per_bundle, strategy, share)
        total = {name: sum(node.get(name, 0) for node in nodes) for name in rank}
        raise ConfigError(
            f"executor=ray: {num_ranks} ranks with {_counted(rank)} each do not fit: the cluster's "
            f"{len(nodes)} machines have {_counted(total)}; use fewer ranks or add machines"
        )

    @property
    def bundles(self) -> list[Resources]:
        return [_times(self.rank, self.ranks_per_bundle)] * self.num_bundles


class RayPlaces:
    """A reservation in Ray for a number of engines."""

    def __init__(self, config: EngineConfig, num_engines: int) -> None:
        _connect()
        self._config = config
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        self._plan = plan = PlacementPlan.of(config, num_engines, nodes)
        self._group = placement_group(plan.bundles, strategy=plan.strategy)
        if not self._group.wait(config.node_timeout):
            free = {name: ray.available_resources().get(name, 0) for name in plan.rank}
            self.close()
            raise ConfigError(
                f"executor=ray: {plan.num_bundles} times {_counted(plan.bundles[0])} did not "
                f"become free within {config.node_timeout:g} s, only {_counted(free)} "
                "is free: use fewer ranks, or end other jobs"
            )

    def close(self) -> None:
        remove_placement_group(self._group)
        ray.shutdown()

    async def launch(
        self, settings: Mapping[str, Any], share: Share
    ) -> tuple["RayProcess", socket.socket]:
        """Start the process of the engine with the index of `share`."""
        key, host = secrets.token_hex(16), ray.util.get_node_ip_address()
        size = self._config.tensor_parallel_size
        first = share.index * size
        process = RayProcess()
        try:
            with socket.create_server((host, 0)) as listener:
                address = host, listener.getsockname()[1]
                local = dict(settings) | {"executor": "local", "nnodes": size}
                words = [json.dumps(local, default=os.fspath), str(self._plan.share)]
                env = {secure_socket.KEY: key, THREADS: f"{self._plan.rank[CPU]:g}"}
                process.add(self._task(_run_engine, first), __version__, address, words, env)
                end, meeting = await _came(listener, key.encode(), process)
            for rank in range(1, size):
                seconds = self._config.node_timeout
                process.add(self._task(_run_rank, first + rank), rank, meeting, key, seconds)
        except BaseException:
            process.kill()
            raise
        return process, end

    def _task(self, function: Any, rank: int) -> Any:
        """Return a Ray task. `rank` counts the ranks of all engines."""
        strategy = PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=rank // self._plan.ranks_per_bundle
        )
        return ray.remote(function).options(
            num_cpus=self._plan.rank[CPU],
            num_gpus=self._plan.rank.get(GPU, 0),
            scheduling_strategy=strategy,
            max_retries=0,
        )


class RayProcess:
    """The Ray tasks of one engine process: that of the first rank, and those of the others."""

    pid = None  # the process is on another machine

    def __init__(self) -> None:
        self._refs: list[Any] = []

    def add(self, task: Any, *args: Any) -> None:
        self._refs.append(task.remote(*args))

    async def wait(self) -> int:
        """Wait for all tasks, and return the exit code of the first."""
        return (await asyncio.gather(*map(_code, self._refs)))[0]

    def kill(self) -> None:
        for ref in self._refs:
            ray.cancel(ref, force=True)

    def check(self) -> None:
        """Raise an error if the first task has ended."""
        if not ray.wait(self._refs[:1], timeout=0)[0]:
            return
        try:
            how = child.ending(ray.get(self._refs[0]))
        except ray.exceptions.RayTaskError as error:
            raise ConfigError(f"Ray could not start the engine: {_last_line(error)}") from None
        except ray.exceptions.RayError as error:
            how = f"was lost: {_last_line(error)}"
        raise RankLostError(f"Ray's task {how}")


def _last_line(error: Exception) -> str:
    return str(error).strip().splitlines()[-1]


async def _code(ref: Any) -> int:
    try:
        code: int = await asyncio.wrap_future(ref.future())
        return code
    except ray.exceptions.RayError:
        return -9  # its machine or its Ray worker is gone


async def _came(
    listener: socket.socket, key: bytes, process: RayProcess
) -> tuple[socket.socket, Address]:
    """Wait for the engine to connect. Ray may need time to find room again for an engine that was
    placed once."""
    while True:
        if came := await asyncio.to_thread(_accept, listener, key):
            return came
        process.check()


def _accept(listener: socket.socket, key: bytes) -> tuple[socket.socket, Address] | None:
    """Return this side's socket, and the address at which the first rank waits for the others."""
    connection = secure_socket.accept(listener, key, _POLL)
    if connection is None:
        return None
    with connection, contextlib.suppress(EOFError, OSError, ValueError):  # it is lost already
        if connection.poll(secure_socket.HANDSHAKE):
            host, port = json.loads(connection.recv_bytes())
            return socket.socket(fileno=os.dup(connection.fileno())), (host, port)
    return None


# Functions that run in Ray's workers


def _run_engine(version: str, address: Address, words: list[str], env: dict[str, str]) -> int:
    if version != __version__:
        raise ConfigError(
            f"a Ray node has slotzero {__version__} and the server has {version}: install the same"
        )
    settings, share = words
    with (
        secure_socket.connect(*address, env[secure_socket.KEY].encode()) as connection,
        socket.create_server((ray.util.get_node_ip_address(), 0)) as listener,
    ):
        host, port = listener.getsockname()[:2]
        connection.send_bytes(json.dumps([host, port]).encode())
        fd, listener_fd = connection.fileno(), listener.fileno()
        local = json.loads(settings) | {"master_addr": host, "master_port": port}
        process = child.start(
            child.ENGINE,
            [str(fd), json.dumps(local), share],
            [fd, listener_fd],
            env | {LISTENER: str(listener_fd)},
        )
    return process.wait()


def _run_rank(rank: int, address: Address, key: str, seconds: float) -> int:
    NodeAgent(Hello(rank, {}, None), address, key.encode(), seconds).attend()
    return 0


# Requests to the cluster


def _connect() -> None:
    host, _, port = os.environ.get(ADDRESS, "").rpartition(":")
    try:
        if host and port.isdecimal():  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=secure_socket.HANDSHAKE).close()
        ray.init(address="auto", logging_level=logging.WARNING)
    except OSError:
        where = f"at {ADDRESS}={host}:{port}" if host else "on this machine"
        raise ConfigError(
            f"executor=ray: no Ray cluster {where}; start one with `ray start --head`, or "
            f"set {ADDRESS}"
        ) from None


def _of_rank(config: EngineConfig, nodes: Sequence[Resources]) -> Resources:
    """Return the resources of one rank: OMP_NUM_THREADS CPUs (default 1), and a GPU if the cluster
    has any, unless the backend is cpu."""
    resources: dict[str, float] = {CPU: int(os.environ.get(THREADS) or 1)}
    if config.backend == "cuda" or (config.backend != "cpu" and any(GPU in node for node in nodes)):
        resources[GPU] = 1
    return resources


def _times(resources: Resources, num: int) -> Resources:
    return {name: num * each for name, each in resources.items()}


def _counted(resources: Resources) -> str:
    return " and ".join(f"{num:g} {name}" for name, num in resources.items())
