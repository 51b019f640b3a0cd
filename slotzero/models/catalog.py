"""The supported models: families of this package, and what is known to run over the bridge."""

from typing import NamedTuple

from slotzero.models.bridge.tried import TRIED
from slotzero.models.config import FULL, LATENT, SLIDING, ModelConfig
from slotzero.models.families.family import Family, families, parse_config

_ATTENTION = {FULL: "full", SLIDING: "sliding window", LATENT: "MLA"}


class CatalogRow(NamedTuple):
    architecture: str
    model_type: str
    layers: str
    """What its layers are made of, as in its tiny models."""
    tiny: str
    """Names of its tiny models."""


def family_rows() -> list[CatalogRow]:
    """Return the families of this package and registered ones, by architecture."""
    return [_row(families()[name]) for name in sorted(families(), key=str.lower)]


def multimodal_names() -> list[str]:
    """Return the multimodal architectures whose language model is one of the families."""
    return sorted({name for family in families().values() for name in family.multimodal})


def bridged_only() -> list[str]:
    """Return the architectures that are known to run over the bridge and have no family."""
    return [name for name in sorted(TRIED, key=str.lower) if name not in families()]


def _row(family: Family) -> CatalogRow:
    parts: dict[str, None] = {}
    for config in family.tiny.values():
        parts |= dict.fromkeys(_parts(parse_config(config)))
    tiny = ", ".join(f"tiny:{name}" for name in family.tiny)
    return CatalogRow(family.architecture, family.model_type, ", ".join(parts), tiny)


def _parts(model: ModelConfig) -> list[str]:
    found = [_ATTENTION.get(group.name, group.name) for group in model.groups]
    features = {
        "recurrent layers": model.recurrent is not None,
        "experts": model.experts is not None,
        "MTP layers": model.mtp is not None,
    }
    return [*found, *(name for name, has in features.items() if has)]
