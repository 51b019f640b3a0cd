"""Types for tests that call the command `slotzero` in process."""

import io
import json
from collections.abc import Callable


class Result:
    """Exit code, standard output and standard error of the command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def objects(self) -> list[dict]:
        return [json.loads(line) for line in self.out.splitlines()]


class Terminal(io.TextIOWrapper):
    """A stream that claims to be a terminal."""

    def isatty(self) -> bool:
        return True


Run = Callable[..., Result]


def is_one_error_line(text: str) -> bool:
    return text.startswith("slotzero: error: ") and text.count("\n") == 1
