"""The cache folder, for files that can be made again: built kernels and tuned choices.

The rule: if the folder cannot be written, the error names it and says how to choose another.
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
    """Return $SLOTZERO_CACHE, or by default the folder slotzero in the user's cache folder."""
    root = os.environ.get("SLOTZERO_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slotzero"


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Create the folder, and run a block that writes to it.

    If either fails, the error names the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise unwritable(folder, error.errno, error.strerror or str(error)) from error


def writable(folder: Path) -> Path:
    """Create the folder if needed, check that it can be written, and return it."""
    with writing(folder), tempfile.TemporaryFile(dir=folder):
        return folder


def unwritable(folder: Path, number: int | None, why: str) -> SlotzeroError:
    """Create the error for a cache folder that cannot be written; `number` is the errno."""
    if number in _FULL:
        return CapacityError(
            f"the disk of the cache folder {folder} is full ({why}): free some space, or set "
            "SLOTZERO_CACHE to a folder on another disk"
        )
    return ConfigError(
        f"the cache folder {folder} cannot be written ({why}): set SLOTZERO_CACHE to a writable "
        "folder"
    )
