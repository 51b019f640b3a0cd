"""Child processes that end when their parent does, however that ends.

Each has a pipe on standard input over which nothing is sent: when it closes, the parent is gone.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence

FOLLOWER, ENGINE = "slotzero.executor.follower", "slotzero.server.process"
GRAMMARS = "slotzero.grammars.fork_server"


def start(
    module: str, words: Sequence[str], fds: Sequence[int], env: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Start `python -m MODULE WORDS`, which calls end_with_parent."""
    # -P and the path: it imports what this process would, whatever the working directory is
    path = {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        env={**os.environ, **path, **env},
    )


def finish(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Close the pipe, wait, and return how the process ended."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def end_with_parent() -> None:
    threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    os.read(0, 1)
    os._exit(0)


def ending(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
