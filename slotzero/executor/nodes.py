"""The other machines of an engine, as rank 0 sees them.

It listens at --master-addr and --master-port until each has come (node_agent.py), tells it which
ranks to start, and takes the connections of those. A node keeps the connection over which it came:
there it says which of its ranks has ended, and is told when nobody will come back.

The rules: a node whose settings contradict ours is refused, by the name of what differs, and may
come again; one that has not come in time is an error that names it and says what to run there.
"""

import atexit
import contextlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from slotzero import __version__
from slotzero.config import EngineConfig
from slotzero.distributed import secure_socket
from slotzero.errors import ConfigError, RankLostError
from slotzero.executor.rank_group import Rendezvous
from slotzero.system.child import ending

LISTENER = "SLOTZERO_LISTENER"
"""A descriptor that listens there already, if whoever started this process has chosen the port."""
THEIR_OWN = ("node_rank", "node_timeout", "master_addr", "show_progress")
_POLL = 0.2
_COMMAND = "slotzero serve with the same --nnodes, --master-addr and --master-port, and --node-rank"


@dataclass(frozen=True)
class Hello:
    """A node has come."""

    node_rank: int
    given: Mapping[str, Any]
    """Settings that it was started with; whatever else is ours to say."""
    num_gpus: int | None
    """Those it would compute on; None: whoever placed it has counted."""
    version: str = __version__


@dataclass(frozen=True)
class Refusal:
    why: str


@dataclass(frozen=True)
class Start:
    ranks: range
    num_threads: int


@dataclass(frozen=True)
class Ended:
    rank: int
    pid: int
    code: int


@dataclass(frozen=True)
class End:
    """Nobody will come back."""


