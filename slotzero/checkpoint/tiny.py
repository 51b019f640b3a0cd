"""Tiny models with random weights, for tests and for trying out the engine without a download.

They have a few hundred kilobytes. Their output is meaningless, but always the same. Their tokens
are bytes, so any text can be a prompt. See models/families/tiny.py for the shapes.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

from slotzero.checkpoint.dummy import DummyCheckpoint
from slotzero.checkpoint.place import TINY_PREFIX, TinyModel
from slotzero.errors import ModelNotFoundError
from slotzero.models.families import gemma4_assistant
from slotzero.models.families.family import families


def tiny_configs() -> Mapping[str, Mapping[str, Any]]:
    """Return the configs of all tiny models by name."""
    return {name: config for f in families().values() for name, config in f.tiny.items()}


def tiny_names() -> list[str]:
    return [TINY_PREFIX + kind for kind in tiny_configs()]


def tiny_checkpoint(name: str) -> DummyCheckpoint:
    config = {**tiny_configs(), **gemma4_assistant.TINY}.get(name.removeprefix(TINY_PREFIX))
    if config is None:
        near = get_close_matches(name, tiny_names(), n=3, cutoff=0.4)
        raise ModelNotFoundError(
            f"no tiny model {name!r}; use {', '.join([*near, TINY_PREFIX + 'llama'])} or another "
            "one that docs/models.md lists"
        )
    return DummyCheckpoint(
        config,
        name,
        eos_token_ids=(config["eos_token_id"],),
        make_tokenizer=TinyModel(name).tokenizer,
    )
