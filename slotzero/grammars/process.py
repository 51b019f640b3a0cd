"""The engine's handles of the fork server and of the workers, one per grammar.

Nothing here blocks. This module does not know the limits; supervisor.py does.
"""

import contextlib
import json
import pickle
import socket
import subprocess
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import final

import numpy as np

from slotzero.errors import SlotzeroError
from slotzero.grammars.channel import Channel
from slotzero.grammars.grammar import Grammar
from slotzero.grammars.messages import (
    COMPILE,
    MAX_ORDER,
    EndAnswer,
    Follow,
    GrammarSource,
    Kill,
    NotStarted,
    Ready,
    StartWorker,
    Unusable,
    WorkerEnded,
)
from slotzero.system import child
from slotzero.text.tokenizer import Tokenizer

_SECONDS_TO_END = 5.0


@final
class ForkServer:
    def __init__(
        self,
        make_tokenizer: Callable[[], Tokenizer],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        limits: Mapping[str, float],
    ) -> None:
        """Start the process without waiting for it; it will send `Ready`.

        `limits` are arguments of worker.work.
        """
        self.socket, child_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd, ends = child_end.fileno(), list(eos_token_ids)
        arguments = [str(fd), str(vocab_size), json.dumps(ends), json.dumps(limits)]
        env = {"TOKENIZERS_PARALLELISM": "false"}
        process = child.start(child.GRAMMARS, arguments, [fd], env)
        child_end.close()
        self.failures: list[str] = []
        """Why the tokenizer could not be loaded."""
        threading.Thread(
            target=_feed, args=(process, make_tokenizer, self.failures), daemon=True
        ).start()
        self.pid = process.pid
        self.close = weakref.finalize(self, _end, process, self.socket)

    def start(self, number: int) -> socket.socket:
        """Request a new worker, and return the engine's end of its socket.

        Raise OSError if there are too many open files.
        """
        engine_end, worker_end = socket.socketpair()
        message = pickle.dumps(StartWorker(number))
        try:
            with contextlib.suppress(ConnectionError):  # `receive` notices that the server ended
                socket.send_fds(self.socket, [message], [worker_end.fileno()])
        except OSError:
            engine_end.close()
            raise
        finally:
            worker_end.close()
        return engine_end

    def kill(self, number: int) -> None:
        with contextlib.suppress(ConnectionError):
            self.socket.send(pickle.dumps(Kill(number)))

    def receive(self) -> Ready | Unusable | NotStarted | WorkerEnded | None:
        """Return the next message, or None if the process has ended."""
        try:
            data = self.socket.recv(MAX_ORDER)
        except ConnectionError:
            return None
        return pickle.loads(data) if data else None


@final
class GrammarWorker:
    """The worker of one grammar: queued, compiling, compiled, until its process ends."""

    def __init__(
        self, number: int, source: GrammarSource, now: float, is_restart: bool = False
    ) -> None:
        self.number = number
        self.source = source
        self.queued_at = now
        self.is_restart = is_restart
        """Whether it replaces another worker that followed its answers."""
        self.answers: dict[int, Grammar] = {}
        """The answers that follow this grammar, by number."""
        self.unanswered: deque[int] = deque()
        """Messages without a reply, in order: COMPILE or the numbers of answers. The worker is
        working on the first."""
        self.since = 0.0
        """When the worker began to work on the first of `unanswered`."""
        self.memory = 0
        """Bytes in use at the time of the last reply."""
        self.first_mask: np.ndarray | None = None
        """Mask of the first token; None until the grammar is compiled."""
        self.channel: Channel | None = None
        """Connection to the process; None before it starts and after it has ended."""

    @property
    def is_compiled(self) -> bool:
        return self.first_mask is not None

    def compile(self, channel: Channel, now: float) -> None:
        self.channel = channel
        self._request(COMPILE, self.source, now)

    def follow(self, grammar: Grammar, now: float) -> None:
        new = grammar.tokens[grammar.num_sent :]
        grammar.num_sent = len(grammar.tokens)
        self._request(grammar.number, Follow(grammar.number, new), now)

    def end(self, number: int) -> None:
        self._send(EndAnswer(number))

    def disconnect(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _request(self, number: int, message: GrammarSource | Follow, now: float) -> None:
        if not self.unanswered:
            self.since = now
        self.unanswered.append(number)
        self._send(message)

    def _send(self, message: GrammarSource | Follow | EndAnswer) -> None:
        if self.channel is not None:
            self.channel.send(message)


def _feed(
    process: "subprocess.Popen[bytes]",
    make_tokenizer: Callable[[], Tokenizer],
    failures: list[str],
) -> None:
    """Load a tokenizer and send it, in a thread, so that the engine does not wait."""
    assert process.stdin is not None
    try:
        process.stdin.write(make_tokenizer().to_json().encode())
    except SlotzeroError as error:
        failures.append(str(error))
    except OSError:
        pass  # the process has ended, which `receive` notices
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()  # then the process ends, and its workers with it
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
