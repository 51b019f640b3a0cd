"""The command `slotzero`: imports the command's module, runs it, and turns errors into exit codes.

This module does not know flags: each command is a module with `parser()` and `run(args)`, imported
only when it is called, so that `--help` is fast.

The rule: an error that the user can correct is one line on standard error, and its exit code; a
traceback is shown only with --traceback, and for bugs.
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
    "serve": "start an OpenAI-compatible HTTP server",
    "chat": "chat with a model in the terminal",
    "generate": "answer prompts from an argument, a file or standard input",
    "bench": "measure throughput, latency, captured graphs, cost or a running server",
    "train-eagle": "train an EAGLE-3 draft head for --speculative eagle3",
    "certify": "check that padding cannot change a result, at every captured size",
    "models": "list the supported models, or say whether and how one would run",
    "doctor": "show this machine's hardware and software, and what the engine would use",
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
        sys.stdout.flush()  # here a closed pipe can still be handled
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
    hint = " (--traceback shows the whole message)" if more else ""
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
        epilog="`slotzero COMMAND --help` describes a command and its flags.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help=argparse.SUPPRESS)
    parser.add_argument("--version", action="version", version=f"slotzero {__version__}")
    return parser


def _never_fail_on_odd_characters() -> None:
    """Print a question mark for characters that the terminal's encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def _silence_stdout() -> None:
    """Redirect standard output to /dev/null: Python flushes it at exit, and its reader is gone."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
