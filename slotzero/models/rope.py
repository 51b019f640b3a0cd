"""Rotary position embedding (RoPE): frequencies for each scaling rule.

The graph computes angles from positions, so no table limits the context length. Angles depend on
the position alone, except with `dynamic` and `longrope` scaling: there also on the length of the
request's prompt, but never on other requests. With longrope, a token has the angles of long
contexts if the request's context, prompt included, is longer than the original one; keys that are
stored keep the angles that they were stored with. So does one request in transformers' forward
pass (its `generate` computes all keys again when a context grows beyond the original length).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from slotzero.errors import UnsupportedModelError
from slotzero.kernels.types import Angles, Tokens
from slotzero.models.fields import mapping


@dataclass(frozen=True)
class RopeConfig:
    kind: str  # default, proportional, linear, dynamic, llama3, yarn, longrope; none: no rotation
    theta: float
    head_dim: int
    rotary_dim: int
    """Number of dimensions of each head that are rotated: the first dimensions, or, with
    `proportional` scaling, the first pairs."""
    original_max_position: int
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    is_interleaved: bool = False
    """Whether the checkpoint stores the two elements of a rotated pair next to each other."""
    short_factor: tuple[float, ...] = ()  # longrope: divides the frequency of each rotated pair
    long_factor: tuple[float, ...] = ()
    """The same in contexts longer than original_max_position."""
    query_beta: float = 0.0
    """Queries are multiplied by 1 + beta * ln(1 + floor((position + offset) / interval))."""
    query_offset: int = 0
    query_interval: int = 1

    def extended(self, max_position: int) -> int:
        """Return the context length with this scaling.

        With linear, llama3 or longrope scaling, max_position_embeddings already includes it.
        """
        if self.kind in ("dynamic", "yarn"):
            return max(max_position, int(self.original_max_position * self.factor))
        return max_position

    @property
    def depends_on_prompt(self) -> bool:
        """Whether a prompt's keys differ from those of the same tokens in a longer prompt."""
        return self.kind in ("dynamic", "longrope")


_FIELDS: Mapping[str, set[str]] = {
    "default": set(),
    "none": set(),
    "proportional": {"factor"},
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
        "mscale",
        "mscale_all_dim",
    },
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
}
_PARTIAL = ("default", "proportional", "longrope")
"""The rules that are implemented for heads that are rotated in part."""


def refuse_two_ropes(config: Mapping[str, Any]) -> None:
    """Raise if rope_parameters and rope_scaling disagree.

    rope_parameters is the newer name. Many model pages tell users to add rope_scaling, so it must
    not be ignored silently.
    """
    newer, older = (_normalized(mapping(config, f"rope_{n}")) for n in ("parameters", "scaling"))
    newer = _normalized(mapping(newer, "full_attention")) or newer
    if newer and older and any(newer.get(field) != older[field] for field in older):
        raise UnsupportedModelError(
            "config fields rope_parameters and rope_scaling contradict each other: put the "
            "intended values into rope_parameters and remove rope_scaling"
        )


