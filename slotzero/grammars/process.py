"""The processes of grammars as the engine holds them: the fork server, and one worker per grammar.

Nothing here waits. It does not know the limits; supervisor.py does.
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
        """Start the process without waiting for it; it sends `Ready`. `limits` are arguments of
        worker.work."""
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fd, ends = theirs.fileno(), list(eos_token_ids)
        arguments = [str(fd), str(vocab_size), json.dumps(ends), json.dumps(limits)]
        env = {"TOKENIZERS_PARALLELISM": "false"}
        process = child.start(child.GRAMMARS, arguments, [fd], env)
        theirs.close()
        self.failures: list[str] = []
        """Why there is no tokenizer."""
        threading.Thread(
            target=_feed, args=(process, make_tokenizer, self.failures), daemon=True
        ).start()
        self.pid = process.pid
        self.close = weakref.finalize(self, _end, process, self.socket)

    def start(self, number: int) -> socket.socket:
        """Have a worker forked, and return our end of its socket; raises OSError if there are too
        many open files."""
        ours, theirs = socket.socketpair()
        try:
            with contextlib.suppress(ConnectionError):  # `receive` notices its end
                socket.send_fds(self.socket, [pickle.dumps(StartWorker(number))], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        return ours

    def kill(self, number: int) -> None:
        with contextlib.suppress(ConnectionError):
            self.socket.send(pickle.dumps(Kill(number)))

    def receive(self) -> Ready | Unusable | NotStarted | WorkerEnded | None:
        """Return the next message; None: the process has ended."""
        try:
            data = self.socket.recv(MAX_ORDER)
        except ConnectionError:
            return None
        return pickle.loads(data) if data else None


@final
class GrammarWorker:
    """One grammar: queued, then compiling, then compiled, until its process ends or is killed."""

    def __init__(
        self, number: int, source: GrammarSource, now: float, is_restart: bool = False
    ) -> None:
        self.number = number
        self.source = source
        self.queued_at = now
        self.is_restart = is_restart
        """Whether it replaces another worker that followed its answers."""
        self.answers: dict[int, Grammar] = {}
        """The answers that it follows, by their numbers."""
        self.asked: deque[int] = deque()
        """Messages without a reply, in order: COMPILE or the numbers of answers. It works on the
        first."""
        self.since = 0.0
        """When it began to work on that."""
        self.memory = 0
        """Bytes, as of its last reply."""
        self.first_mask: np.ndarray | None = None
        """Once it is compiled."""
        self.channel: Channel | None = None
        """Once it has a process, until that is seen to have ended."""

    @property
    def is_compiled(self) -> bool:
        return self.first_mask is not None

    def compile(self, channel: Channel, now: float) -> None:
        self.channel = channel
        self._ask(COMPILE, self.source, now)

    def follow(self, grammar: Grammar, now: float) -> None:
        new = grammar.tokens[grammar.num_sent :]
        grammar.num_sent = len(grammar.tokens)
        self._ask(grammar.number, Follow(grammar.number, new), now)

    def end(self, number: int) -> None:
        self._send(EndAnswer(number))

    def disconnect(self) -> None:
        if self.channel is not None:
            self.channel.close()
            self.channel = None

    def _ask(self, number: int, message: GrammarSource | Follow, now: float) -> None:
        if not self.asked:
            self.since = now
        self.asked.append(number)
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
        pass  # the process has ended; `receive` notices that
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()


def _end(process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
    control.close()  # at which it ends, and its workers with it
    try:
        process.wait(_SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
