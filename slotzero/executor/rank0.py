"""Rank 0 of several ranks: it starts the others, sends them every step, and detects lost ranks.

Each other rank is a process `python -m slotzero.executor.follower`, connected by a socket pair, or
by TCP if it is on another machine (nodes.py). Collectives use connections of torch.distributed.

The rules: if a rank ends or does not start in time, the error names it. If a step fails on one
rank, the ranks have diverged, so all of them end.
"""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, final

import torch

from slotzero.checkpoint.source import checkpoint_of
from slotzero.config import EngineConfig
from slotzero.distributed import secure_socket
from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import ConfigError, RankLostError
from slotzero.executor.limits import choose_backend
from slotzero.executor.nodes import Nodes
from slotzero.executor.rank_group import START_TIMEOUT, RankGroup, RemoteRanks, Rendezvous
from slotzero.executor.step_message import Message
from slotzero.models.implementation import parse_model
from slotzero.models.model import ModelShape
from slotzero.system import child
from slotzero.system.processors import num_processors
from slotzero.system.stacks import SIGNAL

PATIENCE = 5.0  # seconds for a rank that broke a collective to end, so that the error can name it
THREADS = "OMP_NUM_THREADS"


RankTask = Callable[[EngineConfig, RankGroup], Any]
"""A task that a rank runs instead of waiting for steps; its result is the rank's report."""


def start_ranks(config: EngineConfig, model: ModelShape, task: RankTask | None = None) -> RankGroup:
    """Start the other ranks of an engine; raise before that if the model cannot be split."""
    size = config.tensor_parallel_size
    if config.executor == "ray":
        raise ConfigError("executor=ray is supported by slotzero serve only; use executor=local")
    if config.node_rank:
        raise ConfigError(
            f"node_rank={config.node_rank}: the engine runs on node 0; on this machine run "
            f"slotzero serve with --node-rank {config.node_rank} and the same --nnodes, "
            "--master-addr and --master-port as there"
        )
    if config.enable_expert_parallel and (size == 1 or model.experts is None):
        needed = "a model with experts" if size > 1 else "tensor_parallel_size above 1"
        raise ConfigError(f"enable_expert_parallel needs {needed}")
    if config.enable_dp_attention and size == 1:
        raise ConfigError("enable_dp_attention needs tensor_parallel_size above 1")
    if size == 1:
        return RankGroup()
    device, _ = choose_backend(config)
    if device.type == "cuda" and config.ranks_per_node > torch.cuda.device_count():
        over = f" over {config.nnodes} nodes" if config.nnodes > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size={size}{over}: this machine has {torch.cuda.device_count()} "
            f"GPUs, but {config.ranks_per_node} are needed; choose a smaller size"
        )
    if config.sanitize != "off":
        raise ConfigError(
            f"sanitize={config.sanitize} supports one rank only: with tensor_parallel_size={size} "
            "use slotzero certify"
        )
    if torch.distributed.is_initialized():
        raise ConfigError(
            f"tensor_parallel_size={size}: this process already has an engine with several ranks; "
            "close that one first with its engine.rank_group.close()"
        )
    model.shard(Ranks(0, size, "", config.enable_expert_parallel, config.enable_dp_attention))
    return Rank0(config, device, task)


@contextlib.contextmanager
def certify_ranks(config: EngineConfig, task: RankTask) -> Iterator[RankGroup]:
    """Start ranks that all run the certification by themselves, without messages for each step."""
    model = parse_model(checkpoint_of(config).config, config.model_impl)
    rank_group = start_ranks(config, model, task)
    try:
        yield rank_group
    finally:
        rank_group.close()


