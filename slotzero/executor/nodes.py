"""The other machines of an engine, as rank 0 sees them.

Rank 0 listens at --master-addr and --master-port until every node has connected (node_agent.py),
tells each node which ranks to start, and accepts the connections of these ranks. A node keeps its
first connection: over it, the node reports when a rank has ended, and learns when the engine will
not be restarted.

The rules: a node whose settings contradict those of node 0 is refused with the name of the setting,
and may connect again; if a node does not connect in time, the error says what to run there.
"""

import atexit
import contextlib
import os
import socket
import sys
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

from slotzero import __version__
from slotzero.config import EngineConfig
from slotzero.distributed import secure_socket
from slotzero.errors import ConfigError, RankLostError
from slotzero.executor.node_messages import LISTENER, End, Hello, Refusal, StartRanks
from slotzero.executor.rank_group import START_TIMEOUT, Rendezvous
from slotzero.system.child import ending

PER_NODE_SETTINGS = ("node_rank", "node_timeout", "master_addr", "show_progress")
_POLL = 0.2
_COMMAND = "slotzero serve with the same --nnodes, --master-addr and --master-port, and --node-rank"


class Nodes:
    def __init__(self, config: EngineConfig, on_gpus: bool) -> None:
        self._config, self._on_gpus = config, on_gpus
        self._key = secure_socket.given_key()
        self._lines: dict[int, Connection] = {}  # by node rank
        self._where = f"{config.master_addr}:{config.master_port}"
        self._refused = ""
        self._store: Any = None
        self._is_placed = LISTENER in os.environ  # a launcher starts this node and the others
        self._listener = _listen(config)
        atexit.register(self.dismiss)

    def gather(self, num_threads: int) -> dict[int, Connection]:
        """Wait for all nodes and their ranks, and return the connections by rank."""
        per_node = self._config.ranks_per_node
        with self._listener:
            self._await_nodes()
            for node, node_line in self._lines.items():
                ranks = range(node * per_node, (node + 1) * per_node)
                node_line.send(StartRanks(ranks, num_threads))
            return self._await_ranks()

    def rendezvous(self) -> Rendezvous:
        """Return a rendezvous over a store that listens at the same address."""
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
        """Return a message about a rank or node that has ended, or an empty string."""
        for node, node_line in self._lines.items():
            try:
                if node_line.poll():
                    ended = node_line.recv()
                    who = f"rank {ended.rank} (process {ended.pid} on node {node})"
                    return f"{who} {ending(ended.code)}: see its log there"
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
        began, is_logged = time.monotonic(), self._is_placed
        while missing := sorted(set(range(1, self._config.nnodes)) - set(self._lines)):
            if time.monotonic() - began > self._config.node_timeout:
                raise RankLostError(self._late(missing[0]))
            if not is_logged:
                is_logged = True
                _say(f"waiting at {self._where} for other nodes: on each, run {_COMMAND} N")
            connection = secure_socket.accept(self._listener, self._key, _POLL)
            if connection is not None:
                self._admit(connection)
            self._forget_gone()

    def _late(self, node: int) -> str:
        late = (
            f"node {node} of {self._config.nnodes} did not connect to {self._where} within "
            f"{self._config.node_timeout:g} s{self._refused}"
        )
        remedy = f"; on that machine, run {_COMMAND} {node}"
        if self._config.master_addr.startswith("127."):
            remedy += " (other machines cannot reach a loopback --master-addr)"
        return late if self._is_placed else late + remedy

    def _admit(self, connection: Connection) -> None:
        try:
            polled = connection.poll(secure_socket.HANDSHAKE)
            hello: Any = connection.recv() if polled else None
            why = self._refusal(hello) if isinstance(hello, Hello) else "it sent no Hello message"
            if not why:
                self._lines[hello.node_rank] = connection
                return
            connection.send(Refusal(why))
        except (EOFError, OSError):
            why = "it closed the connection"
        connection.close()
        self._refused = f" (a node was refused: {why})"
        _say(f"a node was refused: {why}")

    def _refusal(self, hello: Hello) -> str:
        """Return why this node is refused, or an empty string."""
        config = self._config
        if hello.version != __version__:
            return (
                f"it has slotzero {hello.version}, but node 0 has {__version__}: install the same "
                "version"
            )
        for name, value in hello.given.items():
            expected = getattr(config, name)
            if name not in PER_NODE_SETTINGS and value != expected:
                return (
                    f"{name} is {value!r} on node {hello.node_rank}, but {expected!r} on node 0: "
                    "use the same value on both"
                )
        if hello.node_rank in self._lines:
            return f"node {hello.node_rank} has connected already: use a different --node-rank"
        num_gpus, needed = hello.num_gpus, config.ranks_per_node
        if num_gpus is not None and (num_gpus > 0) != self._on_gpus:
            devices = ("a GPU", "a CPU") if num_gpus else ("a CPU", "a GPU")
            return (
                f"node {hello.node_rank} would compute on {devices[0]}, but node 0 on "
                f"{devices[1]}: use the same --backend on both"
            )
        if num_gpus and num_gpus < needed:
            return (
                f"tensor_parallel_size={config.tensor_parallel_size} over {config.nnodes} nodes "
                f"needs {needed} GPUs on each, but node {hello.node_rank} has {num_gpus}"
            )
        return ""

    def _forget_gone(self) -> None:
        """Forget the nodes that are gone.

        A node sends nothing before it receives a message, so if its connection is readable, it has
        ended.
        """
        for node, node_line in list(self._lines.items()):
            if node_line.poll():
                node_line.close()
                del self._lines[node]

    def _await_ranks(self) -> dict[int, Connection]:
        config, ranks = self._config, dict[int, Connection]()
        expected = range(config.ranks_per_node, config.tensor_parallel_size)
        until = time.monotonic() + START_TIMEOUT
        while missing := sorted(set(expected) - set(ranks)):
            lost = self.lost()
            if lost or time.monotonic() > until:
                late = f"rank {missing[0]} did not connect within {START_TIMEOUT:g} s"
                raise RankLostError(lost or late)
            connection = secure_socket.accept(self._listener, self._key, _POLL)
            if connection is None:
                continue
            with contextlib.suppress(EOFError, OSError):
                rank = connection.recv() if connection.poll(secure_socket.HANDSHAKE) else None
                if rank in missing:
                    ranks[rank] = connection
                    continue
            connection.close()  # a surplus node, which will connect again
        return ranks


def _listen(config: EngineConfig) -> socket.socket:
    inherited = os.environ.pop(LISTENER, None)
    if inherited is not None:
        return socket.socket(fileno=int(inherited))
    try:
        return socket.create_server((config.master_addr, config.master_port))
    except OSError as error:
        known = error.errno is not None and error.errno > 0  # negative if a name does not resolve
        reason = os.strerror(error.errno or 0) if known else error.strerror
        raise ConfigError(
            f"cannot listen on {config.master_addr}:{config.master_port} ({reason}): "
            "--master-addr must be an IPv4 address of node 0, and --master-port a free port there; "
            "change them on every node"
        ) from None


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
