"""Where Slotzero keeps what it can make again: built kernels and compiled graphs."""

import os
from pathlib import Path


def cache_dir() -> Path:
    root = os.environ.get("SLOTZERO_CACHE")
    if root:
        return Path(root)
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slotzero"
