"""A worker process: it compiles one grammar and computes the masks of all answers that follow it.

It is forked from fork_server.py and ends when the engine closes its socket. Native code cannot be
interrupted, so limits end the whole process: the kernel refuses memory, or sends SIGPROF when a
mask exceeds its CPU time. The engine measures wall-clock time and has a slow worker killed.

The rule: a worker replies in the order of the requests, so it is working on the oldest request
without a reply.
"""

import os
import resource
import signal
import socket
from collections.abc import Callable
from typing import NamedTuple

from slotzero.grammars.channel import frame, read
from slotzero.grammars.matcher import CompiledGrammar, GrammarVocabulary
from slotzero.grammars.messages import COMPILE, EndAnswer, Follow, GrammarSource, Reply

OUT_OF_MEMORY = 3  # exit status
NICENESS = 10  # a busy worker leaves most of its core to the engine


def work(
    connection: socket.socket, vocabulary: GrammarVocabulary, memory: int, mask_seconds: float
) -> int:
    """Serve one grammar with at most `memory` more bytes than now; return the exit status."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    before = _pages(statm)
    os.nice(NICENESS)
    address_space = before.mapped * resource.getpagesize() + memory
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        _serve(
            connection, vocabulary, lambda: _pages(statm).anonymous - before.anonymous, mask_seconds
        )
    except EOFError:
        return 0
    except MemoryError:
        return OUT_OF_MEMORY
    return 0


def _serve(
    connection: socket.socket,
    vocabulary: GrammarVocabulary,
    num_allocated: Callable[[], int],
    mask_seconds: float,
) -> None:
    def reply(number: int, mask: bytes, error: str = "") -> None:
        memory = num_allocated() * resource.getpagesize()
        connection.sendall(frame(Reply(number, mask, error, max(0, memory))))

    requests = connection.makefile("rb")
    source: GrammarSource = read(requests)
    try:
        grammar = CompiledGrammar(vocabulary, source.kind, source.text)
    except ValueError as error:
        return reply(COMPILE, b"", str(error))
    reply(COMPILE, grammar.first_mask)
    while True:
        message: Follow | EndAnswer = read(requests)
        if isinstance(message, EndAnswer):
            grammar.end(message.number)
            continue
        signal.setitimer(signal.ITIMER_PROF, mask_seconds)
        try:
            reply(message.number, grammar.follow(message.number, message.tokens))
        except ValueError as error:
            reply(message.number, b"", str(error))
        signal.setitimer(signal.ITIMER_PROF, 0)


class _Pages(NamedTuple):
    mapped: int
    anonymous: int
    """Resident pages that do not belong to a file."""


def _pages(statm: int) -> _Pages:
    """Read the open file; opening it for each reply would take longer than computing most masks."""
    mapped, resident, file_backed, *_ = map(int, os.pread(statm, 256, 0).split())
    return _Pages(mapped, resident - file_backed)
