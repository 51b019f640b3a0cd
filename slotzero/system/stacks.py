"""What the threads of this process are doing, for the log of a step that hangs.

A process that hangs in Python or in an operator that released the interpreter writes its own
stacks, with the names of its threads. One that holds the interpreter cannot; a C signal handler
writes them for it.
"""

import faulthandler
import os
import signal
import sys
import threading
import traceback

SIGNAL = signal.SIGUSR1
"""Asks a process of an engine for its stacks. It must have called one of the functions below, or it
would end."""


def stacks() -> str:
    """Return the Python stack of every thread, the most recent call last."""
    frames = sys._current_frames()
    parts = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            parts.append(f"thread {thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "".join(parts).rstrip()


def write_stacks_when_asked(name: str) -> None:
    """Write the stacks to stderr, under this name, whenever the signal arrives. Must be called
    before other threads start, so that the signal reaches none of them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {SIGNAL})
    threading.Thread(target=_answer, args=(name,), name="stacks", daemon=True).start()


def write_bare_stacks_when_asked() -> None:
    """Do the same without names, but also while the interpreter is held."""
    faulthandler.register(SIGNAL, file=sys.stderr, all_threads=True)


def _answer(name: str) -> None:
    while True:
        signal.sigwait({SIGNAL})
        text = f"{name} (process {os.getpid()}), stacks of all threads:\n{stacks()}\n"
        print(text, file=sys.stderr, flush=True)
