"""Log filter for repeated lines: the first is written, repeats soon after are only counted.

asyncio logs every failed accept, so a flood of connections could fill a disk with one line.
"""

import logging
import time
from collections.abc import Callable

MAX_LINES = 256  # lines that are remembered


class Repeats(logging.Filter):
    """Passes a line once in `seconds`, with the number of repeats that were dropped before."""

    def __init__(self, seconds: float = 10.0, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._seconds = seconds
        self._now = now
        self._seen: dict[str, tuple[float, int]] = {}  # by line: when it was written, repeats since

    def filter(self, record: logging.LogRecord) -> bool:
        line, now = record.getMessage(), self._now()
        written_at, num_left_out = self._seen.get(line, (-self._seconds, 0))
        if now - written_at < self._seconds:
            self._seen[line] = written_at, num_left_out + 1
            return False
        self._seen.pop(line, None)
        self._seen[line] = now, 0
        if len(self._seen) > MAX_LINES:
            del self._seen[next(iter(self._seen))]  # the oldest
        if num_left_out:
            record.msg, record.args = f"{line} (repeated {num_left_out} times since)", ()
        return True
