"""Child processes that end when their parent ends, even if it is killed.

The standard input of each is a pipe over which nothing is sent. When the pipe closes, the parent
has ended.
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
    """Start `python -m MODULE WORDS`. The module must call end_with_parent."""
    # -P and PYTHONPATH: the child imports the same modules, regardless of the working directory.
    path = {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    return subprocess.Popen(
        [sys.executable, "-P", "-m", module, *words],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        env={**os.environ, **path, **env},
    )


def finish(process: subprocess.Popen[bytes], seconds: float) -> int:
    """Close the pipe, wait, and return the exit code; kill the process after `seconds`."""
    assert process.stdin is not None
    process.stdin.close()
    try:
        return process.wait(timeout=max(0.0, seconds))
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def end_with_parent() -> None:
    """Exit this process when the pipe on its standard input closes."""
    threading.Thread(target=_await_end, daemon=True).start()


def _await_end() -> None:
    os.read(0, 1)
    os._exit(0)


def ending(code: int) -> str:
    """Return how a process ended, as the predicate of a sentence."""
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
