"""Engine processes with an operator or a collective that never ends while a file exists.

`python -m hanging FD SETTINGS SHARE` is an engine's process whose steps hang, hanging_follower.py a
rank that does not take part in a collective. The variable SLOTZERO_HANG names the file.
"""

import os
import sys
import time
from pathlib import Path
from typing import Any

FILE = "SLOTZERO_HANG"


def endless() -> None:
    while Path(os.environ[FILE]).exists():
        time.sleep(0.05)


def hang_before(owner: type, name: str) -> None:
    """Make a method hang before it begins."""
    method = getattr(owner, name)

    def hanging(*args: Any) -> Any:
        endless()
        return method(*args)

    setattr(owner, name, hanging)


if __name__ == "__main__":
    from slotzero.graph.runner import Runner
    from slotzero.server import process

    hang_before(Runner, "replay")
    os._exit(process.main(sys.argv[1:]))
