"""Fixtures for tests of the command `slotzero`."""

import io
import sys

import pytest
from command import Result, Run, Terminal

from slotzero.cli import main as cli


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Return a function that calls the command in process, with `stdin` as its standard input."""

    def call(*words: str, stdin: bytes = b"", is_terminal: bool = False) -> Result:
        kind = Terminal if is_terminal else io.TextIOWrapper
        monkeypatch.setattr(sys, "stdin", kind(io.BytesIO(stdin)))
        try:
            code = cli.main(words)
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call