class Nodes:
    def __init__(self, config: EngineConfig, on_gpus: bool) -> None:
        self._config, self._on_gpus = config, on_gpus
        self._key = secure_socket.given_key()
        self._lines: dict[int, Connection] = {}  # by node rank
        self._where = f"{config.master_addr}:{config.master_port}"
        self._refused = ""
        self._store: Any = None
        self._is_placed = LISTENER in os.environ  # and so are the others
        self._listener = _listen(config)
        atexit.register(self.dismiss)

    def gather(self, num_threads: int) -> dict[int, Connection]:
        """Waits for all nodes and their ranks; -> by rank"""
        per_node = self._config.ranks_per_node
        with self._listener:
            self._await_nodes()
            for node, node_line in self._lines.items():
                ranks = range(node * per_node, (node + 1) * per_node)
                node_line.send(Start(ranks, num_threads))
            return self._await_ranks()

    def rendezvous(self) -> Rendezvous:
        """Over a store that listens at the same address."""
        from torch import distributed

        config = self._config
        with socket.create_server((config.master_addr, 0)) as listener:
            port = listener.getsockname()[1]
            self._store = distributed.TCPStore(  # type: ignore[attr-defined]
                config.master_addr,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=config.rank_timeout),
                master_listen_fd=listener.detach(),
            )
        store = f"tcp://{config.master_addr}:{port}"
        size, per_node = config.tensor_parallel_size, config.ranks_per_node
        return Rendezvous(size, store, config.rank_timeout, per_node)

    def lost(self) -> str:
        """Says which rank or node has ended; empty where none has."""
        for node, node_line in self._lines.items():
            try:
                if node_line.poll():
                    ended = node_line.recv()
                    who = f"rank {ended.rank} (process {ended.pid} on node {node})"
                    return f"{who} {ending(ended.code)}: see what it said there"
            except (EOFError, OSError):
                return f"node {node} is gone, and its ranks with it"
        return ""

    def dismiss(self) -> None:
        for node_line in list(self._lines.values()):  # another thread may close them
            with contextlib.suppress(OSError):
                node_line.send(End())

    def close(self) -> None:
        atexit.unregister(self.dismiss)
        self._listener.close()
        for node_line in self._lines.values():
            node_line.close()
        self._lines.clear()
        self._store = None

    def _await_nodes(self) -> None:
        began, is_said = time.monotonic(), self._is_placed
        while missing := sorted(set(range(1, self._config.nnodes)) - set(self._lines)):
            if time.monotonic() - began > self._config.node_timeout:
                raise RankLostError(self._late(missing[0]))
            if not is_said:
                is_said = True
                _say(f"waiting at {self._where} for nodes: there, {_COMMAND} N")
            came = secure_socket.accept(self._listener, self._key, _POLL)
            if came is not None:
                self._admit(came)
            self._forget_gone()

    def _late(self, node: int) -> str:
        late = (
            f"node {node} of {self._config.nnodes} did not come to {self._where} in "
            f"{self._config.node_timeout:g} s{self._refused}"
        )
        remedy = f"; run there {_COMMAND} {node}"
        if self._config.master_addr.startswith("127."):
            remedy += " (on another machine --master-addr cannot be loopback's)"
        return late if self._is_placed else late + remedy

    def _admit(self, came: Connection) -> None:
        try:
            hello: Any = came.recv() if came.poll(secure_socket.HANDSHAKE) else None
            why = self._refuses(hello) if isinstance(hello, Hello) else "a node comes first"
            if not why:
                self._lines[hello.node_rank] = came
                return
            came.send(Refusal(why))
        except (EOFError, OSError):
            why = "it hung up"
        came.close()
        self._refused = f" (one was refused: {why})"
        _say(f"a node was refused: {why}")

    def _refuses(self, hello: Hello) -> str:
        """Why; else empty."""
        config = self._config
        if hello.version != __version__:
            return f"it has slotzero {hello.version}, node 0 has {__version__}: install the same"
        for name, theirs in hello.given.items():
            ours = getattr(config, name)
            if name not in THEIR_OWN and theirs != ours:
                return (
                    f"{name} is {theirs!r} on node {hello.node_rank} and {ours!r} on node 0: "
                    "give both the same"
                )
        if hello.node_rank in self._lines:
            return f"node {hello.node_rank} is there already: each has a --node-rank of its own"
        num_gpus, needed = hello.num_gpus, config.ranks_per_node
        if num_gpus is not None and (num_gpus > 0) != self._on_gpus:
            devices = ("a GPU", "a CPU") if num_gpus else ("a CPU", "a GPU")
            return (
                f"node {hello.node_rank} would compute on {devices[0]} and node 0 on {devices[1]}: "
                "give both the same --backend"
            )
        if num_gpus and num_gpus < needed:
            return (
                f"tensor_parallel_size={config.tensor_parallel_size} over {config.nnodes} nodes "
                f"takes {needed} GPUs of each, node {hello.node_rank} has {num_gpus}"
            )
        return ""

    def _forget_gone(self) -> None:
        """Until it is told something a node says nothing: what comes is its end."""
        for node, node_line in list(self._lines.items()):
            if node_line.poll():
                node_line.close()
                del self._lines[node]

    def _await_ranks(self) -> dict[int, Connection]:
        config, ranks = self._config, dict[int, Connection]()
        expected = range(config.ranks_per_node, config.tensor_parallel_size)
        until = time.monotonic() + config.rank_timeout
        while missing := sorted(set(expected) - set(ranks)):
            lost = self.lost()
            if lost or time.monotonic() > until:
                late = f"rank {missing[0]} did not come in {config.rank_timeout:g} s"
                raise RankLostError(lost or late)
            came = secure_socket.accept(self._listener, self._key, _POLL)
            if came is None:
                continue
            with contextlib.suppress(EOFError, OSError):
                rank = came.recv() if came.poll(secure_socket.HANDSHAKE) else None
                if rank in missing:
                    ranks[rank] = came
                    continue
            came.close()  # a node too many, which will come again
        return ranks


def _listen(config: EngineConfig) -> socket.socket:
    inherited = os.environ.pop(LISTENER, None)
    if inherited is not None:
        return socket.socket(fileno=int(inherited))
    try:
        return socket.create_server((config.master_addr, config.master_port))
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # of names that lead nowhere it is not
        reason = os.strerror(error.errno or 0) if known else error.strerror
        raise ConfigError(
            f"cannot listen on {config.master_addr}:{config.master_port} ({reason}): "
            "--master-addr is an IPv4 address of node 0, and --master-port one that is free there; "
            "choose others, on every node"
        ) from None


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
