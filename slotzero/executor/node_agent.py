"""The agent of a machine other than node 0: `slotzero serve ... --node-rank 1`.

It connects to node 0 (nodes.py), starts the ranks that node 0 requests, and reports when one ends.
It does not know the model or what the ranks compute. The rules: its ranks end with node 0's engine
or with this process; when that engine ends, the agent waits for the next one, unless node 0 has
told it to end.
"""

import subprocess
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from slotzero.distributed import secure_socket
from slotzero.errors import ConfigError, RankLostError
from slotzero.executor.node_messages import End, Ended, Hello, Refusal, StartRanks
from slotzero.system import child

PATIENCE = 2.0  # seconds for ranks to end after their connection was closed
_POLL, _PAUSE = 0.05, 0.5


class NodeAgent:
    def __init__(self, hello: Hello, address: tuple[str, int], key: bytes, seconds: float) -> None:
        """Prepare an agent that waits for node 0 for at most `seconds`."""
        self._hello, self._address, self._key, self._seconds = hello, address, key, seconds
        self._where = f"node 0 at {address[0]}:{address[1]}"

    def stay(self) -> None:
        """Serve one engine of node 0 after another, until node 0 reports that it was the last."""
        while not self.attend():
            self._say(f"lost the connection to {self._where}: waiting for it to restart")
        self._say("ending, because node 0 has ended")

    def attend(self) -> bool:
        """Serve one engine of node 0 to its end, and return whether it was the last."""
        processes: dict[int, subprocess.Popen[bytes]] = {}
        with self._arrive() as node_line:
            try:
                node_line.send(self._hello)
                while True:
                    if node_line.poll(_POLL):
                        match node_line.recv():
                            case Refusal(why):
                                raise ConfigError(why)
                            case StartRanks(ranks, num_threads):
                                for rank in ranks:
                                    processes[rank] = self._start(rank, num_threads)
                                self._say(f"starting {_named(ranks)}")
                            case End():
                                return True
                    for rank, process in list(processes.items()):
                        if (code := process.poll()) is not None:
                            node_line.send(Ended(rank, process.pid, code))
                            del processes[rank]
            except (EOFError, OSError):
                return False
            finally:
                for process in processes.values():
                    child.finish(process, PATIENCE)

    def _arrive(self) -> Connection:
        until = time.monotonic() + self._seconds
        while True:
            try:
                return secure_socket.connect(*self._address, self._key)
            except OSError as error:
                if time.monotonic() > until:
                    raise RankLostError(
                        f"{self._where} was not reachable for {self._seconds:g} s ({error}): start "
                        "it with the same --master-addr and --master-port"
                    ) from None
            time.sleep(_PAUSE)

    def _start(self, rank: int, num_threads: int) -> subprocess.Popen[bytes]:
        with secure_socket.connect(*self._address, self._key) as rank_line:
            rank_line.send(rank)
            fd = rank_line.fileno()
            threads = {"OMP_NUM_THREADS": str(num_threads)}
            return child.start(child.FOLLOWER, [str(rank), str(fd)], [fd], threads)

    def _say(self, what: str) -> None:
        print(f"node {self._hello.node_rank}: {what}", file=sys.stderr, flush=True)


def _named(ranks: range) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def node_agent(given: Mapping[str, Any]) -> NodeAgent:
    """Create the agent of this machine; `given` are the EngineConfig fields that the user set."""
    import torch

    from slotzero.config import EngineConfig
    from slotzero.executor.limits import choose_backend

    config = EngineConfig(**given)
    device, _ = choose_backend(config)
    num_gpus = torch.cuda.device_count() if device.type == "cuda" else 0
    hello = Hello(config.node_rank, given, num_gpus)
    address = config.master_addr, config.master_port
    return NodeAgent(hello, address, secure_socket.given_key(), config.node_timeout)
