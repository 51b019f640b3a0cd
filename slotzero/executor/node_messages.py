"""What rank 0 (nodes.py) and the agents of other machines (node_agent.py) send each other.

It does not import torch: an agent, and a server that places engines with Ray, compute nothing.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slotzero import __version__

LISTENER = "SLOTZERO_LISTENER"
"""File descriptor of a socket that listens already, if the parent process chose the port."""


@dataclass(frozen=True)
class Hello:
    """The first message of a node."""

    node_rank: int
    given: Mapping[str, Any]
    """Settings that the node was started with; node 0 decides all others."""
    num_gpus: int | None
    """Number of GPUs of the node; None if a launcher placed it, which has checked the number."""
    version: str = __version__


@dataclass(frozen=True)
class Refusal:
    why: str


@dataclass(frozen=True)
class StartRanks:
    ranks: range
    num_threads: int


@dataclass(frozen=True)
class Ended:
    rank: int
    pid: int
    code: int


@dataclass(frozen=True)
class End:
    """The last message to a node: the engine will not be restarted."""
