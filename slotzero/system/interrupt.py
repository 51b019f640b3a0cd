"""Deferral of Ctrl-C to the end of a step, so that pools and tables stay consistent."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defer SIGINT to the end of the block, and then deliver it to the previous handler."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are delivered to the main thread alone
        return
    pending: list[tuple[int, FrameType | None]] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if pending:
            signal.raise_signal(signal.SIGINT)
