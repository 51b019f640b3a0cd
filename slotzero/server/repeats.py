"""Log lines that repeat: the first is written, those that follow soon after are only counted.

asyncio logs every failed accept; a flood of connections would fill a disk with one sentence.
"""

import logging
import time
from collections.abc import Callable

MAX_LINES = 256  # that are remembered


class Repeats(logging.Filter):
    """Lets a line pass once in `seconds`; the next time it says how many were left out."""

    def __init__(self, seconds: float = 10.0, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._now = now
        self._seen: dict[str, tuple[float, int]] = {}  # line: when it was written, left out since

    def filter(self, record: logging.LogRecord) -> bool:
        line, now = record.getMessage(), self._now()
        written_at, num_left_out = self._seen.get(line, (-self._seconds, 0))
        if now - written_at < self._seconds:
            self._seen[line] = written_at, num_left_out + 1
            return False
        self._seen.pop(line, None)
        self._seen[line] = now, 0
        if len(self._seen) > MAX_LINES:
            del self._seen[next(iter(self._seen))]  # the one that was written first
        if num_left_out:
            record.msg, record.args = f"{line} (and {num_left_out} times since the last line)", ()
        return True
