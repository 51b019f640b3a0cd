"""The other ranks of an engine: sending them steps, reading their results, and ending them."""

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor

from slotzero.distributed.ranks import ALONE, Ranks
from slotzero.errors import ConfigError, ContractError, RankLostError
from slotzero.executor.step_message import Message
from slotzero.graph.transfer import PendingTensors

LOOPBACK = "lo"  # all ranks are on this machine
INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915  # ioctl of Linux: the address of an interface
START_TIMEOUT = 300.0
"""Seconds for a rank to start: a slow disk may take minutes to deliver torch. A rank that ends is
noticed at once."""


class RankGroup:
    """The ranks of an engine with one rank, or whose other ranks need no messages."""

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks

    def send(self, messages: Sequence[Message]) -> None:
        """Send one message for each DP rank, before rank 0 runs its own."""

    def sampled(self, dp_rank: int) -> PendingTensors:
        """Return the samples of another DP rank in the last step that was sent to it.

        The results of several steps must be read in order.
        """
        raise ContractError(f"DP rank {dp_rank} is not in this group")

    @contextlib.contextmanager
    def watched(self, doing: object, in_step: bool = False) -> Iterator[None]:
        """End the other ranks if the block fails.

        If one of them caused the failure, the error names it. Any failure `in_step` becomes a
        RankLostError, because the ranks have diverged. `doing` as a string says what failed.
        """
        yield

    def ask_for_stacks(self) -> None:
        """Make the other ranks of this machine write to stderr what they are doing."""

    def reports(self) -> list[Any]:
        """Return the results of the other ranks in order, if they were given a task."""
        return []

    def dismiss(self) -> None:
        """Tell other machines that this engine will not be restarted. Any thread may call this."""

    def close(self) -> None:
        """End the other ranks."""


class RemoteRanks(RankGroup):
    """Ranks in other processes, each reached through a connection."""

    def __init__(self, ranks: Ranks, connections: dict[int, Connection], seconds: float) -> None:
        super().__init__(ranks)
        self._connections, self._seconds = connections, seconds

    def send(self, messages: Sequence[Message]) -> None:
        for rank, connection in self._connections.items():
            try:
                connection.send(messages[rank if self.ranks.dp_attention else 0])
            except BlockingIOError:
                raise RankLostError(
                    f"timed out: rank {rank} read no messages for {self._seconds:g} s"
                ) from None

    def sampled(self, dp_rank: int) -> PendingTensors:
        return _Sent(dp_rank, self._connections[dp_rank], self._seconds)


class _Sent:
    """Results of another rank, to be read in the order of steps."""

    def __init__(self, rank: int, connection: Connection, seconds: float) -> None:
        self._rank, self._connection, self._seconds = rank, connection, seconds
        self._tensors: list[Tensor] | None = None

    def wait(self) -> list[Tensor]:
        if self._tensors is None:
            if not self._connection.poll(self._seconds):
                raise RankLostError(
                    f"timed out: rank {self._rank} did not send its sampled tokens within "
                    f"{self._seconds:g} s"
                )
            self._tensors = [torch.from_numpy(array) for array in self._connection.recv()]
        return self._tensors


@dataclass(frozen=True)
class Rendezvous:
    """The store at which the ranks of an engine meet, and how long they wait for each other."""

    size: int
    store: str  # a URL for torch.distributed; tcp:// if ranks are on several machines
    seconds: float
    per_node: int | None = None  # ranks per machine; None: all ranks are on one machine

    def join(
        self,
        rank: int,
        device: torch.device,
        expert_parallel: bool = False,
        dp_attention: bool = False,
        in_order: bool = False,
    ) -> Ranks:
        """Join the process group, and wait for all ranks."""
        from torch import distributed

        if device.type == "cuda":
            torch.cuda.set_device(rank % (self.per_node or self.size))
        timeout = timedelta(seconds=self.seconds)
        url, store = urlsplit(self.store), None
        if url.scheme == "tcp":
            assert url.hostname is not None and url.port is not None
            store = distributed.TCPStore(  # type: ignore[attr-defined]
                url.hostname, url.port, is_master=False, timeout=timeout
            )
        if INTERFACE not in os.environ:
            os.environ[INTERFACE] = interface_towards(url.hostname) if url.hostname else LOOPBACK
        distributed.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=self.store if store is None else None,
            store=store,
            rank=rank,
            world_size=self.size,
            timeout=timeout,
        )
        group = distributed.group.WORLD
        assert group is not None
        return Ranks(rank, self.size, group.group_name, expert_parallel, dp_attention, in_order)


def interface_towards(host: str) -> str:
    """Return the network interface that has an address, or through which the address is reached."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # connecting sends no packet
        probe.connect((host, 9))
        local = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                reply = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == local:
                    return name
    raise ConfigError(
        f"no network interface has the address {local}, from which {host} is reached: set "
        f"{INTERFACE} to the name of an interface"
    )
