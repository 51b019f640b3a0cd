"""JSON files of a checkpoint folder. One that cannot be read is refused, by its name."""

import json
from pathlib import Path
from typing import Any

from slotzero.errors import CorruptCheckpointError


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read as JSON ({error}); download it again"
        ) from None
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path} is not a JSON object; download it again")
    return content


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def token_ids(value: Any) -> tuple[int, ...]:
    """Return token ids as a tuple; configs have None, one number or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
