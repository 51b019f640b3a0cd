"""Where Slotzero keeps what it can make again: built kernels and compiled graphs.

The rule: a folder that cannot be written is an error that names it, and how to choose another.
"""

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slotzero.errors import CapacityError, ConfigError, SlotzeroError

_FULL = (errno.ENOSPC, errno.EDQUOT)


def cache_dir() -> Path:
    root = os.environ.get("SLOTZERO_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slotzero"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make the folder, and name it if it or what the block writes to it cannot be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise unwritable(folder, error.errno, error.strerror or str(error)) from error


def writable(folder: Path) -> Path:
    """The folder, once it has been written to."""
    with writing(folder), tempfile.TemporaryFile(dir=folder):
        return folder


def unwritable(folder: Path, number: int | None, why: str) -> SlotzeroError:
    """What is wrong with the cache folder, by the number of the error."""
    if number in _FULL:
        return CapacityError(
            f"the disk of the cache folder {folder} is full ({why}): free some space, or set "
            "SLOTZERO_CACHE to a folder on another disk"
        )
    return ConfigError(
        f"the cache folder {folder} cannot be written ({why}): set SLOTZERO_CACHE to a folder "
        "that can"
    )