@final
class Rank0(RemoteRanks):
    def __init__(self, config: EngineConfig, device: torch.device, task: RankTask | None) -> None:
        """Start the other ranks; they run `task`, or, if it is None, the messages of rank 0."""
        super().__init__(ALONE, {}, config.rank_timeout)
        self._task = task
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="slotzero-ranks-")
        self._nodes: Nodes | None = None
        size, per_node = config.tensor_parallel_size, config.ranks_per_node
        rendezvous = Rendezvous(size, f"file://{self._folder.name}/store", config.rank_timeout)
        if THREADS not in os.environ:  # equal on all ranks, so that all split sums the same way
            torch.set_num_threads(max(1, num_processors() // per_node))
        with self.watched("starting"):
            if config.nnodes > 1:
                self._nodes = Nodes(config, device.type == "cuda")
                self._connections |= self._nodes.gather(torch.get_num_threads())
                rendezvous = self._nodes.rendezvous()
            for rank in range(1, per_node):
                self._start(rank)
            for connection in self._connections.values():
                connection.send((rendezvous, config, task))
                secure_socket.wait_at_most(connection, config.rank_timeout, [socket.SO_SNDTIMEO])
            self._await_others()
            self.ranks = rendezvous.join(
                0,
                device,
                config.enable_expert_parallel,
                config.enable_dp_attention,
                config.deterministic,
            )

    @property
    def pids(self) -> list[int]:
        """Process ids of the other ranks on this machine."""
        return [process.pid for process in self._processes.values()]

    def send(self, messages: Sequence[Message]) -> None:
        if self._task is None:
            super().send(messages)

    def ask_for_stacks(self) -> None:
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, SIGNAL)

    def reports(self) -> list[Any]:
        with self.watched("waiting for a report"):
            return [self._connections[rank].recv() for rank in sorted(self._connections)]

    @contextlib.contextmanager
    def watched(self, doing: object, in_step: bool = False) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            may_be_remote = isinstance(error, RuntimeError | OSError | EOFError)
            is_late = "imed out" in str(error)
            if is_late and in_step:
                self.ask_for_stacks()
            lost = self._lost(PATIENCE) if may_be_remote else ""
            if not (in_step or may_be_remote or isinstance(error, RankLostError)):
                self.dismiss()  # a restart of the engine would fail the same way
            self._end()
            if not lost and is_late:
                lost = f"a rank did not respond while {doing} (see --rank-timeout): {error}"
            if not lost and in_step and isinstance(error, Exception):
                lost = f"one rank failed, so all ranks were ended: {error}"
            if not lost or isinstance(error, RankLostError):
                raise
            raise RankLostError(lost) from error

    def dismiss(self) -> None:
        if self._nodes is not None:
            self._nodes.dismiss()

    def close(self) -> None:
        self.dismiss()
        self._end()

    def _end(self) -> None:
        """End the other ranks: they end when their connection closes, or else are killed.

        The agents of other machines wait for this engine to restart.
        """
        if self._nodes is not None:
            self._nodes.close()
        for connection in self._connections.values():
            connection.close()
        deadline = time.monotonic() + PATIENCE
        for process in self._processes.values():
            child.finish(process, deadline - time.monotonic())
        self._connections.clear()
        self._processes.clear()
        self._folder.cleanup()
        if self.ranks.is_distributed:
            torch.distributed.destroy_process_group()
            self.ranks = ALONE

    def _start(self, rank: int) -> None:
        parent_end, child_end = socket.socketpair()
        with child_end:
            fd, threads = child_end.fileno(), {THREADS: str(torch.get_num_threads())}
            words = [str(rank), str(fd)]
            self._processes[rank] = child.start(child.FOLLOWER, words, [fd], threads)
        self._connections[rank] = Connection(parent_end.detach())

    def _await_others(self) -> None:
        """Wait until each rank has reported that it is ready; raise at once if a rank ends."""
        deadline = time.monotonic() + START_TIMEOUT
        for connection in self._connections.values():
            while not connection.poll(0.1):
                lost = self._lost(0.0)
                if lost or time.monotonic() > deadline:
                    late = f"a rank did not start within {START_TIMEOUT:g} s"
                    raise RankLostError(lost or late)
            connection.recv()

    def _lost(self, seconds: float) -> str:
        """Return a message about a rank that has ended or ends within this time, else empty."""
        until = time.monotonic() + seconds
        while True:
            for rank, process in self._processes.items():
                code = process.poll()
                if code is not None:
                    how = child.ending(code)
                    return f"rank {rank} (process {process.pid}) {how}: see its log"
            if self._nodes is not None and (lost := self._nodes.lost()):
                return lost
            if time.monotonic() >= until:
                return ""
            time.sleep(0.02)
