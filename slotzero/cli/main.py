"""The command `slotzero`: finds the command's module, runs it, and turns errors into exit codes.

It does not know flags: each command is a module with `parser()` and `run(args)`, imported only when
it is called, so that `--help` answers at once.

The rule: what the user can mend is one line on standard error and the exit code of its error; a
traceback is shown to those who ask with --traceback, and for what is a bug of ours.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from slotzero import __version__
from slotzero.errors import SlotzeroError

COMMANDS = {
    "serve": "open OpenAI's API on a port",
    "chat": "talk with a model",
    "generate": "answer prompts from an argument, a file or standard input",
    "bench": "measure throughput, latency, graphs or cost on this machine",
    "train-eagle": "make a draft head for a model, for --speculative eagle3",
    "certify": "prove that no padded row can hurt",
    "doctor": "show what this machine has and what would be used",
}
INTERRUPTED = 128 + 2  # as a shell reports the signals SIGINT and SIGPIPE
BROKEN_PIPE = 128 + 13


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    command = import_module(f"slotzero.cli.{_command_name(words[:1]).replace('-', '_')}")
    args = command.parser().parse_intermixed_args(words[1:])
    _never_fail_on_odd_characters()
    try:
        code: int = command.run(args)
        sys.stdout.flush()  # here, where a reader that is gone can still be noticed
        return code
    except SlotzeroError as error:
        if args.traceback:
            raise
        print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return BROKEN_PIPE


def print_error(message: str) -> None:
    first, *more = message.strip().splitlines() or ["unknown"]
    hint = " (--traceback shows all of it)" if more else ""
    print(f"slotzero: error: {first}{hint}", file=sys.stderr, flush=True)


def _command_name(words: Sequence[str]) -> str:
    parser = _front_parser()
    if not words:
        parser.print_help(sys.stderr)
        parser.exit(2)
    name: str = parser.parse_args(words).command
    return name


def _front_parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<12}{does}" for name, does in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="slotzero",
        usage="slotzero COMMAND [MODEL] [flags]",
        description=f"An LLM inference engine.\n\ncommands:\n{listing}",
        epilog="`slotzero COMMAND --help` explains a command and its flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"slotzero {__version__}")
    return parser


def _never_fail_on_odd_characters() -> None:
    """A terminal that lacks a character shows a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _silence_stdout() -> None:
    """Python flushes standard output once more at exit; the reader is gone, so it goes nowhere."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