def _normalized(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy in which the scaling rule is always named `rope_type`, never `type`."""
    if not given:
        return {}
    kind = given.get("rope_type") or given.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its first name
    return {name: given[name] for name in given if name != "type"} | {"rope_type": kind}


def parse_rope(config: Mapping[str, Any], head_dim: int, max_position: int) -> RopeConfig:
    """Read the RoPE fields of a config; raise on a rule or field that is not implemented."""
    given = _normalized(mapping(config, "rope_parameters") or mapping(config, "rope_scaling"))
    kind = given.pop("rope_type", "default")
    theta = given.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
    rotary_dim = int(head_dim * (given.pop("partial_rotary_factor", None) or 1.0))
    if kind == "proportional":
        rotary_dim -= rotary_dim % 2
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise UnsupportedModelError(
            f"rope field partial_rotary_factor rotates {rotary_dim} of {head_dim} dimensions: "
            f"the number must be even, and from 2 to {head_dim}"
        )
    if rotary_dim < head_dim and kind not in _PARTIAL:
        raise UnsupportedModelError(
            f"rope field partial_rotary_factor is not implemented with rope scaling {kind!r}"
        )
    if kind not in _FIELDS:
        raise UnsupportedModelError(
            f"rope scaling {kind!r} is not implemented; implemented: {', '.join(_FIELDS)}"
        )
    unknown = {field for field in given if given[field] is not None} - _FIELDS[kind]
    if unknown:
        raise UnsupportedModelError(
            f"rope scaling {kind!r}: field {', '.join(sorted(unknown))} is not implemented"
        )
    original = given.get("original_max_position_embeddings") or max_position
    if kind == "dynamic":
        original = max_position  # the base grows from this length on, regardless of the field
    is_ratio = kind in ("yarn", "longrope")
    factor = float(given.get("factor") or (max_position / original if is_ratio else 1.0))
    known: dict[str, Any] = {
        field: float(given[field])
        for field in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if given.get(field) is not None
    }
    if kind == "longrope":
        known |= _pair_factors(given, rotary_dim // 2)
    return RopeConfig(
        kind=kind,
        theta=float(theta),
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        original_max_position=int(original),
        factor=factor,
        truncate=bool(given.get("truncate", True)),
        attention_factor=_attention_factor(kind, given, factor, original) if is_ratio else 1.0,
        **known,
    )


def _pair_factors(given: Mapping[str, Any], num_pairs: int) -> dict[str, tuple[float, ...]]:
    """Read the factors of longrope, one per rotated pair."""
    found = {}
    for field in ("short_factor", "long_factor"):
        factors = given.get(field)
        if not isinstance(factors, list) or len(factors) != num_pairs:
            raise UnsupportedModelError(
                f"rope scaling 'longrope': field {field} must have one number for each of "
                f"{num_pairs} rotated pairs"
            )
        found[field] = tuple(float(factor) for factor in factors)
    return found


def _attention_factor(kind: str, given: Mapping[str, Any], factor: float, original: int) -> float:
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    if given.get("mscale") and given.get("mscale_all_dim"):
        return _mscale(factor, given["mscale"]) / _mscale(factor, given["mscale_all_dim"])
    return _mscale(factor)


def _mscale(scale: float, weight: float = 1.0) -> float:
    return 0.1 * weight * math.log(scale) + 1.0 if scale > 1 else 1.0


def correction(config: Mapping[str, Any], rope: RopeConfig) -> float:
    """Return the factor on queries and on keys that is not part of cos and sin (mscale_all_dim)."""
    given = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    weight = given.get("mscale_all_dim")
    return _mscale(rope.factor, weight) if rope.kind != "default" and weight else 1.0


def frequencies(rope: RopeConfig) -> Tensor:
    """Return each pair's rotation per position in radians: [head_dim / 2], float32 on the CPU.

    With longrope, [2, head_dim / 2]: in short and in long contexts.
    """
    whole = rope.head_dim if rope.kind == "proportional" else rope.rotary_dim
    exponent = torch.arange(0, rope.rotary_dim, 2, dtype=torch.int64).float() / whole
    unscaled = 1.0 / (rope.theta**exponent)
    if rope.kind == "none":
        return torch.zeros_like(unscaled)
    if rope.kind == "longrope":
        unscaled = 1.0 / (
            torch.tensor([rope.short_factor, rope.long_factor]) * rope.theta**exponent
        )
    if rope.rotary_dim < rope.head_dim:  # the other dimensions have frequency 0
        unscaled = F.pad(unscaled, (0, (rope.head_dim - rope.rotary_dim) // 2))
    if rope.kind in ("linear", "proportional"):
        return unscaled / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, unscaled)
    if rope.kind == "yarn":
        return _yarn(rope, unscaled)
    return unscaled


def halves(rope: RopeConfig) -> list[int] | None:
    """Return the order in which to load the rows of a head; None: as in the checkpoint.

    Kernels expect the two elements of a rotated pair half a head apart, even if only some
    dimensions of the head are rotated.
    """
    half, rotated = rope.head_dim // 2, rope.rotary_dim // 2
    unrotated = list(range(rope.rotary_dim, rope.head_dim))
    if rope.is_interleaved:
        pairs = [*range(0, rope.rotary_dim, 2)], [*range(1, rope.rotary_dim, 2)]
    elif rotated == half or rope.kind == "proportional":
        return None
    else:
        pairs = [*range(rotated)], [*range(rotated, rope.rotary_dim)]
    first = [*pairs[0], *unrotated[: half - rotated]]
    return [*first, *pairs[1], *unrotated[half - rotated :]]


def _llama3(rope: RopeConfig, unscaled: Tensor) -> Tensor:
    """Stretch long wavelengths, keep short ones, and interpolate between the two."""
    wavelength = 2 * math.pi / unscaled
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    span = rope.high_freq_factor - rope.low_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / span
    blended = (1 - blend) * unscaled / rope.factor + blend * unscaled
    stretched = torch.where(wavelength > longest, unscaled / rope.factor, unscaled)
    between = (wavelength >= shortest) & (wavelength <= longest)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, unscaled: Tensor) -> Tensor:
    """Interpolate linearly over the pairs: fast rotations are kept, slow ones are stretched."""

    def pair_of(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return rope.head_dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.head_dim - 1)
    pairs = torch.arange(rope.head_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    return unscaled / rope.factor * ramp + unscaled * (1 - ramp)


def speeds(
    rope: RopeConfig, frequency: Tensor, slots: Tensor, positions: Tensor, prompt_len: Tensor
) -> Tensor:
    """Return the rotation per position in radians: [head_dim / 2], or [T, head_dim / 2] if it
    depends on the token.

    `slots` and `positions` are [T], `prompt_len` is [slots + 1]. The context of a token is the
    whole prompt at first, then it grows token by token.
    """
    if not rope.depends_on_prompt:
        return frequency
    context_len = torch.maximum(positions + 1, prompt_len[slots])
    if rope.kind == "longrope":
        is_long = (context_len > rope.original_max_position)[:, None]
        return torch.where(is_long, frequency[1], frequency[0])
    return _dynamic(rope, context_len.clamp_min(rope.original_max_position))


def query_angles(rope: RopeConfig, tokens: Tokens, angles: Angles) -> Angles | None:
    """Return the angles of queries, if they differ from those of keys; see query_beta."""
    if not rope.query_beta:
        return None
    times = (tokens.positions + rope.query_offset) // rope.query_interval
    scale = (1 + rope.query_beta * torch.log(1.0 + times))[:, None, None]
    return Angles(angles.cos * scale, angles.sin * scale)


def _dynamic(rope: RopeConfig, context_len: Tensor) -> Tensor:
    """Grow the base with the context length."""
    ratio = rope.factor * context_len.float() / rope.original_max_position - (rope.factor - 1)
    theta = rope.theta * ratio ** (rope.head_dim / (rope.head_dim - 2))  # [T]
    exponent = torch.arange(0, rope.head_dim, 2, device=theta.device).float() / rope.head_dim
    return 1.0 / theta[:, None] ** exponent
