"""JSON files of a checkpoint folder. If a file cannot be read, the error names it."""

import json
from pathlib import Path
from typing import Any

from slotzero.errors import CorruptCheckpointError


def read_json(path: Path) -> dict[str, Any]:
    content = _content(path)
    if not isinstance(content, dict):
        raise CorruptCheckpointError(f"{path} is not a JSON object; download it again")
    return content


def read_json_list(path: Path) -> list[dict[str, Any]]:
    """Read a list of objects."""
    content = _content(path)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise CorruptCheckpointError(f"{path} is not a list of JSON objects; download it again")
    return content


def _content(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CorruptCheckpointError(
            f"{path} cannot be read as JSON ({error}); download it again"
        ) from None


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def token_ids(value: Any) -> tuple[int, ...]:
    """Return the token ids of a config field, which is None, a number or a list."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (int(value),)
