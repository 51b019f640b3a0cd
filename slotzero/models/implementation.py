"""Which implementation runs a model: a family of this package, or the bridge to transformers."""

import json
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal

from slotzero.errors import ConfigError, UnsupportedModelError
from slotzero.models.bridge.config import BridgedConfig
from slotzero.models.families.family import architecture_in, families, family_of, parse_config
from slotzero.models.model import ModelShape
from slotzero.quantization.quantization import parse_quantization

Config = Mapping[str, Any]
Implementation = Literal["slotzero", "transformers"]


def implementation_of(config: Config, wanted: str) -> Implementation:
    """Return what runs the model that a config.json names: its family, if it has one, unless the
    setting `model_impl` says otherwise."""
    if wanted == "auto":
        return "slotzero" if architecture_in(config) in families() else "transformers"
    return "transformers" if wanted == "transformers" else "slotzero"


def parse_model(config: Config, wanted: str) -> ModelShape:
    """Return what the engine must know of a model; refuse by name what cannot run."""
    if implementation_of(config, wanted) == "slotzero":
        return parse_config(config)
    try:
        return _examined(json.dumps(config, sort_keys=True, default=str))
    except (UnsupportedModelError, ConfigError) as error:
        if wanted != "auto":
            raise
        raise type(error)(
            f"architecture {architecture_in(config)!r} is not supported: it is no family of "
            f"Slotzero (`slotzero models` lists them), and the bridge to transformers cannot run "
            f"it: {error}"
        ) from error


def refuse_unknown(config: Config, wanted: str) -> None:
    """Raise if the architecture or the quantisation is not supported, before weights are read."""
    if implementation_of(config, wanted) == "slotzero":
        family_of(config)
        parse_quantization(config)
    else:
        parse_model(config, wanted)


@cache
def _examined(config: str) -> BridgedConfig:
    """Examine a model once, although several parts of the engine ask."""
    from slotzero.models.bridge.probe import examine

    return examine(json.loads(config))
