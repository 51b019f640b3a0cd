"""Heartbeats of an engine's process, and how the server detects an engine that does not respond.

A thread of the engine's process sends one heartbeat per second, also while a model loads or during
a long step, with the time that the current turn of the engine's loop has taken so far. The server
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
        self._turned_at: float | None = None

    def start(self) -> None:
        threading.Thread(target=self._run, daemon=True).start()

    def turned(self) -> None:
        """Note that the loop begins a turn; the first call ends loading."""
        self._turned_at = time.monotonic()

    def _run(self) -> None:
        try:
            while True:
                since = self._turned_at
                self._send(Beat(0.0 if since is None else time.monotonic() - since))
                time.sleep(INTERVAL)
        except OSError:
            pass  # the server is gone, and this process ends


@dataclass(frozen=True)
class ResponseLimits:
    """Time limits in seconds; 0 means no limit."""

    heartbeat: float = 30.0
    """Time without any message."""
    step: float = 300.0
    """Time in one turn of the engine's loop."""
    unresponsive: float = 60.0
    """Time after one of these limits was exceeded until the process is killed."""


class HeartbeatMonitor:
    """The server's side: how long one process has been silent, or in one step."""

    def __init__(self, response_limits: ResponseLimits) -> None:
        self._limits = response_limits
        self._silent = self._busy = self._unresponsive = 0.0

    def hear(self) -> None:
        self._silent = 0.0

    def take(self, beat: Beat) -> None:
        self._busy = beat.busy

    def pass_time(self, seconds: float) -> None:
        """Add elapsed time, at most two intervals: in a longer gap this process did not run."""
        seconds = min(seconds, 2 * INTERVAL)
        self._silent += seconds
        self._unresponsive = self._unresponsive + seconds if self.trouble else 0.0

    @property
    def trouble(self) -> str:
        """Why the engine is unresponsive; empty if it responds."""
        if 0 < self._limits.heartbeat <= self._silent:
            return f"no heartbeat for {self._limits.heartbeat:g} s"
        if 0 < self._limits.step <= self._busy:
            return f"one step has taken more than {self._limits.step:g} s"
        return ""

    @property
    def is_hopeless(self) -> bool:
        return 0 < self._limits.unresponsive <= self._unresponsive
