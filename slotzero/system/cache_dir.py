"""The cache folder, for what can be built again: kernels and compiled graphs.

The rule: a folder that cannot be written is an error that names it and says how to choose another.
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
    """Create the folder; if it cannot be created, or the block cannot write to it, raise an error
    that names it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise unwritable(folder, error.errno, error.strerror or str(error)) from error


def writable(folder: Path) -> Path:
    """Return the folder after a test that it can be written."""
    with writing(folder), tempfile.TemporaryFile(dir=folder):
        return folder


def unwritable(folder: Path, number: int | None, why: str) -> SlotzeroError:
    """Make the error for a cache folder that cannot be written; `number` is its errno."""
    if number in _FULL:
        return CapacityError(
            f"the disk of the cache folder {folder} is full ({why}): free some space, or set "
            "SLOTZERO_CACHE to a folder on another disk"
        )
    return ConfigError(
        f"the cache folder {folder} cannot be written ({why}): set SLOTZERO_CACHE to a folder "
        "that can"
    )
