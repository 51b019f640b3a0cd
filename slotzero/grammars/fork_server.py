"""The fork server: `python -m slotzero.grammars.fork_server FD VOCAB_SIZE EOS_IDS LIMITS`.

It builds the vocabulary once, which takes a second, and then forks a worker for each grammar, which
takes milliseconds. It reads the tokenizer's JSON from standard input, and messages from the
inherited socket FD. It does not import torch or numpy, so that a fork copies little memory.

The rule: a worker never outlives this process, and this process ends when the engine's end of FD
is closed.
"""

import contextlib
import ctypes
import errno
import functools
import gc
import json
import os
import pickle
import selectors
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from slotzero.grammars.matcher import first_line, load_vocabulary
from slotzero.grammars.messages import (
    MAX_ORDER,
    Kill,
    NotStarted,
    Ready,
    StartWorker,
    Unusable,
    WorkerEnded,
)
from slotzero.grammars.worker import work

_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM):  # the engine decides what Ctrl-C does
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(argv[0]))
    control.set_inheritable(False)
    tokenizer_json = sys.stdin.buffer.read().decode()
    if not tokenizer_json:
        return 0  # the engine could not load the tokenizer, and reports why
    try:
        vocabulary = load_vocabulary(tokenizer_json, int(argv[1]), json.loads(argv[2]))
    except ValueError as error:
        control.send(pickle.dumps(Unusable(first_line(error))))
        return 0
    del tokenizer_json
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)  # a worker's allocations from these pages would not be counted
    gc.collect()
    gc.freeze()  # the collector would write to pages that workers share, and so copy them
    control.send(pickle.dumps(Ready(vocabulary.ends)))
    work_for = functools.partial(work, vocabulary=vocabulary, **json.loads(argv[3]))
    _ForkServer(control, work_for, libc).run()
    return 0


class _ForkServer:
    def __init__(
        self, control: socket.socket, work: Callable[[socket.socket], int], libc: ctypes.CDLL
    ) -> None:
        self._control = control
        self._work = work
        self._libc = libc
        self._selector = selectors.DefaultSelector()
        self._pids: dict[int, int] = {}  # by worker number; children that are not reaped yet

    def run(self) -> None:
        """Handle messages until the engine is gone. Workers are killed when this process ends."""
        self._selector.register(self._control, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is not self._control:
                    self._reap(key.fd, key.data)
                elif not self._obey():
                    return

    def _obey(self) -> bool:
        try:
            data, fds, _, _ = socket.recv_fds(self._control, MAX_ORDER, 1)
        except ConnectionError:
            return False
        if not data:
            return False
        message: StartWorker | Kill = pickle.loads(data)
        if isinstance(message, StartWorker):
            if fds:
                self._fork(message.number, fds[0])
            else:  # the kernel drops a descriptor if this process has too many open files
                self._tell(NotStarted(message.number, os.strerror(errno.EMFILE)))
        elif message.number in self._pids:
            os.kill(self._pids[message.number], signal.SIGKILL)
        return True

    def _fork(self, number: int, fd: int) -> None:
        parent = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os.close(fd)
            self._tell(NotStarted(number, error.strerror or ""))
            return
        if pid:
            os.close(fd)
            self._watch(number, pid)
            return
        status = 1
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent ended before the call of prctl
                os._exit(0)
            _keep_only(fd)
            status = self._work(socket.socket(fileno=fd))
        finally:
            os._exit(status)

    def _watch(self, number: int, pid: int) -> None:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            self._tell(NotStarted(number, error.strerror or ""))
            return
        self._pids[number] = pid
        self._selector.register(pidfd, selectors.EVENT_READ, number)

    def _reap(self, pidfd: int, number: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        _, status = os.waitpid(self._pids.pop(number), 0)
        self._tell(WorkerEnded(number, os.waitstatus_to_exitcode(status)))

    def _tell(self, message: WorkerEnded | NotStarted) -> None:
        with contextlib.suppress(OSError):  # if the engine is gone, `run` notices
            self._control.send(pickle.dumps(message))


def _keep_only(fd: int) -> None:
    """Close all files inherited from the fork server but `fd`.

    The output of a crash is discarded: the engine tells the client why the worker ended.
    """
    devnull = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(devnull, standard)
    for other in os.listdir("/proc/self/fd"):
        if int(other) > 2 and int(other) != fd:
            with contextlib.suppress(OSError):  # the descriptor of listdir is closed already
                os.close(int(other))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
