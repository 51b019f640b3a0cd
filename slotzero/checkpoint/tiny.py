"""Models of a few hundred kilobytes with random weights, for tests and first steps without a file.

Their text is noise, but the same noise every time. Their tokens are bytes, so any text is a prompt.
Each family has one (see models/families/tiny.py for the shapes).
"""

from collections.abc import Mapping
from typing import Any

from slotzero.checkpoint.dummy import DummyCheckpoint
from slotzero.errors import ModelNotFoundError
from slotzero.models.families import gemma4_assistant
from slotzero.models.families.family import families
from slotzero.text.tokenizer import Tokenizer

PREFIX = "tiny:"


def tiny_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the config of each tiny model by name."""
    return {name: config for f in families().values() for name, config in f.tiny.items()}


def tiny_names() -> list[str]:
    return [PREFIX + kind for kind in tiny_configs()]


def tiny_checkpoint(name: str) -> DummyCheckpoint:
    config = {**tiny_configs(), **gemma4_assistant.TINY}.get(name.removeprefix(PREFIX))
    if config is None:
        raise ModelNotFoundError(f"no tiny model {name!r}; use one of {', '.join(tiny_names())}")
    return DummyCheckpoint(
        config,
        name,
        eos_token_ids=(config["eos_token_id"],),
        make_tokenizer=Tokenizer.bytes_tokenizer,
    )
