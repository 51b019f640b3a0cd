"""Heartbeats of an engine's process, and how the server detects an engine that does not respond.

A thread of the engine's process sends one heartbeat per second, also while a model loads or during
a long step, with the step that has taken too long, if one has (executor/step_watch.py). The server
can thus tell a process that hangs or was stopped from one that is busy. This module knows nothing
of sockets, nor of how an unresponsive process is replaced.

The rule: time during which the server's own process did not run does not count as silence of the
engine.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from slotzero.server.messages import Beat

INTERVAL = 1.0  # seconds between two heartbeats, and between two looks at them


class HeartbeatSender:
    """The engine's side: sends heartbeats."""

    def __init__(self, send: Callable[[Beat], None]) -> None:
        """`send` is called in a thread."""
        self._send = send
        self.overdue: Callable[[], str] = str
        """Returns what has taken too long and still does, or an empty string."""

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._send(Beat(self.overdue()))
                time.sleep(INTERVAL)
        except OSError:
            pass  # the server is gone, and this process ends


@dataclass(frozen=True)
class ResponseLimits:
    """Time limits in seconds; 0 means no limit."""

    heartbeat: float = 30.0
    """Time without any message."""
    unresponsive: float = 60.0
    """Time after it was exceeded, or a step has taken too long, until the process is killed."""


class HeartbeatMonitor:
    """The server's side: whether one process is silent, or in a step that takes too long."""

    def __init__(self, response_limits: ResponseLimits) -> None:
        self._limits = response_limits
        self._silent = self._unresponsive = 0.0
        self._overdue = ""

    def hear(self) -> None:
        self._silent = 0.0

    def take(self, beat: Beat) -> None:
        self._overdue = beat.overdue

    def pass_time(self, seconds: float) -> None:
        """Add elapsed time, at most two intervals: in a longer gap this process did not run."""
        seconds = min(seconds, 2 * INTERVAL)
        self._silent += seconds
        self._unresponsive = self._unresponsive + seconds if self.trouble else 0.0

    @property
    def is_silent(self) -> bool:
        return 0 < self._limits.heartbeat <= self._silent

    @property
    def trouble(self) -> str:
        """Why the engine is unresponsive; empty if it responds."""
        if self.is_silent:
            return f"no heartbeat for {self._limits.heartbeat:g} s"
        return self._overdue

    @property
    def is_hopeless(self) -> bool:
        return 0 < self._limits.unresponsive <= self._unresponsive
