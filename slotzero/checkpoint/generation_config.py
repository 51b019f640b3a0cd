"""The file generation_config.json of a folder: end-of-sequence tokens and sampling parameters.

Both are empty if there is no such file.
"""

from pathlib import Path
from typing import Any

from slotzero.errors import CorruptCheckpointError, RequestError
from slotzero.sampling.params import SamplingParams
from slotzero.system.json_file import read_json_if_there, token_ids

_NAME = "generation_config.json"
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


def generation_eos_token_ids(path: Path) -> tuple[int, ...]:
    return token_ids(read_json_if_there(path / _NAME).get("eos_token_id"))


def default_sampling(path: Path) -> dict[str, Any]:
    """Read the default sampling parameters, as fields of SamplingParams."""
    file = path / _NAME
    stored = read_json_if_there(file)
    found = {name: stored[name] for name in _SAMPLING if stored.get(name) is not None}
    if isinstance(top_k := found.get("top_k"), float) and top_k.is_integer():
        found["top_k"] = int(top_k)  # some files store it as a float
    try:
        SamplingParams(**found)
    except RequestError as error:
        raise CorruptCheckpointError(
            f"{file}: {error}; correct it, or use --generation-config none"
        ) from None
    return found
